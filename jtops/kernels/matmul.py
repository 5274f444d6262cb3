"""matmul: activation(a @ b + bias) + residual, all of it in the registers of the product.

Bound by the tensor cores for large shapes, by reading b for few rows. The backward is two products of the same kernel, which reads
either operand transposed, and one pass over the cotangent that applies the activation's derivative and sums it for the bias.

The backward needs z = a @ b + bias of the forward, and only if there is an activation. It is saved, in the dtype of the
result: computing it again would add half of the backward's products to save what plain JAX code keeps as well. Rematerialisation
does just that: under ``jax.checkpoint`` the saved value is ``matmul_residual``.
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
from jtops.kernels._lib.device.rows import row
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels._lib.product.backward import cotangent, cotangent_dtype, gradient_of_a, gradients_of_bs
from jtops.kernels._lib.product.portable import Epilogue, Term, product
from jtops.kernels._lib.product.side import Groups
from jtops.kernels._lib.spec import Case, Meshed, Spec, normal


class _After(NamedTuple):
    """What follows the product: bias [own rows, n], residual [batch, m, n], an activation's name; None where there is none."""

    bias_ptr: Any
    bias_rows: Any
    residual_ptr: Any
    activation: str | None


@triton.jit
def _epilogue(sums, after, c_ptr, z_ptr, place):
    """Store ``c = activation(z) + residual``, and ``z = sum + bias``."""
    z = sums[0]
    if after.bias_ptr is not None:
        bias = after.bias_ptr + row(place.batch, after.bias_rows) * place.n + place.columns
        z += tl.load(bias, mask=place.columns_inside, other=0.0).to(tl.float32)[None, :]
    if z_ptr is not None:
        tl.store(z_ptr + place.offsets, z.to(z_ptr.dtype.element_ty), mask=place.inside)
    c = activations.activate(z, after.activation)
    if after.residual_ptr is not None:
        c += tl.load(after.residual_ptr + place.offsets, mask=place.inside, other=0.0).to(tl.float32)
    tl.store(c_ptr + place.offsets, c.to(c_ptr.dtype.element_ty), mask=place.inside)


def _plain_epilogue(z, bias, residual, activation):
    """Return ``activation(z + bias) + residual``, and ``z + bias``, in the dtype of z."""
    if bias is not None:
        z = z + bias[..., None, :].astype(z.dtype)
    y = activations.FUNCTIONS[activation](z)
    return y if residual is None else y + residual.astype(z.dtype), z


def _forward(launch: Launch, x):
    groups = Groups.of(launch.batch, launch.rows.a, launch.rows.b, launch.rows.bias)
    activation, dtype = launch.options["activation"], jnp.dtype(launch.options["dtype"])
    residual = None if x.residual is None else groups.merge(launch.full("residual", x.residual))
    bias_rows = None if x.bias is None else groups.shared(launch.rows.bias)
    full_bias = None if x.bias is None else groups.full(x.bias, launch.rows.bias)
    with_z = launch.residuals and activation is not None
    out = product(
        launch,
        (Term(groups.merged(x.a, launch.rows.a), (groups.sharing(x.b, launch.rows.b),)),),
        groups.count,
        (dtype, dtype) if with_z else (dtype,),
        Epilogue(
            _epilogue,
            _After(x.bias, bias_rows, residual, activation),
            lambda z: _plain_epilogue(z, full_bias, residual, activation),
            heavy=activation is not None or residual is not None,
        ),
    )
    return tuple(y.reshape(launch.batch, x.a.shape[1], x.b.shape[2]) for y in out)


def _backward(launch: Launch, x, saved, cotangents):
    rows, wanted, activation = launch.rows, launch.wanted, launch.options["activation"]
    groups = Groups.of(launch.batch, rows.a, rows.b, rows.bias)
    g = groups.merge(cotangents.y)
    z = None if activation is None else groups.merge(saved.z)
    dtype = cotangent_dtype(x.a.dtype, g.dtype)
    dz, dbias = cotangent(launch, g, z, activation, dtype, wants_dz=wanted.a or wanted.b, wants_sums=wanted.bias)
    a, b = groups.merged(x.a, rows.a), groups.sharing(x.b, rows.b)
    da = gradient_of_a(launch, groups, "a", x.a, (dz,), (b,)) if wanted.a else None
    db = gradients_of_bs(launch, groups, a, {"b": (x.b, dz)})["b"] if wanted.b else None
    dresidual = None
    if dbias is not None:
        dbias = groups.shared(rows.bias).sum(dbias)
    if wanted.residual:
        dresidual = cotangents.y.astype(x.residual.dtype if rows.residual.own == launch.batch else jnp.float32)
    return da, db, dbias, dresidual


def _reference(a, b, bias, residual, *, activation, precision, dtype):
    wide = precisions.accumulator(a.dtype, dtype)
    z = jnp.matmul(a, b, precision=precisions.lax_precision(precision), preferred_element_type=wide)
    y, z = (x.astype(dtype) for x in _plain_epilogue(z, bias, residual, activation))
    return (y,) if activation is None else (y, z)


