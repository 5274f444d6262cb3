"""Older names of triton_call's keywords."""

import dataclasses
import inspect
import numbers
from typing import Any

from jtops.core.launch.request import Request
from jtops.core.target import Target, gpus, of_device, requested

_KEYWORDS = ("out_shape", "enable_fp_fusion", "device", "custom_call_target_name")
_TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi")


def renamed(request: Request) -> Request:
    """Turn older keywords of `request`, which stand among the kernel's own, into today's.

    ``out_shape`` is `out_type`. ``enable_fp_fusion`` is an entry of `backend_options`. ``device``, the number of a GPU of this
    process, is that GPU's `compute_capability` if no other target is named. ``custom_call_target_name`` is checked and means
    nothing more. A keyword that the kernel has as a parameter is the kernel's.
    """
    older = [k for k in _KEYWORDS if k in request.kwargs]
    names = _parameters(request.kernel) if older else set()
    given = {k: request.kwargs[k] for k in older if k not in names}
    if not given:
        return request
    changes: dict[str, Any] = {"kwargs": {k: v for k, v in request.kwargs.items() if k not in given}}
    if "out_shape" in given:
        if request.out_type is not None:
            raise TypeError("triton_call: out_type and out_shape, its older name, are both given.")
        changes["out_type"] = given["out_shape"]
    if "enable_fp_fusion" in given:
        options, wanted = dict(request.backend_options or {}), bool(given["enable_fp_fusion"])
        if options.setdefault("enable_fp_fusion", wanted) != wanted:
            raise ValueError(f"triton_call: enable_fp_fusion={wanted} but backend_options has enable_fp_fusion={not wanted}.")
        changes["backend_options"] = options
    if given.get("custom_call_target_name", _TARGETS[0]) not in _TARGETS:
        raise ValueError(
            f"triton_call: custom_call_target_name must be one of {', '.join(map(repr, _TARGETS))}, which are launched alike; got "
            f"{given['custom_call_target_name']!r}."
        )
    if "device" in given and request.compute_capability is None and requested() is None:
        changes["compute_capability"] = _target_of(given["device"])
    return dataclasses.replace(request, **changes)


def _parameters(kernel) -> set[str]:
    while hasattr(kernel, "fn"):  # @triton.jit under any decorators
        kernel = kernel.fn
    return set(inspect.signature(kernel).parameters) if callable(kernel) else set()


def _target_of(index) -> Target | None:
    if not isinstance(index, numbers.Integral) or isinstance(index, bool) or int(index) < 0:
        raise ValueError(f"triton_call: device must be the number of a GPU of this process; got {index!r}.")
    for platform in ("cuda", "rocm"):
        if devices := gpus(platform):
            if int(index) >= len(devices):
                raise ValueError(f"triton_call: device={index}, but this process has {len(devices)} {platform} devices.")
            return of_device(devices[int(index)])
    return None
