"""cross_entropy: minus the logarithm of the softmax of each row's label.

Bound by memory: the forward reads the logits once, the backward reads them once more and writes their gradient; nothing else of
their size exists. What the op makes of a row are three numbers, from which its loss follows in jax.numpy: with ``lse =
log(sum(exp(x)))`` that is ``lse - x[label]``, ``lse`` and ``lse - mean(x)``. So one backward kernel serves every option, and rows
whose loss does not count are not even read for it.
"""

import math
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jtops._compat.triton import tl, triton
from jtops.config import Implementation
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib import checks
from jtops.kernels._lib.device.activations import tanh
from jtops.kernels._lib.device.rows import exp, length
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels._lib.precision import accumulator
from jtops.kernels._lib.rows import host
from jtops.kernels._lib.rows.device import edges, lanes_of, load_row, row_start, store_row
from jtops.kernels._lib.spec import Case, Meshed, Spec, labels, normal

_OP = "cross_entropy"
# Labels of rows that have none in range, and of those that do not count, whose results are 0. Kernels write the numbers out.
_NONE, _IGNORED = -1, -2


# ----------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _capped(x, softcap):
    """The logits that count, and their derivative by those given: 1 without a cap."""
    slope = 1.0
    if softcap is not None:
        t = tanh(x / softcap)
        x = t * softcap
        slope = 1.0 - t * t
    return x, slope


@triton.jit(do_not_specialize_on_alignment=["r"])
def _forward_kernel(
    logits_ptr,
    labels_ptr,
    nll_ptr,
    lse_ptr,
    smooth_ptr,
    top_ptr,
    log_ptr,
    r,
    n,
    softcap,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M rows, BLOCK_N elements of each at a time, with a running maximum `top` and the sum of exp(x - top).

    The mean is that of differences from `anchor`, the first block's maximum: of large logits it would lose the digits that count.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = length(n, UNIT, INDEX)
    rows = pid * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < r
    start, begin = row_start(rows[:, None], n, VECTOR)
    stop = lanes_of(n, VECTOR)
    label = tl.load(labels_ptr + rows, mask=inside, other=-2)
    counts = label != -2
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    anchor = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    plain = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, stop, BLOCK_N):
        lanes = (first + tl.arange(0, BLOCK_N))[None, :]
        here = counts[:, None] & (lanes < stop)
        x = load_row(logits_ptr, start, lanes, begin, here, n, -float("inf"), VECTOR, "evict_first")
        x, _slope = _capped(x, softcap)
        here = here & (lanes >= begin) & (lanes < begin + n)
        x = tl.where(here, x, -float("inf"))
        new = tl.maximum(top, tl.max(x, 1))
        finite = tl.where(new == -float("inf"), 0.0, new)
        total = total * exp(top - finite)[:, None] + exp(x - finite[:, None])
        anchor = finite if first == 0 else anchor
        plain += tl.where(here, x - anchor[:, None], 0.0)
        top = new
    log = tl.log(tl.sum(total, 1))
    picked = tl.load(logits_ptr + rows * n + label, mask=label >= 0, other=float("nan")).to(tl.float32)
    picked, _slope = _capped(picked, softcap)
    smooth = log - (tl.sum(plain, 1) / n + (anchor - top))
    tl.store(nll_ptr + rows, tl.where(counts, log - (picked - top), 0.0), mask=inside)
    tl.store(lse_ptr + rows, tl.where(counts, top + log, 0.0), mask=inside)
    tl.store(smooth_ptr + rows, tl.where(counts, smooth, 0.0), mask=inside)
    if top_ptr is not None:
        tl.store(top_ptr + rows, top, mask=inside)
        tl.store(log_ptr + rows, log, mask=inside)


@triton.jit
def _cotangent(ptr, rows, inside):
    """A row's cotangent; 0 where that result has none."""
    g = tl.zeros(rows.shape, tl.float32)
    if ptr is not None:
        g = tl.load(ptr + rows, mask=inside, other=0.0)
    return g


