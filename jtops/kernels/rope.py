"""rope: rotary position embedding. Pairs of features turn by an angle that grows with the position; bound by memory.

Angles are found from whole positions in fixed point: a frequency is a fraction of a turn in 64 bits, of whose product with the
position only the last turn counts, so an angle is as exact at position 10^9 as at 1. They are computed once for all heads.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jtops._compat.triton import tl, triton
from jtops.config import Implementation
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib import checks
from jtops.kernels._lib.device.rows import row
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels._lib.precision import accumulator
from jtops.kernels._lib.spec import Case, Meshed, Spec, lengths, normal

_OP = "rope"


# ------------------------------------------------------------------------------------------------------------------ kernel


@triton.jit
def _angles(at, table_ptr, pairs, PAIRS: tl.constexpr):
    """The angles [positions, pairs], in radians from -pi to pi; `table_ptr` has the frequencies' high and low words."""
    pair = tl.arange(0, PAIRS)
    high = tl.load(table_ptr + pair, mask=pair < pairs, other=0).to(tl.uint32, bitcast=True)[None, :]
    low = tl.load(table_ptr + pairs + pair, mask=pair < pairs, other=0).to(tl.uint32, bitcast=True)[None, :]
    at = at.to(tl.uint32, bitcast=True)[:, None]
    turn = at * high + tl.umulhi(at, low) - tl.where(at >= 2147483648, low, 0)  # of a negative position, which is 2^32 more
    return turn.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09


