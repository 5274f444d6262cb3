"""gated_linear_unit: activation(x @ w_gate) * (x @ w_up). Both products read x together, and meet in registers.

Nothing but the operands is saved. The backward computes both products again, in the kernel that turns the cotangent of the result
into theirs; then the gradient of x is one sum of two products, and those of both weights are one product with two results.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtops._compat.triton import tl, triton
from jtops.config import Implementation
from jtops.kernels._lib import checks
from jtops.kernels._lib import precision as precisions
from jtops.kernels._lib.device import activations
from jtops.kernels._lib.device.activations import activate, derivative
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels._lib.product.backward import cotangent_dtype, gradient_of_a, gradients_of_bs
from jtops.kernels._lib.product.portable import Epilogue, Term, product
from jtops.kernels._lib.product.side import Groups
from jtops.kernels._lib.spec import Case, Meshed, Spec, normal


class _Gate(NamedTuple):
    """What follows the products: an activation's name or None, and in the backward the cotangent of the result."""

    activation: str | None
    g_ptr: Any = None


@triton.jit
def _epilogue(sums, gate, y_ptr, nothing, place):
    """Store ``y = activation(gate) * up``."""
    y = activate(sums[0], gate.activation) * sums[1]
    tl.store(y_ptr + place.offsets, y.to(y_ptr.dtype.element_ty), mask=place.inside)


@triton.jit
def _cotangents(sums, gate, dgate_ptr, dup_ptr, place):
    """The cotangents of both products."""
    g = tl.load(gate.g_ptr + place.offsets, mask=place.inside, other=0.0).to(tl.float32)
    dup = g * activate(sums[0], gate.activation)
    tl.store(dup_ptr + place.offsets, dup.to(dup_ptr.dtype.element_ty), mask=place.inside)
    dgate = g * sums[1] * derivative(sums[0], gate.activation)
    tl.store(dgate_ptr + place.offsets, dgate.to(dgate_ptr.dtype.element_ty), mask=place.inside)


def _plain(gate, up, *, activation):
    return activations.FUNCTIONS[activation](gate) * up


def _operands(launch: Launch, x):
    """Return the batch as products have it, and x and both weights for them."""
    rows = launch.rows
    groups = Groups.of(launch.batch, rows.x, rows.w_gate, rows.w_up)
    weights = groups.sharing(x.w_gate, rows.w_gate), groups.sharing(x.w_up, rows.w_up)
    return groups, groups.merged(x.x, rows.x), weights


def _forward(launch: Launch, x):
    groups, a, weights = _operands(launch, x)
    activation = launch.options["activation"]
    epilogue = Epilogue(_epilogue, _Gate(activation), lambda *sums: (_plain(*sums, activation=activation),), heavy=True)
    (y,) = product(launch, (Term(a, weights),), groups.count, (jnp.dtype(launch.options["dtype"]),), epilogue)
    return (y.reshape(launch.batch, x.x.shape[1], x.w_up.shape[2]),)


def _backward(launch: Launch, x, saved, cotangents):
    groups, a, weights = _operands(launch, x)
    g, activation, wanted = groups.merge(cotangents.y), launch.options["activation"], launch.wanted
    of_sums = lambda *sums: jax.vjp(lambda *sums: _plain(*sums, activation=activation), *sums)[1](g.astype(jnp.float32))
    epilogue = Epilogue(_cotangents, _Gate(activation, g), of_sums, heavy=True)
    dtype = cotangent_dtype(x.x.dtype, g.dtype)
    dgate, dup = product(launch, (Term(a, weights),), groups.count, (dtype, dtype), epilogue, name="vjp_dz")
    dx = gradient_of_a(launch, groups, "x", x.x, (dgate, dup), weights) if wanted.x else None
    asked = {"w_gate": (x.w_gate, dgate)} if wanted.w_gate else {}
    asked |= {"w_up": (x.w_up, dup)} if wanted.w_up else {}
    dw = gradients_of_bs(launch, groups, a, asked) if asked else {}
    return dx, dw.get("w_gate"), dw.get("w_up")


def _reference(x, w_gate, w_up, *, activation, precision, dtype):
    wide = precisions.accumulator(x.dtype, dtype)
    of = lambda w: jnp.matmul(x, w, precision=precisions.lax_precision(precision), preferred_element_type=wide)
    return (_plain(of(w_gate), of(w_up), activation=activation).astype(dtype),)


def _limits(x, w_gate, w_up, *, dtype, **_) -> str | None:
    return checks.kernel_floats(x, w_gate, w_up, jax.ShapeDtypeStruct((), dtype))


_OP = "gated_linear_unit"
_op = fused_op(
    _OP,
    operands={"x": "m k", "w_gate": "k n", "w_up": "k n"},
    results={"y": "m n"},
    reference=_reference,
    forward=_forward,
    backward=_backward,
    whole="k",  # sums over devices would have to come before the activation
    limits=_limits,
    blocks="BLOCK_M BLOCK_N BLOCK_K",
)


