"""What both stages of attention ask of a call before kernels for Hopper serve it."""

import jax.numpy as jnp

from jtops._compat import gluon as gluon_compat
from jtops.core.sizes import next_power_of_2
from jtops.kernels._lib.frame.launch import Launch

MAX_SIZE = 1 << 28  # of a sequence: positions are compared in 32 bits, with room for a window and an offset


SMALL = 1 << 30  # floating-point operations, which any kernel does in the time that the launch of tensor descriptors takes


def head_block(d: int) -> int:
    """The power of two that the tiles of a head of d have; TMA fills up with zeros."""
    return max(64, next_power_of_2(d))


def unfit(launch: Launch, x, widest: int) -> str | None:
    """Why no kernel for Hopper with heads up to `widest` serves the call; None where a stage may look further."""
    d, e = x.q.shape[-1], x.v.shape[-1]
    if launch.interpret:
        return "Gluon kernels have no interpreter"
    if launch.target.arch != 90:
        return f"it is written for sm_90, not {launch.target}"
    if (version := gluon_compat.version()) not in gluon_compat.PROVEN:
        return f"it is not proven with Triton {'.'.join(map(str, version))}"
    if x.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16, not {x.q.dtype}"
    if not (32 < d <= widest and 32 < e <= widest and d % 8 == e % 8 == 0):
        return f"head dims must be multiples of 8 from 40 to {widest}; got {d} and {e}"
    if head_block(d) != head_block(e):
        return f"head dims of k and v must fill one block; got {d} and {e}"
    if x.q_ids is not None or x.kv_ids is not None:
        return "it has no segment ids"
    scores = {name: getattr(x, name) for name in ("bias", "mask", "sinks", "alibi_slopes")} | {"softcap": launch.options["softcap"]}
    if others := [name for name, value in scores.items() if value is not None]:
        return f"it has no {' or '.join(others)}"
    if (longest := max(x.q.shape[1], x.k.shape[1], launch.options["q_size"])) > MAX_SIZE:
        return f"it counts in 32 bits; got {longest} queries or keys"
    return None


def slow(launch: Launch, x) -> str | None:
    """Why a call that the forward for Hopper serves is quicker without; None if it is not."""
    (_, s, h, d), (_, t, _, e) = x.q.shape, x.v.shape
    if 2 * launch.batch * h * s * t * (d + e) < SMALL:
        return "its launch would take longer than so small a call"
    return None