@triton.jit(do_not_specialize_on_alignment=["s", "h", "position_rows"])
def _kernel(
    x_ptr,
    positions_ptr,
    table_ptr,
    y_ptr,
    s,
    h,
    d,
    pairs,
    position_rows,
    direction,
    INTERLEAVED: tl.constexpr,
    TAIL: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program: BLOCK_M positions of one batch element, HEADS heads one after the other. `direction` -1 turns back.

    TAIL: how many features after the pairs are passed on, rounded up to a power of two; 0 if none.
    """
    pid = tl.program_id(0).to(tl.int64)
    groups, blocks = tl.cdiv(h, HEADS), tl.cdiv(s, BLOCK_M)
    b, block, group = pid // groups // blocks, pid // groups % blocks, pid % groups
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < s
    at = tl.load(positions_ptr + row(b, position_rows) * s + rows, mask=inside, other=0)
    angle = _angles(at, table_ptr, pairs, PAIRS)
    cos, sin = tl.cos(angle), tl.sin(angle) * direction
    lines = (b * s + rows) * h
    for i in range(HEADS):
        head = group * HEADS + i
        base = ((lines + head) * d)[:, None]
        here = (inside & (head < h))[:, None]
        if INTERLEAVED:
            both = tl.arange(0, 2 * PAIRS)[None, :]
            mask = here & (both < 2 * pairs)
            x = tl.load(x_ptr + base + both, mask=mask, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(x, (BLOCK_M, PAIRS, 2)))
            y = tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), (BLOCK_M, 2 * PAIRS))
            tl.store(y_ptr + base + both, y.to(y_ptr.dtype.element_ty), mask=mask)
        else:
            pair = tl.arange(0, PAIRS)[None, :]
            mask = here & (pair < pairs)
            first = tl.load(x_ptr + base + pair, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(x_ptr + base + pairs + pair, mask=mask, other=0.0).to(tl.float32)
            tl.store(y_ptr + base + pair, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(y_ptr + base + pairs + pair, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask=mask)
        if TAIL > 0:
            rest = 2 * pairs + tl.arange(0, TAIL)[None, :]
            mask = here & (rest < d)
            tl.store(y_ptr + base + rest, tl.load(x_ptr + base + rest, mask=mask), mask=mask)


def _table(frequencies: tuple[float, ...]) -> np.ndarray:
    """The fractions of a turn that a position is worth, in 64 bits: a row of the high words, one of the low ones."""
    turns = [f / (2 * math.pi) for f in frequencies]
    words = np.array([int(math.ldexp(t - math.floor(t), 64)) % 2**64 for t in turns], np.uint64)
    return np.stack([words >> np.uint64(32), words & np.uint64(2**32 - 1)]).astype(np.uint32).view(np.int32)


def _turned(launch: Launch, x, positions, direction: int):
    """`x`, which has a row for each of the call's, turned forth or back."""
    frequencies = launch.options["frequencies"]
    (_, s, h, d), pairs = x.shape, len(frequencies)
    block_m = max(1, min(16, 1024 // next_power_of_2(pairs), next_power_of_2(s)))
    heads = max(1, min(next_power_of_2(h), launch.batch * cdiv(s, block_m) * h // (8 * launch.target.multiprocessors)))
    arguments = {
        "x_ptr": x,
        "positions_ptr": positions,
        "table_ptr": jnp.asarray(_table(frequencies)),
        "s": s,
        "h": h,
        "d": d,
        "pairs": pairs,
        "position_rows": launch.rows.positions,
        "direction": float(direction),
        "INTERLEAVED": launch.options["interleaved"],
        "TAIL": next_power_of_2(d - 2 * pairs) if d > 2 * pairs else 0,
        "PAIRS": next_power_of_2(pairs),
    }
    start = Config(BLOCK_M=block_m, HEADS=next_power_of_2(heads + 1) // 2)
    config = launch.choose(start, (_kernel,), arguments, name="turn", rounded=("s", "h"), batch=next_power_of_2(launch.batch))
    grid = launch.batch * cdiv(s, config["BLOCK_M"]) * cdiv(h, config["HEADS"])
    outputs = {"y_ptr": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    return launch(_kernel, outputs=outputs, grid=grid, config=config, flops=3 * x.size, **arguments)["y_ptr"]


def _forward(launch: Launch, operands):
    return (_turned(launch, launch.full("x", operands.x), operands.positions, 1),)


def _backward(launch: Launch, operands, saved, cotangents):
    return _turned(launch, cotangents.y, operands.positions, -1), None


# ------------------------------------------------------------------------------------------------------------------ the op


def _umulhi(a, b):
    """The high words of products of unsigned words, by halves."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = (a0 * b0 >> 16) + (a0 * b1 & 0xFFFF) + (a1 * b0 & 0xFFFF)
    return a1 * b1 + (a0 * b1 >> 16) + (a1 * b0 >> 16) + (middle >> 16)


def _reference_angles(positions, frequencies, dtype):
    if dtype == jnp.float64:
        return positions[..., None].astype(dtype) * np.array(frequencies)
    high, low = _table(frequencies).view(np.uint32)
    at = positions[..., None].astype(jnp.uint32)
    turn = at * high + _umulhi(at, low) - jnp.where(positions[..., None] < 0, low, np.uint32(0))
    return turn.astype(jnp.int32).astype(dtype) * np.float32(2 * math.pi / 2**32)


def _reference(x, positions, *, frequencies, interleaved):
    wide = x.astype(accumulator(x.dtype))
    n = len(frequencies)
    angles = _reference_angles(positions, frequencies, wide.dtype)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = (wide[..., : 2 * n : 2], wide[..., 1 : 2 * n : 2]) if interleaved else (wide[..., :n], wide[..., n : 2 * n])
    turned = first * cos - second * sin, second * cos + first * sin
    pairs = jnp.stack(turned, -1).reshape(*turned[0].shape[:-1], 2 * n) if interleaved else jnp.concatenate(turned, -1)
    rest = jnp.broadcast_to(wide[..., 2 * n :], (*pairs.shape[:-1], wide.shape[-1] - 2 * n))
    return (jnp.concatenate([pairs, rest], -1).astype(x.dtype),)


_rope = fused_op(
    _OP,
    operands={"x": "s h d", "positions": "s"},
    results={"y": "s h d"},
    whole="d",
    reference=_reference,
    forward=_forward,
    backward=_backward,
    limits=lambda x, positions, **_: checks.kernel_floats(x),
    blocks="BLOCK_M HEADS",
)


def rope(
    x: Float[Array, "*batch s h d"],
    positions: Int[Array, "*#batch s"] | None = None,
    *,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    inverse_frequencies: Sequence[float] | np.ndarray | None = None,
    interleaved: bool = False,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*batch s h d"]:
    """Rotary position embedding: pair j of the features at position p turns by ``p * inverse_frequencies[j]`` radians.

    A pair (a, b) becomes ``(a cos - b sin, b cos + a sin)``, in float32, rounded once; features beyond `rotary_dim` stay as they
    are, bit for bit. Angles are exact to 2e-9 radians before they are rounded to float32, at any position. The gradient is the
    cotangent turned back, and the derivative by `x` is the same turn.

    >>> x = jnp.zeros((2, 1, 2)).at[..., 0].set(1.0)  # two positions, a head, one pair
    >>> print(jtops.rope(x, inverse_frequencies=[jnp.pi / 3])[:, 0].tolist()[0])  # no turn at 0
    [1.0, 0.0]

    Args:
      x: queries or keys, [..., s, h, d]. Kernel dtypes: float32, bfloat16, float16.
      positions: integers of up to 32 bits, [..., s], broadcast over batch axes, of either sign; None is 0, 1, ... s - 1.
      theta: base of the frequencies ``theta^(-2 j / rotary_dim)``.
      rotary_dim: how many features turn, the first ones; even. None: all d.
      inverse_frequencies: radians a position, one number a pair, in place of `theta`: for scaled or otherwise chosen frequencies.
        Known when tracing.
      interleaved: pairs are neighbours, features 2 j and 2 j + 1; else features j and ``j + rotary_dim / 2``.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_M`` (positions) and ``HEADS`` (heads of a program). None: chosen by size.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: `x` not floating, `positions` not integers of up to 32 bits, frequencies or `theta` traced.
      ValueError: shapes that do not fit, an odd `rotary_dim` or one beyond d, a wrong number of frequencies or one not finite.
      UnsupportedError: float64, where a kernel must run.

    Source: Su et al., "RoFormer", 2021, section 3.2.
    """
    x = checks.array(_OP, "x", x)
    sizes = checks.axes(_OP, x=(x, "... s h d"))
    n = sizes["d"] if rotary_dim is None else rotary_dim
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n % 2 or not 0 <= n <= sizes["d"]:
        raise ValueError(f"{_OP}: rotary_dim must be even and from 0 to d, {sizes['d']}; got {n!r}.")
    frequencies = _frequencies(theta, int(n), inverse_frequencies)
    if positions is None:
        positions = jnp.arange(sizes["s"], dtype=jnp.int32)
    positions = checks.array(_OP, "positions", positions, floating=False)
    if not jnp.issubdtype(positions.dtype, jnp.integer) or not jnp.can_cast(positions.dtype, jnp.int32):
        raise TypeError(f"{_OP}: positions must be integers that fit int32; got {positions.dtype} {positions.shape}. Cast them.")
    if positions.ndim == 0 or positions.shape[-1] != sizes["s"]:
        raise ValueError(f"{_OP}: positions must have the shape [..., s], here [..., {sizes['s']}]; got {positions.shape}.")
    checks.broadcast(_OP, "batch axes", x=x.shape[:-3], positions=positions.shape[:-1])
    if not frequencies:
        return x
    positions = positions.astype(jnp.int32)
    options = {"frequencies": frequencies, "interleaved": bool(interleaved)}
    return _rope(x, positions, implementation=implementation, config=config, **options)[0]


def _frequencies(theta, n: int, given) -> tuple[float, ...]:
    if given is None:
        base = checks.static_float(_OP, "theta", theta)
        if not 0 < base < math.inf:
            raise ValueError(f"{_OP}: theta must be positive and finite; got {theta!r}.")
        return tuple(base ** (-2 * j / n) for j in range(n // 2))
    if any(isinstance(f, jax.core.Tracer) for f in jax.tree.leaves(given)):
        raise TypeError(f"{_OP}: inverse_frequencies are compiled into the program and must be plain numbers; got traced ones.")
    found = np.asarray(given, np.float64)
    if found.shape != (n // 2,) or not np.isfinite(found).all():
        raise ValueError(f"{_OP}: inverse_frequencies must be {n // 2} finite numbers, half of rotary_dim; got {found.shape}.")
    return tuple(found.tolist())


# --------------------------------------------------------------------------------------------------------------------- SPEC


def _inputs(*shape, positions=True):
    given = {"x": normal(shape)}
    return given | {"positions": lengths(shape[:-2], 5000)} if positions else given


SPEC = Spec(
    name=_OP,
    function=rope,
    small=(Case("small", _inputs(2, 3, 2, 8), "a position each", axes="b s h 8, b s -> b s h 8"),),
    meshed=(Meshed("meshed", _inputs(16, 8, 8, 16), "rows on many devices", axes="b s h 16, b s -> b s h 16", split="b s h"),),
    cases=(
        Case("halves", _inputs(2, 17, 3, 64), "several tiles, the last of them partly filled"),
        Case("counted", _inputs(2, 33, 2, 16, positions=False), "positions that nobody gave, shared by the batch"),
        Case("interleaved", _inputs(2, 17, 3, 64), "pairs that are neighbours", {"interleaved": True}),
        Case("partial", _inputs(2, 9, 3, 80), "features that stay", {"rotary_dim": 20}),
        Case("partial_interleaved", _inputs(9, 3, 24), "both, and no batch axis", {"rotary_dim": 12, "interleaved": True}),
        Case("table", _inputs(5, 2, 8), "frequencies of one's own", {"inverse_frequencies": (1.0, 0.5, -0.25, 7.0)}),
        Case("many_heads", _inputs(3, 5, 37, 4), "heads in several programs", {}, Config(BLOCK_M=2, HEADS=8)),
    ),
    compiled=(
        Case("llama", _inputs(4, 4096, 32, 128), "queries of an 8B model"),
        Case("partial", _inputs(4, 4096, 32, 80), "part of each head", {"rotary_dim": 32, "interleaved": True}),
    ),
    backward_kernels=1,
    kept=0,
    forward_bytes=lambda y, x, **_: 2 * x.nbytes,
    backward_bytes=lambda y, x, **_: 2 * x.nbytes,
)
