"""Pointwise gates, ``activation(a) * b``: swiglu and geglu. Bound by memory: one read of each operand, one write.

Both halves may be one array, [..., 2 n] with a before b, as one product with joined weights makes them: it is read in place, and
its gradient is written in place of both, without a copy.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtops._compat.triton import tl, triton
from jtops.config import Implementation
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib import checks
from jtops.kernels._lib.device import activations
from jtops.kernels._lib.device.activations import activate, derivative
from jtops.kernels._lib.device.rows import length
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels._lib.precision import accumulator
from jtops.kernels._lib.rows.host import index_type
from jtops.kernels._lib.spec import Case, Meshed, Spec, normal


@triton.jit
def _halves(a_ptr, b_ptr, rows, cols, n):
    """Pointers to a tile of both halves; without `b_ptr` they lie in one array, the second n elements after the first."""
    if b_ptr is None:
        a = a_ptr + rows[:, None] * (2 * n) + cols[None, :]
        b = a + n
    else:
        a = a_ptr + rows[:, None] * n + cols[None, :]
        b = b_ptr + rows[:, None] * n + cols[None, :]
    return a, b


@triton.jit
def _tile(r, n, INDEX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a program's tile of the result, n in the type of positions, and which of them there are."""
    pid = tl.program_id(0).to(tl.int64)
    r, n = length(r, 1, INDEX), length(n, 1, INDEX)
    blocks_n = tl.cdiv(n, BLOCK_N)
    rows = pid // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows, cols, n, (rows < r)[:, None] & (cols < n)[None, :]


