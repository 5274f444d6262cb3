"""The public function of flash attention."""

import math
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jtops.config import Implementation, is_deterministic
from jtops.errors import UnsupportedError
from jtops.kernels._lib import checks, precision
from jtops.kernels._lib.frame.launch import Config
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels.attention.reference import attention
from jtops.kernels.attention.scores import MAX_COLUMNS
from jtops.kernels.attention.variants import BACKWARD, FORWARD

_OP = "flash_attention"
_MAX_HEAD_DIM = 256


def limits(q, k, v, *others, **_) -> str | None:
    """Why a legal call has no kernel; None if it has one."""
    if max(q.shape[-1], v.shape[-1]) > _MAX_HEAD_DIM:
        return f"no kernel for head dims above {_MAX_HEAD_DIM}; got q and k {q.shape[-1]}, v {v.shape[-1]}"
    _, _, _, _, bias, mask, *of_heads = (*others, *(None,) * 8)[:8]
    if (columns := max(x.shape[-1] for x in (bias, mask, k) if x is not None)) > MAX_COLUMNS:
        return f"no kernel for a bias or mask of more than {MAX_COLUMNS} keys; got {columns}"
    return checks.kernel_floats(q, k, v, bias, *of_heads)


_attention = fused_op(
    _OP,
    operands={
        "q": "s (g r) d",
        "k": "t g d",
        "v": "t g e",
        "q_ids": "s",
        "kv_ids": "t",
        "q_lengths": "",
        "kv_lengths": "",
        "bias": "(g r) s t",
        "mask": "(g r) s t",
        "sinks": "(g r)",
        "alibi_slopes": "(g r)",
    },
    results={"out": "s (g r) e", "lse": "s (g r)"},
    reference=attention,
    forward=FORWARD,
    backward=BACKWARD,
    saves=("out", "lse"),
    whole="t d e",
    positions=("s",),
    limits=limits,
)


type Causal = bool | Literal["top_left", "bottom_right"]
type Window = int | tuple[int | None, int | None]


class _Options(TypedDict, total=False):
    """The options that both forms of the call take besides `return_lse`."""

    bias: Array | None
    mask: Array | None
    causal: Causal
    window: Window | None
    segment_ids: Array | tuple[Array, Array] | None
    q_lengths: Array | int | None
    kv_lengths: Array | int | None
    scale: float | None
    softcap: float | None
    sinks: Array | None
    alibi_slopes: Array | None
    precision: Any
    deterministic: bool | None
    implementation: Implementation | None
    config: Config | None


@overload
def flash_attention(
    q: Array, k: Array, v: Array, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Array, Array]: ...
