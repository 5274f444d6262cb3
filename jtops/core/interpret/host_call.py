"""Calling a NumPy function from a compiled CPU program: an XLA FFI handler written with ctypes.

jax.pure_callback would do, but for two things: a callback cannot be emitted while XLA partitions a program (custom_partitioning
drops it), and it puts an index into the program's text. This handler is one registered name; the function is found by a content
key, so the text is stable and the call works wherever a custom call does. The structures are XLA's stable C interface
(xla/ffi/api/c_api.h, API version 0.1 and later), which jaxlib ships.
"""

import atexit
import collections
import contextlib
import ctypes
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import jax
import numpy as np

TARGET = "jtops_host_call"
_INTERNAL_ERROR, _METADATA = 13, 1


def _struct(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_HEAD: dict[str, Any] = {"struct_size": c_size_t, "extension": c_void_p}
_Extension = _struct("Extension", struct_size=c_size_t, kind=c_int, next=c_void_p)
_Version = _struct("Version", **_HEAD, major=c_int, minor=c_int)
_Metadata = _struct("Metadata", struct_size=c_size_t, version=_Version, traits=c_uint32, state_type=c_int64)
_MetadataExtension = _struct("MetadataExtension", base=_Extension, metadata=POINTER(_Metadata))
_ErrorArgs = _struct("ErrorArgs", **_HEAD, message=c_char_p, code=c_int)
_MakeError = ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArgs))
_Api = _struct("Api", **_HEAD, version=_Version, internal=c_void_p, make_error=_MakeError)
_Buffer = _struct("Buffer", **_HEAD, dtype=c_int, data=c_void_p, rank=c_int64, dims=POINTER(c_int64))
_Span = _struct("Span", ptr=c_void_p, size=c_size_t)
_Buffers = _struct("Buffers", **_HEAD, size=c_int64, kinds=c_void_p, items=POINTER(POINTER(_Buffer)))
_Attributes = _struct("Attributes", **_HEAD, size=c_int64, kinds=c_void_p, names=c_void_p, items=POINTER(POINTER(_Span)))
_Frame = _struct(
    "Frame",
    **_HEAD,
    api=POINTER(_Api),
    context=c_void_p,
    stage=c_int,
    operands=_Buffers,
    results=_Buffers,
    attributes=_Attributes,
    future=c_void_p,
)

_functions: collections.OrderedDict[bytes, tuple[Callable, list, list]] = collections.OrderedDict()  # the last used come last
_KEPT = 1 << 14  # nobody tells when XLA drops a program: those that have not run for longest give way


def _array(buffer, dtype: np.dtype) -> np.ndarray:
    shape = tuple(buffer.dims[i] for i in range(buffer.rank))
    if 0 in shape:
        return np.empty(shape, dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(buffer.data), dtype).reshape(shape)


@ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))
def _handler(frame_pointer):
    frame = frame_pointer.contents
    if frame.extension:
        extension = ctypes.cast(frame.extension, POINTER(_MetadataExtension)).contents
        if extension.base.kind == _METADATA:  # XLA asks which version of its interface this was written for
            extension.metadata.contents.version.major, extension.metadata.contents.version.minor = 0, 1
            return None
    span = frame.attributes.items[0].contents
    key = ctypes.string_at(span.ptr, span.size)
    with _running:
        _running.count += 1
        found = _functions.get(key)
        if found is not None:
            _functions.move_to_end(key)
    try:
        if found is None:
            raise RuntimeError(
                f"interpreted kernel {key.decode()} was traced in another process, or {_KEPT} others have run since it did last; "
                "trace it in this one, after jax.clear_caches()."
            )
        function, operand_types, result_types = found
        operands = [_array(frame.operands.items[i].contents, t) for i, t in enumerate(operand_types)]
        results = [_array(frame.results.items[i].contents, t) for i, t in enumerate(result_types)]
        function(operands, results)
        return None
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".encode()
        return frame.api.contents.make_error(_ErrorArgs(ctypes.sizeof(_ErrorArgs), None, message, _INTERNAL_ERROR))
    finally:
        with _running:
            _running.count -= 1
            _running.notify_all()


class _Running(threading.Condition):
    """The number of handlers that run at this moment."""

    count = 0


_running = _Running()


@atexit.register
def _finish() -> None:
    """Let interpreted programs end before Python does: a thread of XLA that calls into a closing Python hangs or aborts.

    Results that a program has not yet returned count as live, and a handler that has begun is awaited if its result was dropped,
    too.
    """
    for array in jax.live_arrays("cpu") if _functions else ():
        with contextlib.suppress(Exception):  # whoever asked for the array was told, or nobody did
            array.block_until_ready()
    with _running:
        _running.wait_for(lambda: _running.count == 0)


jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(ctypes.cast(_handler, c_void_p)), platform="cpu", api_version=1)


def lower(ctx, *operands, key: str, function: Callable[[list[np.ndarray], list[np.ndarray]], None], has_side_effect: bool = False):
    """Lower to a call of ``function(operands, results)`` at run time. `key` must determine `function` by content."""
    types = [[np.dtype(a.dtype) for a in avals] for avals in (ctx.avals_in, ctx.avals_out)]
    with _running:
        _functions[key.encode()] = (function, types[0], types[1])
        _functions.move_to_end(key.encode())
        while len(_functions) > _KEPT:
            _functions.popitem(last=False)
    return jax.ffi.ffi_lowering(TARGET, has_side_effect=has_side_effect)(ctx, *operands, key=key)
