"""Which GPU a kernel is compiled for: the device that will run it, or a named one."""

import dataclasses
import re

import jax

from jtops import config
from jtops._compat import triton as triton_compat
from jtops.errors import UnsupportedError

# Shared memory one program may use, bytes. NVIDIA: CUDA programming guide, table "technical specifications per compute
# capability"; AMD: LDS per workgroup of the CDNA3 and CDNA4 ISA guides.
_KIB = 1024
MAX_SHARED_BYTES: dict[int | str, int] = {
    75: 64 * _KIB, 80: 163 * _KIB, 86: 99 * _KIB, 87: 163 * _KIB, 89: 99 * _KIB, 90: 227 * _KIB,
    100: 227 * _KIB, 103: 227 * _KIB, 110: 227 * _KIB, 120: 99 * _KIB, 121: 99 * _KIB,
    "gfx90a": 64 * _KIB, "gfx942": 64 * _KIB, "gfx950": 160 * _KIB,
}  # fmt: skip

# Multiprocessors of the largest GPU that is sold of an architecture, which launchers fill. From NVIDIA's and AMD's data sheets.
_MULTIPROCESSORS: dict[int | str, int] = {
    75: 72, 80: 108, 86: 84, 87: 16, 89: 142, 90: 132, 100: 148, 103: 148, 110: 20, 120: 188, 121: 48,
    "gfx90a": 110, "gfx942": 304, "gfx950": 256,
}  # fmt: skip

# What JAX calls a device that is described but not present (jax.sharding.AbstractDevice).
_DEVICE_KINDS: dict[str, int | str] = {
    "A100": 80, "A10": 86, "A40": 86, "RTX 30": 86, "L4": 89, "L40": 89, "RTX 40": 89, "H100": 90, "H200": 90, "GH200": 90,
    "B100": 100, "B200": 100, "GB200": 100, "B300": 103, "GB300": 103, "RTX 50": 120, "RTX PRO 6000": 120, "GB10": 121,
    "MI300": "gfx942", "MI325": "gfx942", "MI350": "gfx950", "MI355": "gfx950",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One GPU architecture: compute capability as an int (CUDA), or a ``gfx`` name (ROCm)."""

    arch: int | str

    @classmethod
    def parse(cls, text: "int | float | str | Target") -> "Target":
        """The target that ``90``, ``"90"``, ``"9.0"``, ``"sm_90"``, ``"sm_90a"`` or ``"gfx942"`` names; a target names itself."""
        if isinstance(text, Target):
            return text
        name = str(text).strip().lower()
        if re.fullmatch(r"gfx[0-9a-f]{3,4}", name):
            return cls(name)
        if match := re.fullmatch(r"(?:sm_?)?(1?\d)\.?(\d)a?", name):  # 90.0 is no major and minor number
            return cls(int(match[1] + match[2]))
        raise ValueError(f"GPU target {text!r} is not understood; write {config.TARGETS}.")

    @property
    def platform(self) -> str:
        """JAX's platform name."""
        return "cuda" if isinstance(self.arch, int) else "rocm"

    @property
    def has_clusters(self) -> bool:
        """Whether programs can run together in thread block clusters."""
        return isinstance(self.arch, int) and self.arch >= 90

    @property
    def max_shared_bytes(self) -> int:
        """Shared memory available to one program."""
        return MAX_SHARED_BYTES.get(self.arch, 48 * _KIB if self.platform == "cuda" else 64 * _KIB)

    @property
    def multiprocessors(self) -> int:
        """The number of programs that run at once on the largest GPU of this architecture if each takes a whole multiprocessor."""
        return _MULTIPROCESSORS.get(self.arch, 128)

    @property
    def gpu_target(self):
        """Triton's own record of the target."""
        if self.platform == "cuda":
            return triton_compat.GPUTarget("cuda", self.arch, 32)
        return triton_compat.GPUTarget("hip", self.arch, 64 if str(self.arch).startswith("gfx9") else 32)

    def __str__(self):
        return f"sm_{self.arch}" if self.platform == "cuda" else str(self.arch)


def _of_abstract_device(device) -> Target | None:
    if device is None:
        return None
    kind = str(device.device_kind)
    if kind.startswith(("gfx", "sm_")):
        return Target.parse(kind.split(":", maxsplit=1)[0])
    found = [name for name in _DEVICE_KINDS if name in kind]
    return Target(_DEVICE_KINDS[max(found, key=len)]) if found else None


def requested() -> Target | None:
    """The target that the user's context names, for a call to carry from trace to lowering."""
    if config.target.value is not None:
        return Target.parse(config.target.value)
    return _of_abstract_device(getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None))


def resolve(platform: str, named: Target | None) -> Target:
    """The target to compile for when lowering for `platform`: the one named, else this process' own GPU."""
    found = named if named is not None else next(map(of_device, gpus(platform)), None)
    if found is None:
        raise UnsupportedError(
            f"lowering a Triton kernel for {platform} needs to know the GPU, and this process has none. Name it: "
            f"`with jtops.config.target({'"sm_90"' if platform == 'cuda' else '"gfx942"'}):` around the call that traces."
        )
    if found.platform != platform:
        raise UnsupportedError(f"lowering for {platform}, but the target asked for is {found}, a {found.platform} GPU.")
    return found


def assumed(named: Target | None) -> Target:
    """The target whose limits shape a launch that compiles nothing: the interpreter's."""
    return Target(90) if named is None else named


def gpus(platform: str) -> list[jax.Device]:
    """This process' devices that run programs for `platform`."""
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # no such platform in this process
        return []


def of_device(device) -> Target | None:
    """The target of a GPU of this process; None for a device that does not say."""
    capability = getattr(device, "compute_capability", None)
    return Target.parse(str(capability).split(":", maxsplit=1)[0]) if capability else None


def present() -> jax.Device | None:
    """The first GPU of this process, None where JAX computes on something else."""
    backend = jax.default_backend()
    devices = gpus(backend) if backend in ("gpu", "cuda", "rocm") else []
    return next((device for device in devices[:1] if of_device(device) is not None), None)


def device_kind(platform: str) -> str | None:
    """The name of this process' GPU that runs programs for `platform`; None if there is none."""
    return next((str(device.device_kind) for device in gpus(platform)), None)