@overload
def flash_attention(q: Array, k: Array, v: Array, *, return_lse: Literal[False] = False, **options: Unpack[_Options]) -> Array: ...
def flash_attention(
    q: Float[Array, "*batch s h d"],
    k: Float[Array, "*batch t g d"],
    v: Float[Array, "*batch t g e"],
    *,
    bias: Float[Array, "#*batch #h #s #t"] | None = None,
    mask: Bool[Array, "#*batch #h #s #t"] | None = None,
    causal: Causal = False,
    window: Window | None = None,
    segment_ids: Int[Array, "*batch s"] | tuple[Int[Array, "*batch s"], Int[Array, "*batch t"]] | None = None,
    q_lengths: Int[Array, "*batch"] | int | None = None,
    kv_lengths: Int[Array, "*batch"] | int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    alibi_slopes: Float[Array, " h"] | None = None,
    precision: Any = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    config: Config | None = None,
):
    """``softmax(scale * q k^T + bias) v`` for each head, without ever writing the matrix of scores.

    Query head i reads key/value head ``i // (h / g)``. Scores, their softmax and all sums are float32. Scores are scaled, capped by
    `softcap`, added to the bias, then masked. All masks hold together. A query that may see no key gives 0, lse -inf (or its sink)
    and no gradient. Elements at or past `kv_lengths` and `q_lengths`, or with a
    negative segment id, never leak, whatever they hold. Everything has the same bits every time, except that the gradient of q may
    differ in its last ones on Hopper GPUs, unless `deterministic`. Forward-mode and second derivatives take the reference, whose
    memory grows with s * t.

    >>> q, k = jnp.ones((2, 128, 8, 64)), jnp.ones((2, 128, 2, 64))  # batch, length, heads, head dim: four queries' heads a key's
    >>> v = jnp.arange(128.0)[:, None, None] * k
    >>> out = jtops.flash_attention(q, k, v, causal=True, window=(2, 0))
    >>> print(out[0, :5, 0, 0])  # keys that are all alike: the mean index of the last three
    [0.  0.5 1.  2.  3. ]

    Args:
      q: queries, [..., s, h, d]. Kernel dtypes: float32, bfloat16, float16; d and e up to 256.
      k, v: keys [..., t, g, d] and values [..., t, g, e], of q's dtype; g divides h.
      bias: floating, added to the scores; -inf counts as masked. It and `mask` broadcast to [..., h, s, t], right-aligned. Its
        gradient, float32 until it is rounded, has its own shape; only where it has queries and keys does that take s * t elements.
      mask: boolean; True: the query sees the key.
      causal: True or "top_left": query i sees keys up to i; "bottom_right": up to ``i + kv_length - q_length``.
      window: keys that a query at position p sees: p - left .. p + right, inclusive; an int is both, None on a side no bound. It
        does not make attention causal.
      segment_ids: a query sees keys of its own id; one array for both sides, or a pair. Negative ids see and are
        seen by nothing. Ids and lengths are int32 or shorter.
      q_lengths, kv_lengths: how many queries and keys of each batch element count; all, where that is more than there are.
      scale: factor of the scores; None is ``1 / sqrt(d)``.
      softcap: positive; the scaled scores become ``softcap * tanh(scores / softcap)``.
      sinks: [h], a logit that takes part in the softmax of every query of its head, in lse too, without a value; neither scaled,
        capped nor masked.
      alibi_slopes: [h]; ``slope * |query position - key|`` is subtracted from the scores where the bias is added. They have no
        gradient.
      precision: accuracy of products of float32 inputs; None is what ``jax_default_matmul_precision`` says, else float32 accuracy.
      deterministic: True: the gradient of q is summed in one order, which makes the backward on Hopper GPUs 2 to 36 %
        slower. False: in any order. None is what ``jtops.config.deterministic`` says, else XLA's own flags, else False.
      return_lse: also return the log of the sum of the exponentials, float32 [..., s, h], differentiable.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_M`` (queries) and ``BLOCK_N`` (keys) of the kernels for every GPU, the variant "portable"; or
        ``WARPGROUPS`` (2 or 3, of 64 queries) and ``BLOCK_N`` of the forward kernel for Hopper GPUs, "hopper". Kernels that have
        other blocks take no notice of it. None: chosen by size and device.

    Returns:
      [..., s, h, e] of q's dtype, or (that, lse).

    Raises:
      TypeError: dtypes that differ or are not floating; a `mask` that is not boolean; ids or lengths that are not integers; `scale`
        or `softcap` traced.
      ValueError: shapes that do not fit, heads that do not divide, a negative window, a `softcap` that is not positive, an unknown
        `causal` or `precision`.
      UnsupportedError: head dims above 256 or float64, where a kernel must run; a derivative by `alibi_slopes`.

    Where scores reach tens of thousands the gradients of a kernel are less exact than those of "xla": it finds the probabilities
    again from one float32 log-sum-exp, whose last bit is then no longer small. Where all scores are -5e4 the gradient of v in
    float32 is off by up to 0.3 %, where all are -3e7 it is meaningless; the result itself is right.

    Source: Dao, "FlashAttention-2", 2023, algorithms 1 and 2.
    """
    q, k, v = (checks.array(_OP, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{_OP}: q, k and v must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}. Cast them to one.")
    sizes = checks.axes(_OP, q=(q, "... s h d"), k=(k, "... t g d"), v=(v, "... t g e"))
    if sizes["g"] == 0 or sizes["h"] % sizes["g"]:
        raise ValueError(
            f"{_OP}: query heads ({sizes['h']}) must be a multiple of key/value heads ({sizes['g']}); got q {q.shape}, k {k.shape}."
        )
    batch = checks.broadcast(_OP, "batch axes", q=q.shape[:-3], k=k.shape[:-3], v=v.shape[:-3])
    q_ids, kv_ids = _segments(segment_ids, sizes, batch)
    lengths = [_integers(name, x, "...", sizes, batch) for name, x in (("q_lengths", q_lengths), ("kv_lengths", kv_lengths))]
    bias = None if bias is None else _table("bias", checks.array(_OP, "bias", bias), sizes, batch)
    mask = None if mask is None else _table("mask", checks.boolean(_OP, "mask", mask), sizes, batch)
    sinks, slopes = (_of_heads(name, x, sizes) for name, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes)))
    if slopes is not None and q.dtype != jnp.float64:  # Python's numbers are float64 where JAX has that
        slopes = slopes.astype(jnp.float32)
    left, right = _window(window, sizes["s"] + sizes["t"])
    if not isinstance(causal, bool | np.bool_ | str) or causal not in (False, True, "top_left", "bottom_right"):
        raise ValueError(f'{_OP}: causal must be False, True, "top_left" or "bottom_right"; got {causal!r}.')
    if causal:
        right = 0 if right is None else min(right, 0)
    out, *lse = _attention(
        q,
        k,
        v,
        q_ids,
        kv_ids,
        *lengths,
        bias,
        mask,
        sinks,
        None if slopes is None else _without_gradient(slopes),
        implementation=implementation,
        config=config,
        results=2 if return_lse else 1,  # of a row that sees nothing lse is -inf, which jax_debug_infs would find
        scale=1 / math.sqrt(max(sizes["d"], 1)) if scale is None else checks.static_float(_OP, "scale", scale),
        softcap=_softcap(softcap),
        precision=_precision(q, precision),
        deterministic=_deterministic(deterministic),
        q_size=sizes["s"],
        left=left,
        right=right,
        align="bottom_right" if causal == "bottom_right" else None,
    )
    return (out, *lse) if return_lse else out