def _limits(a, b, bias, residual, *, dtype, **_) -> str | None:
    return checks.kernel_floats(a, b, bias, residual, jax.ShapeDtypeStruct((), dtype))


_OP = "matmul"
_shared: dict[str, Any] = {
    "operands": {"a": "m k", "b": "k n", "bias": "n", "residual": "m n"},
    "results": {"y": "m n"},
    "reference": _reference,
    "forward": _forward,
    "backward": _backward,
    "whole": "k",  # sums over devices would have to come before the activation
    "limits": _limits,
    "blocks": "BLOCK_M BLOCK_N BLOCK_K",
}
_linear = fused_op(_OP, **_shared)
_activated = fused_op(_OP, residuals={"z": "m n"}, **_shared)


def matmul(
    a: Float[Array, "*batch m k"],
    b: Float[Array, "*batch k n"],
    *,
    bias: Float[Array, " n"] | None = None,
    activation: str | None = None,
    residual: Float[Array, "*batch m n"] | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*batch m n"]:
    """``activation(a @ b + bias) + residual``, rounded once.

    Sums, bias, activation and residual are float32 (float64 for float64 inputs). Batch axes broadcast as in `jnp.matmul`; a `b`
    without any, or that is mapped with fewer, makes one large product of all rows that share it. Gradients have the same bits every
    time, and their operand's dtype: ``dz = g * activation'(z)``, ``da = dz b^T``, ``db = a^T dz``, ``dbias`` the sum of dz over
    rows, ``dresidual = g``. With an activation ``z = a @ b + bias`` is saved for it in the result's dtype. dz is rounded to the
    operands' dtype; beside a float32 cotangent of float16 operands it stays float32. Fastest where k and n are multiples of 16.

    >>> tokens, weights = jnp.ones((2, 128, 512)), jnp.ones((512, 2048))
    >>> jtops.matmul(tokens, weights, bias=jnp.zeros(2048), activation="gelu").shape  # a feed-forward layer in one kernel
    (2, 128, 2048)

    Args:
      a: [..., m, k], or [k], which is one row whose axis the result lacks. Kernel dtypes: float32, bfloat16, float16.
      b: [..., k, n], or [k], one column. If its dtype differs from that of `a`, both are promoted as jnp.matmul does.
      bias: [n], of any floating dtype.
      activation: None, "relu", "gelu" (by tanh, as jax.nn.gelu), "gelu_exact" (by erf), "silu", "sigmoid" or "tanh".
      residual: array of the result's shape and any floating dtype; added after the activation.
      precision: accuracy of float32 products; None is what ``jax_default_matmul_precision`` says, else float32 accuracy.
      preferred_element_type: floating dtype of the result. None: the (promoted) dtype of `a` and `b`.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_M``, ``BLOCK_N`` and ``BLOCK_K`` of all products, also of the gradients. None: chosen by size, dtype
        and device.

    Returns:
      Array of the shape of ``jnp.matmul(a, b)``.

    Raises:
      TypeError: operands or `preferred_element_type` not floating.
      ValueError: shapes that do not fit, an unknown `activation` or `precision`, a `bias` where `b` has no axis n.
      UnsupportedError: float64, where a kernel must run.

    Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, section 4; gelu: Hendrycks and Gimpel,
    "Gaussian Error Linear Units", 2016, section 2.
    """
    a, b = checks.array(_OP, "a", a), checks.array(_OP, "b", b)
    bias, residual = (None if x is None else checks.array(_OP, name, x) for name, x in (("bias", bias), ("residual", residual)))
    activations.check(_OP, activation)
    row, column = a.ndim == 1, b.ndim == 1
    checks.axes(_OP, a=(a, "k" if row else "... m k"), b=(b, "k" if column else "... k n"))
    if column and bias is not None:
        raise ValueError(f"{_OP}: bias goes along axis n, which a one-dimensional b lacks; got b {b.shape}, bias {bias.shape}.")
    checks.axes(_OP, b=(b, "..." if column else "... n"), bias=(bias, "n"))
    batch = checks.broadcast(_OP, "batch axes", a=a.shape[:-2], b=b.shape[:-2])
    shape = (*batch, *a.shape[:-1][-1:], *b.shape[1:][-1:])
    if residual is not None:
        if residual.shape != shape:
            raise ValueError(
                f"{_OP}: residual must have the result's shape {shape}; got {residual.shape}. Broadcast it, e.g. "
                f"jnp.broadcast_to(residual, {shape})."
            )
        residual = jnp.expand_dims(residual, -1) if column else residual
        residual = jnp.expand_dims(residual, -2) if row else residual
    common = jnp.promote_types(a.dtype, b.dtype)
    a, b = a.astype(common), b.astype(common)
    (y,) = (_linear if activation is None else _activated)(
        jnp.expand_dims(a, 0) if row else a,
        jnp.expand_dims(b, 1) if column else b,
        bias,
        residual,
        implementation=implementation,
        config=config,
        activation=activation,
        precision=precisions.resolve(_OP, precision, common),
        dtype=str(precisions.result_dtype(_OP, preferred_element_type, common)),
    )
    return jnp.squeeze(y, [axis for axis, gone in ((-2, row), (-1, column)) if gone])


def _bytes(c, **operands) -> int:
    return sum(x.nbytes for x in (c, *operands.values()))


def _flops(_, a, b, **__) -> int:
    return 2 * a.size * b.shape[-1]


def _inputs(m, k, n, *batch, bias=False, residual=False):
    weights = normal((k, n), std=k**-0.5)  # as in a layer at rest: z of size 1, where activations bend
    more = {"bias": normal((n,))} if bias else {}
    return {"a": normal((*batch, m, k)), "b": weights, **more} | ({"residual": normal((*batch, m, n))} if residual else {})


_FULL: dict[str, Any] = {"bias": True, "residual": True}
_AXES = "b m k, k n, n, b m n -> b m n"
SPEC = Spec(
    name=_OP,
    function=matmul,
    small=(Case("small", _inputs(3, 8, 8, 2, **_FULL), "all operands", {"activation": "gelu"}, axes=_AXES),),
    meshed=(
        Meshed(
            "meshed",
            _inputs(8, 8, 8, 8, **_FULL),
            "rows on many devices, b and bias on all",
            {"activation": "gelu"},
            axes=_AXES,
            split="b m n",
            gathered="k",
        ),
    ),
    cases=(
        Case("full", _inputs(33, 40, 17, **_FULL), "tails everywhere, all operands", {"activation": "gelu"}),
        Case("plain", _inputs(20, 24, 36), "the product alone"),
        Case("bias", _inputs(20, 24, 36, bias=True), "a bias whose gradient needs no dz"),
        Case("residual", _inputs(5, 7, 9, residual=True), "odd sizes"),
        Case(
            "blocks",
            _inputs(50, 70, 40, **_FULL),
            "several tiles a way, the last of each partly filled",
            {"activation": "silu"},
            Config(BLOCK_M=16, BLOCK_N=32, BLOCK_K=16),
        ),
        Case(
            "even",
            _inputs(32, 64, 32, **_FULL),
            "sizes that blocks divide: no masks",
            {"activation": "tanh"},
            Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32),
        ),
        Case("relu", _inputs(9, 16, 8, 3), "b shared by batch elements: one product", {"activation": "relu"}),
        Case("gelu_exact", _inputs(8, 16, 8, bias=True), "erf", {"activation": "gelu_exact"}),
        Case("sigmoid", _inputs(8, 16, 8, bias=True), "saturating both ways", {"activation": "sigmoid"}),
        Case(
            "batched",
            {"a": normal((2, 5, 12)), "b": normal((2, 12, 7), std=0.3), "bias": normal((7,))},
            "a matrix b for each batch element",
        ),
        Case("broadcast", {"a": normal((2, 1, 5, 6)), "b": normal((1, 3, 6, 4))}, "either shared along an axis of its own"),
        Case("split", _inputs(3, 1300, 5, **_FULL), "k in several sums", {"activation": "gelu"}),
        Case("rows", _inputs(1100, 4, 6, bias=True), "sums over rows, in parts, for b and bias"),
        Case("row", _inputs(1, 40, 24, bias=True), "a single row"),
        Case("one", _inputs(1, 1, 1, **_FULL), "one element"),
    ),
    compiled=(
        Case("4096", _inputs(4096, 4096, 4096), "square"),
        Case("8192", _inputs(8192, 8192, 8192), "square, large"),
        Case("mlp", _inputs(16384, 1024, 4096, bias=True), "a transformer's first feed-forward layer", {"activation": "gelu"}),
        Case("residual", _inputs(16384, 4096, 1024, **_FULL), "and its second"),
        Case("skinny", _inputs(16, 4096, 4096, bias=True), "few rows, k split", {"activation": "silu"}),
        Case("odd", _inputs(1000, 1001, 999, **_FULL), "masks on every side", {"activation": "gelu"}),
    ),
    tuned=(
        Case("up", _inputs(4096, 4096, 14336), "a feed-forward layer of an 8B model"),
        Case("down", _inputs(4096, 14336, 4096), "its second product"),
        Case("odd_rows", _inputs(5000, 4096, 11008), "that of a 7B model, of some number of tokens"),
    ),
    backward_kernels=3,
    kept=1,  # z; a as well, where the gradient of b is asked for
    forward_bytes=_bytes,
    backward_bytes=lambda c, **operands: 2 * _bytes(c, **operands),
    forward_flops=_flops,
    backward_flops=lambda options, **operands: 2 * _flops(options, **operands),
)
