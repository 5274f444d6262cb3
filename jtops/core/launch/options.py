"""The options of Triton's compiler that a call names."""

import difflib
import numbers
from typing import Any

from jtops._compat import triton as triton_compat


def launch_options(
    kernel, *, num_warps=None, num_stages=None, num_ctas=None, cluster_size=None, backend_options=None, debug=False
) -> tuple[tuple[str, Any], ...]:
    """The compiler options that a call names, checked, sorted by name."""
    named = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas, "cluster_size": cluster_size}
    options = {k: v for k, v in named.items() if v is not None}
    for key, value in options.items():
        power = key == "num_warps"
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1 or (power and value & (value - 1)):
            raise ValueError(
                f"kernel {kernel.__name__}: {key} must be a positive {'power of two' if power else 'int'}; got {value!r}."
            )
        options[key] = int(value)
    if debug:
        options["debug"] = True
    for key in ("num_ctas", "cluster_size"):
        if options.get(key, 1) > 8:
            raise ValueError(
                f"kernel {kernel.__name__}: {key} must be at most 8, the largest portable cluster; got {options[key]}."
            )
    if options.get("cluster_size") == 1:
        del options["cluster_size"]
    elif "cluster_size" in options and options.get("num_ctas", 1) > 1:
        raise ValueError(
            f"kernel {kernel.__name__}: num_ctas={num_ctas} makes clusters of one program, cluster_size={cluster_size} of "
            "several; give one of the two."
        )
    for key, value in (backend_options or {}).items():
        if key not in triton_compat.BACKEND_OPTIONS:
            raise TypeError(
                f"kernel {kernel.__name__}: backend_options has {key!r}, which Triton's compilers do not know."
                f"{nearest(key, triton_compat.BACKEND_OPTIONS)}"
            )
        if options.get(key, value) != value:
            raise ValueError(f"kernel {kernel.__name__}: {key}={options[key]!r} but backend_options has {key}={value!r}.")
        check_hashable(kernel, f"backend_options[{key!r}]", value)
        options[key] = value
    options.setdefault("enable_fp_fusion", True)  # set, not left to Triton, whose default depends on version and environment
    return tuple(sorted(options.items()))


def check_hashable(kernel, what, value) -> None:
    """Raise a TypeError unless `value` can be a compile-time constant."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"kernel {kernel.__name__}: {what} is a compile-time constant and must be hashable; got {value!r} of type "
            f"{type(value).__name__}. Pass a tuple for a list, a number for a 0-d array."
        ) from None


def nearest(key: str, known) -> str:
    """The end of an error message: the known word that `key` may have meant, if one is near."""
    near = difflib.get_close_matches(key, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