@jax.custom_jvp
def _without_gradient(slopes):
    """The slopes, whose derivative no kernel makes: whoever asks for it is told so, because silence would be a zero."""
    return slopes


@_without_gradient.defjvp
def _refused(primals, tangents):
    raise UnsupportedError(f"{_OP} has no derivative by alibi_slopes. Use jax.lax.stop_gradient, or give them as a bias.")


def _softcap(given) -> float | None:
    if given is None:
        return None
    softcap = checks.static_float(_OP, "softcap", given)
    if not 0 < softcap < math.inf:
        raise ValueError(f"{_OP}: softcap must be positive and finite, or None; got {given!r}.")
    return softcap


def _table(name: str, x: jax.Array, sizes: dict[str, int], batch: tuple[int, ...]) -> jax.Array:
    """A bias or mask with all of the axes [h, s, t], each whole or of size 1."""
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    core = tuple(sizes[axis] for axis in "hst")
    if any(n not in (1, full) for n, full in zip(x.shape[-3:], core, strict=True)):
        wanted = f"[batch, h, s, t], here [..., {', '.join(map(str, core))}]"
        raise ValueError(f"{_OP}: {name} must broadcast to {wanted}; got {x.shape}.")
    checks.broadcast(_OP, "batch axes", attention=batch, **{name: x.shape[:-3]})
    return x


