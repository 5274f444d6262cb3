"""Older names of triton_call's keywords."""

import inspect
import numbers
from typing import Any

import jax

from jtops.core.target import Target, requested

_KEYWORDS = ("out_shape", "enable_fp_fusion", "device", "custom_call_target_name")
_TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi")


def keywords(kernel, kwargs: dict[str, Any], out_type, backend_options, compute_capability) -> tuple[dict[str, Any], Any, Any, Any]:
    """triton_call's arguments with older keywords turned into today's.

    ``out_shape`` is `out_type`. ``enable_fp_fusion`` is an entry of `backend_options`. ``device``, the number of a GPU of this
    process, is that GPU's `compute_capability` if no other target is named. ``custom_call_target_name`` is checked and means
    nothing more. A keyword that the kernel has as a parameter is the kernel's.
    """
    given = {k: kwargs[k] for k in _KEYWORDS if k in kwargs}
    if given:
        names = _parameters(kernel)
        given = {k: v for k, v in given.items() if k not in names}
        kwargs = {k: v for k, v in kwargs.items() if k not in given}
    if "out_shape" in given:
        if out_type is not None:
            raise TypeError("triton_call: out_type and out_shape, its older name, are both given.")
        out_type = given["out_shape"]
    if "enable_fp_fusion" in given:
        options, wanted = dict(backend_options or {}), bool(given["enable_fp_fusion"])
        if options.setdefault("enable_fp_fusion", wanted) != wanted:
            raise ValueError(f"triton_call: enable_fp_fusion={wanted} but backend_options has enable_fp_fusion={not wanted}.")
        backend_options = options
    if given.get("custom_call_target_name", _TARGETS[0]) not in _TARGETS:
        raise ValueError(
            f"triton_call: custom_call_target_name must be one of {', '.join(map(repr, _TARGETS))}, which are launched alike; got "
            f"{given['custom_call_target_name']!r}."
        )
    if "device" in given and compute_capability is None and requested() is None:
        compute_capability = _capability_of(given["device"])
    return kwargs, out_type, backend_options, compute_capability


def _parameters(kernel) -> set[str]:
    while hasattr(kernel, "fn"):  # @triton.jit under any decorators
        kernel = kernel.fn
    return set(inspect.signature(kernel).parameters) if callable(kernel) else set()


def _capability_of(index) -> str | None:
    if not isinstance(index, numbers.Integral) or isinstance(index, bool) or int(index) < 0:
        raise ValueError(f"triton_call: device must be the number of a GPU of this process; got {index!r}.")
    for platform in ("cuda", "rocm"):
        try:
            devices = jax.local_devices(backend=platform)
        except RuntimeError:  # no such platform in this process
            continue
        if int(index) >= len(devices):
            raise ValueError(f"triton_call: device={index}, but this process has {len(devices)} {platform} devices.")
        return str(Target.parse(str(getattr(devices[int(index)], "compute_capability")).split(":", maxsplit=1)[0]))  # noqa: B009
    return None
