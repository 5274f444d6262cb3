"""Programs lowered for a GPU that is not there."""

import collections
import re
import zlib
from unittest import mock

import jax

import jtops
from jtops.core.compile.kernel import compile_kernel
from jtops.core.launch import lowering

CALL = r"custom_call @(?:triton_kernel_call_ffi|__gpu\$xla\.gpu\.ptx)"  # a launch, by either path


def text(f, *operands, target="sm_90", platform="cuda") -> str:
    with jtops.config.target(target):
        f = f if hasattr(f, "trace") else jax.jit(f)
        return f.trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def kernels(f, *operands, **how) -> list:
    """The compiled kernels that lowering `f` asks for."""
    asked = []

    def noted(*args):
        asked.append(compile_kernel(*args))
        return asked[-1]

    with mock.patch.object(lowering, "compile_kernel", noted):
        text(f, *operands, **how)
    return asked


def record(opaque: str) -> bytes:
    """The launch record inside the attribute of a custom call."""
    raw = re.sub(rb"\\([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), opaque.replace("\\\\", "\\5C").encode("latin-1"))
    return zlib.decompress(raw)


def launched_name(opaque: str) -> str:
    return re.search(rb"(\w+)\Z", record(opaque))[1].decode()  # the last field of the record


def launches(f, *operands, **how) -> collections.Counter:
    """How often one run of `f` launches each kernel, by name. Equal launches share one function of the module."""
    bodies = dict(re.findall(r"func\.func \w+ @([\w.$]+)\((.*?)(?=\n  func\.func|\Z)", text(f, *operands, **how), re.DOTALL))
    count: collections.Counter = collections.Counter()

    def walk(name):
        calls = r'(?<!custom_)call @([\w.$]+)\(|opaque = "((?:[^"\\]|\\.)*)"|launch_name = \\22(\w+)\\22'  # by either launch path
        for callee, opaque, launched in re.findall(calls, bodies[name]):
            if opaque or launched:
                count[launched or launched_name(opaque)] += 1
            else:
                walk(callee)

    walk("main")
    return count