def _of_heads(name: str, x, sizes: dict[str, int]) -> jax.Array | None:
    if x is None:
        return None
    x = checks.array(_OP, name, x)
    if x.shape != (sizes["h"],):
        raise ValueError(f"{_OP}: {name} must have shape [h], here ({sizes['h']},); got {x.shape}.")
    return x


def _precision(q, asked) -> str:
    resolved = precision.resolve(_OP, asked)
    return resolved if q.dtype.itemsize >= 4 else "tf32"  # of half-precision inputs every product is exact


def _deterministic(asked: bool | None) -> bool:
    if asked is not None and not isinstance(asked, bool | np.bool_):
        raise TypeError(f"{_OP}: deterministic must be True, False or None; got {asked!r}.")
    return is_deterministic() if asked is None else bool(asked)


def _window(window, far: int) -> tuple[int | None, int | None]:
    """Both sides of a window; one that reaches `far`, further than any key is from any query, is no bound, whatever the int."""
    sides = window if isinstance(window, tuple) else (window, window)
    legal = lambda x: x is None or (isinstance(x, int | np.integer) and not isinstance(x, bool) and x >= 0)
    if len(sides) != 2 or not all(map(legal, sides)):
        raise ValueError(f"{_OP}: window must be an int, or a pair (left, right) of ints or None, none negative; got {window!r}.")
    left, right = (None if x is None or x >= far else int(x) for x in sides)
    return left, right


def _integers(name: str, x, spec: str, sizes: dict[str, int], batch: tuple[int, ...]):
    if x is None:
        return None
    if not isinstance(x, np.ndarray | np.generic | jax.Array):  # Python's ints have no width of their own
        x = checks.array(_OP, name, _as_int32(x), floating=False)
    else:
        x = checks.array(_OP, name, x, floating=False)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{_OP}: {name} must be integers; got {x.dtype} {x.shape}.")
    if not jnp.can_cast(x.dtype, jnp.int32):  # an id cut to 32 bits would meet another, or be taken for padding
        raise TypeError(f"{_OP}: {name} must fit int32; got {x.dtype} {x.shape}. Cast it, e.g. {name}.astype('int32').")
    core = [sizes[letter] for letter in spec.split()[1:]]
    if list(x.shape[x.ndim - len(core) :]) != core or x.ndim < len(core):
        raise ValueError(f"{_OP}: {name} must have shape [batch{''.join(f', {n}' for n in core)}]; got {x.shape}.")
    checks.broadcast(_OP, "batch axes", attention=batch, **{name: x.shape[: x.ndim - len(core)]})
    return x.astype(jnp.int32)


def _as_int32(x):
    """Python's ints as int32 if all of them fit; anything else as it is."""
    try:
        wide = np.asarray(x)
    except (TypeError, ValueError):
        return x
    fits = wide.dtype.kind == "i" and np.all(wide == wide.astype(np.int32))
    return wide.astype(np.int32) if fits else x


def _segments(ids, sizes: dict[str, int], batch: tuple[int, ...]):
    if ids is None:
        return None, None
    if isinstance(ids, list):
        raise TypeError(f"{_OP}: segment_ids must be an array or a tuple of two, (q_ids, kv_ids); got a list of {len(ids)}.")
    if not isinstance(ids, tuple):
        if sizes["s"] != sizes["t"]:
            raise ValueError(
                f"{_OP}: one segment_ids array is for as many queries as keys; got {sizes['s']} and {sizes['t']}: pass a pair."
            )
        ids = (ids, ids)
    if len(ids) != 2 or any(x is None for x in ids):
        raise ValueError(f"{_OP}: segment_ids must be an array or a pair of arrays (q_ids, kv_ids); got {len(ids)} entries.")
    return tuple(
        _integers(f"segment_ids[{i}]", x, f"... {axis}", sizes, batch) for i, (x, axis) in enumerate(zip(ids, "st", strict=True))
    )