def gated_linear_unit(
    x: Float[Array, "*batch m k"],
    w_gate: Float[Array, "k n"],
    w_up: Float[Array, "k n"],
    *,
    activation: str | None = "silu",
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*batch m n"]:
    """``activation(x @ w_gate) * (x @ w_up)``, rounded once: the first half of a SwiGLU, GEGLU or bilinear feed-forward layer.

    >>> x, w_gate, w_up, w_down = jnp.ones((2, 128, 64)), jnp.ones((64, 256)), jnp.ones((64, 256)), jnp.ones((256, 64))
    >>> y = jtops.gated_linear_unit(x, w_gate, w_up) @ w_down  # a SwiGLU layer
    >>> y.shape
    (2, 128, 64)

    Sums, activation and product are float32 (float64 for float64 inputs). All rows of x are one large product. Gradients have the
    same bits every time, and their operand's dtype: with ``gate = x w_gate`` and ``up = x w_up``, which are computed again,
    ``dgate = g * up * activation'(gate)``, ``dup = g * activation(gate)``, ``dx = dgate w_gate^T + dup w_up^T``, ``dw_gate = x^T
    dgate``, ``dw_up = x^T dup``. dgate and dup are rounded to the operands' dtype; beside a float32 cotangent of float16 operands
    they stay float32. Fastest where k and n are multiples of 16.

    Args:
      x: [..., m, k], or [k], which is one row whose axis the result lacks. Kernel dtypes: float32, bfloat16, float16.
      w_gate: [k, n]. Operands of several dtypes are promoted as jnp.matmul does.
      w_up: [k, n].
      activation: "silu" (SwiGLU), "gelu" (by tanh, as jax.nn.gelu; GEGLU), "gelu_exact" (by erf), "sigmoid" (GLU), "relu", "tanh",
        or None (bilinear).
      precision: accuracy of float32 products; None is what ``jax_default_matmul_precision`` says, else float32 accuracy.
      preferred_element_type: floating dtype of the result. None: the (promoted) dtype of the operands.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_M``, ``BLOCK_N`` and ``BLOCK_K`` of all products, also of the gradients. None: chosen by size, dtype
        and device.

    Returns:
      Array [..., m, n].

    Raises:
      TypeError: operands or `preferred_element_type` not floating.
      ValueError: shapes that do not fit, an unknown `activation` or `precision`.
      UnsupportedError: float64, where a kernel must run.

    Source: Dauphin et al., "Language Modeling with Gated Convolutional Networks", 2017, section 2; Shazeer, "GLU Variants Improve
    Transformer", 2020, section 2.
    """
    x, w_gate, w_up = (checks.array(_OP, name, v) for name, v in (("x", x), ("w_gate", w_gate), ("w_up", w_up)))
    activations.check(_OP, activation)
    row = x.ndim == 1
    checks.axes(_OP, x=(x, "k" if row else "... m k"), w_gate=(w_gate, "k n"), w_up=(w_up, "k n"))
    common = jnp.result_type(x, w_gate, w_up)
    (y,) = _op(
        (jnp.expand_dims(x, 0) if row else x).astype(common),
        w_gate.astype(common),
        w_up.astype(common),
        implementation=implementation,
        config=config,
        activation=activation,
        precision=precisions.resolve(_OP, precision, common),
        dtype=str(precisions.result_dtype(_OP, preferred_element_type, common)),
    )
    return jnp.squeeze(y, -2) if row else y


def _bytes(y, **operands) -> int:
    return sum(x.nbytes for x in (y, *operands.values()))


def _flops(_, x, w_gate, **__) -> int:
    return 4 * x.size * w_gate.shape[-1]


def _inputs(m, k, n, *batch):
    weights = normal((k, n), std=k**-0.5)  # as in a layer at rest: products of size 1, where activations bend
    return {"x": normal((*batch, m, k)), "w_gate": weights, "w_up": weights}


SPEC = Spec(
    name=_OP,
    function=gated_linear_unit,
    small=(Case("small", _inputs(3, 8, 8, 2), "all rows are one product", axes="b m k, k n, k n -> b m n"),),
    meshed=(
        Meshed(
            "meshed",
            _inputs(8, 8, 8, 8),
            "rows on many devices, weights on all",
            axes="b m k, k n, k n -> b m n",
            split="b m n",
            gathered="k",
        ),
    ),
    cases=(
        Case("silu", _inputs(33, 40, 17), "tails everywhere"),
        Case(
            "blocks",
            _inputs(50, 70, 40),
            "several tiles a way, the last of each partly filled",
            {"activation": "gelu"},
            Config(BLOCK_M=16, BLOCK_N=32, BLOCK_K=16),
        ),
        Case(
            "even",
            _inputs(32, 64, 128),
            "sizes that blocks divide: no masks; the epilogue in halves",
            {"activation": "tanh"},
            Config(BLOCK_M=16, BLOCK_N=128, BLOCK_K=32),
        ),
        Case("gelu_exact", _inputs(8, 16, 8, 3), "erf", {"activation": "gelu_exact"}),
        Case("relu", _inputs(9, 16, 8, 2), "a derivative that is 0 or 1", {"activation": "relu"}),
        Case("sigmoid", _inputs(8, 16, 8), "the first gate, saturating both ways", {"activation": "sigmoid"}),
        Case("bilinear", _inputs(5, 7, 9), "no activation", {"activation": None}),
        Case("split", _inputs(3, 1300, 5), "k in several sums"),
        Case("row", _inputs(1, 40, 24), "a single row"),
        Case("one", _inputs(1, 1, 1), "one element"),
    ),
    compiled=(
        Case("llama", _inputs(8192, 4096, 14336), "a feed-forward layer of an 8B model"),
        Case("skinny", _inputs(16, 4096, 14336), "few rows", {"activation": "gelu"}),
        Case("odd", _inputs(1000, 1001, 999), "masks on every side", {"activation": "gelu"}),
    ),
    backward_kernels=3,
    kept=1,
    forward_bytes=_bytes,
    backward_bytes=lambda y, **operands: 2 * _bytes(y, **operands),
    forward_flops=_flops,
    backward_flops=lambda options, **operands: 2 * _flops(options, **operands),
)
