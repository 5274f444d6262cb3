"""User settings: each is a context manager, a ``jax.config`` option and a ``JTOPS_*`` environment variable.

    with jtops.config.implementation("interpret"):      # this thread, this block
        y = jtops.softmax(x)
    jax.config.update("jtops_implementation", "xla")    # whole process
    JTOPS_IMPLEMENTATION=xla python train.py            # from outside

``jtops.config.implementation.value`` reads the value in force. To lower or export for a GPU that is not there:

    with jtops.config.target("sm_90"):
        lowered = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))
        exported = jax.export.export(jax.jit(f), platforms=("cuda",), disabled_checks=jtops.export_checks)(x)

(JAX has to be told that a program may hold launches, which it knows nothing about. A program that must load in later versions of
XLA is better exported under ``jtops.config.launch("ffi")``, which is jaxlib's own interface.)

With ``jtops.config.launch("ptx")`` the name to allow is ``"__gpu$xla.gpu.ptx"``.
(A program for an AMD GPU holds the path of a file that lives as long as this process: lower it, do not export it.)

Every setting here changes what is traced, so every one is part of JAX's jit key *and* of its trace context: with either
alone, or with a plain global, a jitted function silently keeps the choice it was first traced with.
"""

import os
import re
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from jtops._compat import jax as jax_compat

__all__ = [
    "Implementation",
    "Setting",
    "deterministic",
    "flax_fallback",
    "implementation",
    "interpret",
    "is_deterministic",
    "launch",
    "target",
    "tuning",
]

Implementation = Literal["triton", "xla", "interpret"]


class Setting[T](Protocol):
    """A setting: calling it gives a context manager in which it has another value; `value` is the one in force."""

    @property
    def value(self) -> T | None:
        """The value in force; None is the library's choice."""

    def __call__(self, value: T | None, /) -> AbstractContextManager[Any]:
        """Context manager that sets this value for this thread and block."""


implementation: Setting[Implementation] = jax_compat.config_state(
    "jtops_implementation",
    "How ops run where the call itself does not say: 'triton' (the kernel; needs a GPU), 'xla' (the plain jax.numpy "
    "reference), 'interpret' (the kernel, interpreted with NumPy on the host), or None: Triton on GPUs, XLA elsewhere.",
    values=("triton", "xla", "interpret"),
)

TARGETS = "an architecture, such as 'sm_90' (H100, H200), 'sm_100' (B200) or 'gfx942' (MI300X)"

target: Setting[str] = jax_compat.config_state(
    "jtops_target",
    "GPU to compile kernels for, such as 'sm_90' or 'gfx942', where it is not the device that runs them: for export and "
    "lowering on a machine without that GPU. None: the device itself.",
    pattern=r"(sm_?)?1?\d{2}a?|1?\d\.\d|gfx[0-9a-f]{3,4}",
    pattern_means=TARGETS,
)

tuning: Setting[Literal["cached", "always", "never"]] = jax_compat.config_state(
    "jtops_tuning",
    "When the configs of a kernel under @triton.autotune are timed: 'always' (once in every process), 'never' (the table on disk, "
    "else the first config that compiles), or 'cached', the same as None (the table on disk, else timed, where there is a GPU).",
    values=("cached", "always", "never"),
)

launch: Setting[Literal["ffi", "ptx"]] = jax_compat.config_state(
    "jtops_launch",
    "How compiled programs launch kernels on NVIDIA GPUs: 'ffi' (jaxlib's Triton call, which serves every kernel), 'ptx' (XLA's "
    "own PTX call, cheaper for the host; an error where a kernel does not fit it), or None: the library's choice.",
    values=("ffi", "ptx"),
)


flax_fallback: Setting[Literal["allow", "error"]] = jax_compat.config_state(
    "jtops_flax_fallback",
    "What a layer of jtops.linen or jtops.nnx does with a call that no op serves: 'allow', the same as None (Flax's own code "
    "computes it, and jtops.explain lists it with the reason), or 'error' (UnsupportedError, which says the reason).",
    values=("allow", "error"),
)


deterministic: Setting[Literal["on", "off"]] = jax_compat.config_state(
    "jtops_deterministic",
    "Whether every result has the same bits every time: 'on'; 'off' (gradients of queries in flash_attention may be summed in an "
    "order that differs from run to run, where that is faster); or None: 'on' if XLA was told so by --xla_gpu_deterministic_ops or "
    "--xla_gpu_exclude_nondeterministic_ops in XLA_FLAGS, else 'off'.",
    values=("on", "off"),
)


def is_deterministic() -> bool:
    """The value of `deterministic`, or what XLA's own flags say where it is None."""
    if deterministic.value is not None:
        return deterministic.value == "on"
    flag = r"--xla_gpu_(deterministic_ops|exclude_nondeterministic_ops)(=(true|1))?(\s|$)"
    return re.search(flag, os.environ.get("XLA_FLAGS", "")) is not None


def interpret() -> AbstractContextManager[Any]:
    """Context manager that runs kernels in the interpreter: the same as ``implementation("interpret")``."""
    return implementation("interpret")