@triton.jit(do_not_specialize_on_alignment=["r"])
def _forward_kernel(
    a_ptr, b_ptr, y_ptr, r, n, ACTIVATION: tl.constexpr, INDEX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One program: a BLOCK_M x BLOCK_N tile."""
    rows, cols, n, inside = _tile(r, n, INDEX, BLOCK_M, BLOCK_N)
    a, b = _halves(a_ptr, b_ptr, rows, cols, n)
    gate = tl.load(a, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(b, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(y_ptr + rows[:, None] * n + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["r"])
def _backward_kernel(
    a_ptr,
    b_ptr,
    dy_ptr,
    da_ptr,
    db_ptr,
    r,
    n,
    ACTIVATION: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a tile of both gradients, which are one array where the operands are."""
    rows, cols, n, inside = _tile(r, n, INDEX, BLOCK_M, BLOCK_N)
    a, b = _halves(a_ptr, b_ptr, rows, cols, n)
    da, db = _halves(da_ptr, db_ptr, rows, cols, n)
    gate = tl.load(a, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(b, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    dy = tl.load(dy_ptr + rows[:, None] * n + cols[None, :], mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(da, (dy * up * derivative(gate, ACTIVATION)).to(da_ptr.dtype.element_ty), mask=inside)
    tl.store(db, (dy * activate(gate, ACTIVATION)).to(da_ptr.dtype.element_ty), mask=inside)


def _arguments(launch: Launch, a, b) -> tuple[Config, dict[str, Any]]:
    """The tiles of the call, and what both kernels take. Halves apart are one row each."""
    shape = (a.shape[0], a.shape[-1])
    r, n = shape if b is None else (1, a.size)
    block_n = min(next_power_of_2(n), 2048)
    arguments = {
        "a_ptr": a,
        "b_ptr": b,
        "r": r,
        "n": n,
        "ACTIVATION": launch.options["activation"],
        "INDEX": index_type(2 * max(r, n)),
    }
    return Config(BLOCK_M=max(1, 2048 // block_n), BLOCK_N=block_n), arguments


def _launch(launch: Launch, kernel, a, b, outputs, **more):
    heuristic, arguments = _arguments(launch, a, b)
    arguments |= more
    config = launch.choose(heuristic, (kernel,), arguments, rounded=("r", "n"), aligned=("n",))
    r, n = arguments["r"], arguments["n"]
    grid = cdiv(r, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"])
    return launch(kernel, outputs=outputs, grid=grid, config=config, flops=8 * r * n, **arguments)


def _halves_of(launch: Launch, x):
    """The operands of the call, one for each of its rows: both halves, or their array and None."""
    a, *b = (launch.full(name, array) for name, array in x._asdict().items())
    return a, b[0] if b else None


def _forward(launch: Launch, x):
    a, b = _halves_of(launch, x)
    y = jax.ShapeDtypeStruct((a.shape[0], a.shape[-1]), a.dtype)
    return (_launch(launch, _forward_kernel, a, b, {"y_ptr": y})["y_ptr"],)


def _backward(launch: Launch, x, saved, cotangents):
    a, b = _halves_of(launch, x)
    like = lambda array: None if array is None else jax.ShapeDtypeStruct(array.shape, array.dtype)
    outputs = {"da_ptr": like(a), "db_ptr": like(b)}
    got = _launch(launch, _backward_kernel, a, b, outputs, dy_ptr=cotangents.y)
    return tuple(got[name] for name in outputs if got[name] is not None)


def _gated(gate, up, activation: str, dtype):
    wide = accumulator(dtype)
    return (activations.FUNCTIONS[activation](gate.astype(wide)) * up.astype(wide)).astype(dtype)


def _reference(a, b, *, activation):
    return (_gated(a, b, activation, a.dtype),)


def _joined_reference(x, *, activation):
    return (_gated(x[..., 0, :], x[..., 1, :], activation, x.dtype),)


def _op(name: str):
    """The op on halves apart, and on halves that are one array [..., 2, n]."""
    same: dict[str, Any] = {
        "results": {"y": "n"},
        "forward": _forward,
        "backward": _backward,
        "limits": checks.kernel_floats,
        "blocks": "BLOCK_M BLOCK_N",
    }
    apart = fused_op(name, operands={"a": "n", "b": "n"}, reference=_reference, **same)
    return apart, fused_op(name, operands={"x": "half n"}, whole="half", reference=_joined_reference, **same)


_SWIGLU, _GEGLU = _op("swiglu"), _op("geglu")


def _call(name: str, ops, a, b, activation: str, **choice):
    a = checks.array(name, "a", a)
    checks.axes(name, a=(a, "... n"))
    if b is None:
        if a.shape[-1] % 2:
            raise ValueError(f"{name}: the last axis of a must be even where it holds both halves; got {a.shape}.")
        halves = a.reshape(*a.shape[:-1], 2, a.shape[-1] // 2)
        return ops[1](halves, activation=activation, **choice)[0]
    b = checks.array(name, "b", b)
    if a.shape != b.shape:
        raise ValueError(f"{name}: a and b must have one shape; got {a.shape} and {b.shape}.")
    dtype = jnp.result_type(a, b)
    return ops[0](a.astype(dtype), b.astype(dtype), activation=activation, **choice)[0]


def swiglu(
    a: Float[Array, "*batch n"],
    b: Float[Array, "*batch n"] | None = None,
    *,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*batch n"]:
    """``silu(a) * b`` with ``silu(a) = a * sigmoid(a)``, computed in float32 and rounded once: the gate of a SwiGLU layer.

    The gradients are ``g * b * silu'(a)`` and ``g * silu(a)``; nothing but the operands is kept for them. `gated_linear_unit` also
    does the two products before.

    >>> both = jnp.array([[0.0, 1.0, 3.0, 4.0]])  # a and b side by side
    >>> print(jtops.swiglu(both), jtops.swiglu(both[:, :2], both[:, 2:]))
    [[0.        2.9242344]] [[0.        2.9242344]]

    Args:
      a: [..., n]; or [..., 2 n] if `b` is None, with a before b. Kernel dtypes: float32, bfloat16, float16.
      b: [..., n], or None. Operands of two dtypes are promoted.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_M`` (rows) and ``BLOCK_N`` (columns) of a tile. None: chosen by size.

    Returns:
      [..., n] of the operands' dtype.

    Raises:
      TypeError: operands not floating.
      ValueError: shapes that differ, no axis, an odd last axis where that holds both halves.
      UnsupportedError: float64, where a kernel must run.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, section 2.
    """
    return _call("swiglu", _SWIGLU, a, b, "silu", implementation=implementation, config=config)


def geglu(
    a: Float[Array, "*batch n"],
    b: Float[Array, "*batch n"] | None = None,
    *,
    approximate: bool = True,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*batch n"]:
    """``gelu(a) * b``, computed in float32 and rounded once: the gate of a GEGLU layer.

    The gradients are ``g * b * gelu'(a)`` and ``g * gelu(a)``; nothing but the operands is kept for them.

    >>> print(jtops.geglu(jnp.array([0.0, 100.0]), jnp.array([3.0, 4.0])))  # gelu(100) is 100
    [  0. 400.]

    Args:
      a: [..., n]; or [..., 2 n] if `b` is None, with a before b. Kernel dtypes: float32, bfloat16, float16.
      b: [..., n], or None. Operands of two dtypes are promoted.
      approximate: gelu by tanh, as jax.nn.gelu has it by default; False: by erf.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_M`` (rows) and ``BLOCK_N`` (columns) of a tile. None: chosen by size.

    Returns:
      [..., n] of the operands' dtype.

    Raises:
      TypeError: operands not floating.
      ValueError: shapes that differ, no axis, an odd last axis where that holds both halves.
      UnsupportedError: float64, where a kernel must run.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, section 2.
    """
    return _call("geglu", _GEGLU, a, b, "gelu" if approximate else "gelu_exact", implementation=implementation, config=config)


def _apart(*shape):
    return {"a": normal(shape), "b": normal(shape)}


def _joined(*shape):
    return {"a": normal((*shape[:-1], 2 * shape[-1]))}


def _spec(function, **more) -> Spec:
    return Spec(
        name=function.__name__,
        function=function,
        small=(Case("small", _apart(2, 3, 5), "rows", axes="b m n, b m n -> b m n"),),
        meshed=(Meshed("meshed", _apart(16, 8, 32), "any axis", axes="b m n, b m n -> b m n", split="b m n"),),
        cases=(
            Case("odd", _apart(3, 5, 257), "several programs, the last of them partly filled"),
            Case("vector", _apart(1000), "no batch axis"),
            Case("joined", _joined(7, 33), "rows whose halves lie in one array, and begin nowhere"),
            Case("even", _joined(4, 64), "halves that are aligned"),
            Case("long", _joined(2, 300), "several tiles a row", {}, Config(BLOCK_M=1, BLOCK_N=128)),
            Case("far", {"a": normal((4, 40), std=10.0), "b": normal((4, 40))}, "activations that are 0 or a"),
        ),
        compiled=(
            Case("apart", _apart(8192, 14336), "a feed-forward layer of an 8B model"),
            Case("joined", _joined(8192, 14336), "with joined weights"),
        ),
        backward_kernels=1,
        kept=1,  # in a scan that carries a, b is the same for all steps
        forward_bytes=lambda y, **operands: y.nbytes + sum(x.nbytes for x in operands.values()),
        backward_bytes=lambda y, **operands: y.nbytes + 2 * sum(x.nbytes for x in operands.values()),
        **more,
    )


SWIGLU, GEGLU = _spec(swiglu), _spec(geglu, alike="swiglu")