@triton.jit
def _gradient(x, columns, label, top, log, g_nll, g_lse, g_smooth, n, softcap):
    """The gradient of a tile of logits; the rows' numbers have an axis for columns."""
    x, slope = _capped(x, softcap)
    p = exp((x - top) - log)
    d = p * (g_nll + g_lse + g_smooth) - tl.where(columns == label, g_nll, 0.0) - g_smooth / n
    return d * slope


@triton.jit(do_not_specialize_on_alignment=["r"])
def _backward_kernel(
    logits_ptr,
    labels_ptr,
    top_ptr,
    log_ptr,
    g_nll_ptr,
    g_lse_ptr,
    g_smooth_ptr,
    dlogits_ptr,
    r,
    n,
    softcap,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a tile. Rows that do not count, or have no cotangents, get zeros, whatever they hold, and are not read."""
    pid = tl.program_id(0).to(tl.int64)
    n = length(n, UNIT, INDEX)
    stop = lanes_of(n, VECTOR)
    blocks = tl.cdiv(stop, BLOCK_N)
    rows = pid // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < r
    first = (pid % blocks).to(n.dtype) * BLOCK_N
    lanes = (first + tl.arange(0, BLOCK_N))[None, :]
    start, begin = row_start(rows[:, None], n, VECTOR)
    label = tl.load(labels_ptr + rows, mask=inside, other=0)[:, None]
    top = tl.load(top_ptr + rows, mask=inside, other=0.0)[:, None]
    log = tl.load(log_ptr + rows, mask=inside, other=0.0)[:, None]
    g_nll = _cotangent(g_nll_ptr, rows, inside)[:, None]
    g_lse = _cotangent(g_lse_ptr, rows, inside)[:, None]
    g_smooth = _cotangent(g_smooth_ptr, rows, inside)[:, None]
    g_nll = tl.where((label == -1) & (g_nll != 0.0), float("nan"), g_nll)  # a gradient without a target would be no gradient
    counts = ((g_nll != 0.0) | (g_lse != 0.0) | (g_smooth != 0.0)) & (label != -2)
    here = inside[:, None] & (lanes < stop)
    x = load_row(logits_ptr, start, lanes, begin, here & counts, n, -float("inf"), VECTOR, "evict_first")
    d = _gradient(x, lanes - begin, label, top, log, g_nll, g_lse, g_smooth, n, softcap)
    store_row(dlogits_ptr, start, lanes, begin, here, tl.where(counts, d, 0.0), n, VECTOR, "")
    if VECTOR > 1:
        lanes, edge = edges(begin, n, VECTOR)
        edge = edge & inside[:, None] & (lanes >= first) & (lanes < first + BLOCK_N)
        x = tl.load(logits_ptr + start + lanes, mask=edge & counts, other=0.0).to(tl.float32)
        d = _gradient(x, lanes - begin, label, top, log, g_nll, g_lse, g_smooth, n, softcap)
        tl.store(dlogits_ptr + start + lanes, tl.where(counts, d, 0.0).to(dlogits_ptr.dtype.element_ty), mask=edge)


# --------------------------------------------------------------------------------------------------------------- launchers


def _config(n: int, largest: int) -> Config:
    """Blocks of up to `largest`; rows up to 1024 have a warp, which needs no barrier, and short ones are together."""
    block_n = min(next_power_of_2(n), largest)
    return Config(BLOCK_M=max(1, 1024 // block_n), BLOCK_N=block_n, num_warps=4 if block_n > 1024 else 1)


def _choose(launch: Launch, operands, kernel, largest: int, **more) -> tuple[Config, dict[str, Any]]:
    """The tiles, and the arguments that both kernels take."""
    logits, softcap = launch.full("logits", operands.logits), launch.options["softcap"]
    r, n = logits.shape
    arguments = {
        "logits_ptr": logits,
        "labels_ptr": launch.full("labels", operands.labels),
        "r": r,
        "n": n,
        "softcap": None if softcap is None else np.float32(softcap),
        "UNIT": host.unit(n),
        "INDEX": host.index_type(n),
        **more,
    }
    config = launch.choose(_config(n, largest), (kernel,), arguments, rounded=("r",))
    vector = host.vector(r, n, logits.dtype.itemsize) if config["BLOCK_M"] == 1 else 1
    return config, arguments | {"VECTOR": vector}


def _forward(launch: Launch, operands):
    config, arguments = _choose(launch, operands, _forward_kernel, 2048)
    r, n = arguments["logits_ptr"].shape
    of_rows = jax.ShapeDtypeStruct((r,), jnp.float32)
    kept = of_rows if launch.residuals else None
    outputs = {"nll_ptr": of_rows, "lse_ptr": of_rows, "smooth_ptr": of_rows, "top_ptr": kept, "log_ptr": kept}
    grid = cdiv(r, config["BLOCK_M"])
    got = launch(_forward_kernel, outputs=outputs, grid=grid, config=config, flops=5 * r * n, **arguments)
    return tuple(got[name] for name in outputs if got[name] is not None)


def _backward(launch: Launch, operands, saved, cotangents):
    read = {"top_ptr": saved.top, "log_ptr": saved.log}
    given = {"g_nll_ptr": cotangents.nll, "g_lse_ptr": cotangents.lse, "g_smooth_ptr": cotangents.smooth}
    config, arguments = _choose(launch, operands, _backward_kernel, 4096, **read, **given)
    logits = arguments["logits_ptr"]
    r, n = logits.shape
    outputs = {"dlogits_ptr": jax.ShapeDtypeStruct(logits.shape, logits.dtype)}
    grid = cdiv(r, config["BLOCK_M"]) * cdiv(host.lanes(n, arguments["VECTOR"]), config["BLOCK_N"])
    got = launch(_backward_kernel, outputs=outputs, grid=grid, config=config, flops=5 * r * n, **arguments)
    return got["dlogits_ptr"], None


# ------------------------------------------------------------------------------------------------------------------ the op


def _reference(logits, labels, *, softcap):
    counts = labels != _IGNORED
    x = jnp.where(counts[..., None], logits.astype(accumulator(logits.dtype)), 0)
    if softcap is not None:
        x = softcap * jnp.tanh(x / softcap)
    top = jax.lax.stop_gradient(jnp.max(x, -1))
    shifted = x - top[..., None]
    log = jnp.log(jnp.sum(jnp.exp(shifted), -1))
    n = x.shape[-1]
    past = jnp.where(labels < 0, n, labels)[..., None]
    picked = jnp.take_along_axis(shifted, past, -1, mode="fill", fill_value=0)[..., 0]
    known = jnp.where(labels == _NONE, math.nan, 1.0).astype(x.dtype)  # a factor: the gradient, too, is NaN
    results = (log - picked) * known, top + log, log - jnp.mean(shifted, -1)
    return *(jnp.where(counts, x, 0) for x in results), top, log


_rows = fused_op(
    _OP,
    operands={"logits": "n", "labels": ""},
    results={"nll": "", "lse": "", "smooth": ""},
    residuals={"top": "", "log": ""},
    reference=_reference,
    forward=_forward,
    backward=_backward,
    whole="n",
    limits=checks.kernel_floats,
    blocks="BLOCK_M BLOCK_N",
)


class _Options(TypedDict, total=False):
    """The options that both forms of the call take besides `return_lse`."""

    ignore_index: int | None
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: Literal["none", "sum", "mean"]
    implementation: Implementation | None
    config: Config | None


@overload
def cross_entropy(
    logits: Array, labels: Any, weights: Array | None = None, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Array, Array]: ...
@overload
def cross_entropy(
    logits: Array, labels: Any, weights: Array | None = None, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
) -> Array: ...
def cross_entropy(
    logits: Float[Array, "*batch n"],
    labels: Int[Array, "*batch"],
    weights: Float[Array, "*#batch"] | None = None,
    *,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Literal["none", "sum", "mean"] = "none",
    return_lse: bool = False,
    implementation: Implementation | None = None,
    config: Config | None = None,
):
    """``logsumexp(logits) - logits[label]`` of each row, computed relative to the row's maximum in float32.

    With smoothing s and z: ``(1 - s) * (lse - logits[label]) + s * (lse - mean(logits)) + z * lse^2``. The gradient of the logits
    is written once, in their dtype, from the logits and two numbers a row; nothing else of their size is made. Rows that are
    ignored may hold anything: their loss is 0, and their gradient.

    >>> logits, labels = jnp.zeros((3, 4)), jnp.array([0, 3, -100])  # the last row does not count
    >>> print(jtops.cross_entropy(logits, labels, reduction="mean"), jnp.log(4))
    1.3862944 1.3862944

    Args:
      logits: [..., n], n at least 1. Kernel dtypes: float32, bfloat16, float16.
      labels: [...], integers from 0 to n - 1, or `ignore_index`. Any other makes its row's loss and gradient NaN; in a NumPy array
        it raises.
      weights: [...] or what broadcasts to it: factors of the rows' losses. They have a gradient.
      ignore_index: the label of rows that do not count; None: there is none.
      label_smoothing: the share of the target that all n classes get alike, from 0 to 1.
      z_loss: factor of ``lse^2``, at least 0.
      softcap: positive; logits become ``softcap * tanh(logits / softcap)`` first.
      reduction: "none": a loss a row; "sum"; "mean": the sum over that of the weights of all rows that count, without weights over
        their number; 0 where none counts.
      return_lse: also return each row's ``log(sum(exp(logits)))``, [...] in float32, differentiable; 0 of rows that are ignored.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_M`` (rows) and ``BLOCK_N`` (classes) of a tile. None: chosen by size.

    Returns:
      float32 (float64 for float64 logits): losses [...] or their sum or mean; or (that, lse).

    Raises:
      TypeError: `logits` or `weights` not floating, `labels` not integers; a traced `label_smoothing`, `z_loss` or `softcap`.
      ValueError: shapes that do not fit, no class, a label out of range in a NumPy array, a number out of its range, an unknown
        `reduction`.
      UnsupportedError: float64, where a kernel must run.
    """
    logits = checks.array(_OP, "logits", logits)
    checks.axes(_OP, logits=(logits, "... n"))
    batch, n = logits.shape[:-1], logits.shape[-1]
    if n == 0:
        raise ValueError(f"{_OP}: logits must have at least one class; got {logits.shape}.")
    labels, counts = _labels(labels, batch, n, ignore_index)
    smoothing, z, softcap = _numbers(label_smoothing, z_loss, softcap)
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'{_OP}: reduction must be "none", "sum" or "mean"; got {reduction!r}.')
    if weights is not None:
        weights = checks.array(_OP, "weights", weights)
        if checks.broadcast(_OP, "shapes", rows=batch, weights=weights.shape) != batch:
            raise ValueError(f"{_OP}: weights must broadcast to the labels' shape {batch}; got {weights.shape}.")
    results = 3 if smoothing else 2 if z or return_lse else 1
    nll, *more = _rows(logits, labels, implementation=implementation, config=config, results=results, softcap=softcap)
    loss = nll if not smoothing else (1 - smoothing) * nll + smoothing * more[1]
    loss = loss + z * jnp.square(more[0]) if z else loss
    loss = loss if weights is None else loss * weights.astype(loss.dtype)
    if reduction != "none":
        loss = _reduced(loss, counts, weights, mean=reduction == "mean")
    return (loss, more[0]) if return_lse else loss


def _labels(labels, batch: tuple[int, ...], n: int, ignore_index: int | None) -> tuple[jax.Array, jax.Array | None]:
    """Return the labels as the op has them, and which rows count; None: all."""
    concrete = np.asarray(labels) if isinstance(labels, np.ndarray | np.generic) else None
    labels = checks.array(_OP, "labels", labels, floating=False)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{_OP}: labels must be integers; got {labels.dtype} {labels.shape}.")
    if labels.shape != batch:
        raise ValueError(f"{_OP}: labels must have the shape of the logits without classes, {batch}; got {labels.shape}.")
    if concrete is not None:
        legal = (concrete >= 0) & (concrete < n) | (concrete == ignore_index)
        if not np.all(legal):
            wrong = np.extract(~legal, concrete)[0]
            raise ValueError(f"{_OP}: labels must be from 0 to {n - 1}, or ignore_index ({ignore_index}); got {wrong}.")
    labels = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels  # wide enough for every class
    held = jnp.iinfo(labels.dtype)
    counts = None if ignore_index is None or not held.min <= ignore_index <= held.max else labels != ignore_index
    legal = (labels >= 0) & (labels < n)
    known = jnp.where(legal, jnp.where(legal, labels, 0).astype(jnp.int32), _NONE)  # a cast alone could make one legal
    return (known if counts is None else jnp.where(counts, known, _IGNORED)), counts


def _numbers(label_smoothing, z_loss, softcap) -> tuple[float, float, float | None]:
    smoothing = checks.static_float(_OP, "label_smoothing", label_smoothing)
    z = checks.static_float(_OP, "z_loss", z_loss)
    softcap = None if softcap is None else checks.static_float(_OP, "softcap", softcap)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{_OP}: label_smoothing must be from 0 to 1; got {smoothing}.")
    if not 0 <= z < math.inf:
        raise ValueError(f"{_OP}: z_loss must be finite and at least 0; got {z}.")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{_OP}: softcap must be positive and finite, or None; got {softcap}.")
    return smoothing, z, softcap


def _reduced(loss, counts, weights, *, mean: bool):
    total = jnp.sum(loss)
    if not mean:
        return total
    each = jnp.ones_like(loss) if weights is None else jnp.broadcast_to(weights.astype(loss.dtype), loss.shape)
    share = jnp.sum(each if counts is None else jnp.where(counts, each, 0))
    return jnp.where(share == 0, 0, total / jnp.where(share == 0, 1, share))


# --------------------------------------------------------------------------------------------------------------------- SPEC


def _inputs(*batch, n, std=1.0, weights=False):
    given = {"logits": normal((*batch, n), std=std), "labels": labels(batch, n)}
    return given | {"weights": normal(batch, mean=1.0, std=0.25)} if weights else given


def _bytes(y, logits, labels, **_) -> int:
    return logits.nbytes + labels.nbytes + y.nbytes


SPEC = Spec(
    name=_OP,
    function=cross_entropy,
    small=(Case("small", _inputs(2, 3, n=8), "several rows", axes="b m 8, b m -> b m"),),
    meshed=(Meshed("meshed", _inputs(16, 8, n=32), "rows on many devices", axes="b m n, b m -> b m", split="b m", gathered="n"),),
    cases=(
        Case("odd", _inputs(3, 5, n=257), "a row that fills no block, shifted from vectors"),
        Case("long", _inputs(5, n=1000, std=3.0), "several blocks a row", {}, Config(BLOCK_M=1, BLOCK_N=128)),
        Case("shifted", _inputs(8, n=1001), "rows begin inside of vectors, blocks end in them", {}, Config(BLOCK_M=1, BLOCK_N=256)),
        Case("options", _inputs(7, n=33, weights=True), "all at once", {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0}),
        Case("smooth", _inputs(6, n=40), "the mean alone", {"label_smoothing": 1.0}),
        Case("z", _inputs(6, n=40), "the square of lse", {"z_loss": 0.5}),
        Case("ignored", _inputs(9, n=3), "of three classes one does not count", {"ignore_index": 1}),
        Case("sum", _inputs(4, 4, n=24), "a cotangent for all rows", {"reduction": "sum"}),
        Case(
            "mean", _inputs(4, 4, n=24, weights=True), "over the weights of what counts", {"reduction": "mean", "ignore_index": 2}
        ),
        Case("one", _inputs(5, n=1), "one class: no loss"),
        Case("row", _inputs(n=50), "no batch axis"),
    ),
    compiled=(
        Case("llama2", _inputs(8192, n=32000), "a vocabulary of 32000"),
        Case("llama3", _inputs(8192, n=128256), "a vocabulary of 128256"),
        Case("gpt2", _inputs(8192, n=50257), "a vocabulary that no vector divides"),
    ),
    backward_kernels=1,
    kept=1,
    result_dtype="float32",
    forward_bytes=_bytes,
    backward_bytes=lambda y, logits, labels, **_: 2 * logits.nbytes + labels.nbytes + y.nbytes,
)
