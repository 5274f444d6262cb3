"""The SPECs of attention."""

from jtops.kernels._lib.frame.launch import Config
from jtops.kernels._lib.spec import Case, Meshed, Spec, ids, lengths, mask, normal
from jtops.kernels.attention.dot_product import dot_product_attention
from jtops.kernels.attention.op import flash_attention


def _qkv(b, s, t, h, g, d, e=None):
    return {"q": normal((b, s, h, d)), "k": normal((b, t, g, d)), "v": normal((b, t, g, e or d))}


def _lengths(b, s, t):
    """Lengths, some of them past what there is: then everything counts."""
    return {"q_lengths": lengths((b,), s + 2), "kv_lengths": lengths((b,), t + 2)}


def _pair(b, s, t):
    return {"segment_ids": (ids((b, s), 3, padding=1), ids((b, t), 3, padding=1))}


def _bias(b, h, s, t):
    return {"bias": normal((b, h, s, t))}


def _bytes(_, q, k, v, **__) -> int:
    return q.nbytes * v.shape[-1] // q.shape[-1] + q.nbytes + k.nbytes + v.nbytes


def _flops(options, q, k, v, **__) -> int:
    """The floating-point operations of the forward's two products; half of the scores are masked where attention is causal."""
    (b, s, h, d), (_, t, _, e) = q.shape, v.shape
    return 2 * b * h * s * t * (d + e) // (2 if options.get("causal") else 1)


_CAUSAL = {"causal": True}
_TILES = Config(BLOCK_M=16, BLOCK_N=16)
_D64 = Case("d64_causal", _qkv(4, 4096, 4096, 32, 32, 64), "head dim 64, causal", _CAUSAL)
_D128 = Case("d128_causal", _qkv(4, 4096, 4096, 16, 16, 128), "head dim 128, causal", _CAUSAL)
SPEC = Spec(
    name="flash_attention",
    function=flash_attention,
    small=(
        Case(
            "small",
            _qkv(2, 6, 5, 4, 2, 16),
            "grouped heads, more queries than keys",
            _CAUSAL,
            axes="b s h d, b t 2 d, b t 2 e -> b s h e",
        ),
        Case(
            "masked",
            _qkv(2, 6, 5, 2, 1, 16) | _pair(2, 6, 5) | _lengths(2, 6, 5),
            "ids and lengths of both sides, as operands that every transform has to carry",
            {"causal": "bottom_right", "window": (3, 2)},
            axes="b s h d, b t 1 d, b t 1 e, b s, b t, b, b -> b s h e",
        ),
        Case(
            "scores",
            _qkv(2, 6, 5, 4, 2, 16) | _bias(1, 4, 6, 5) | {"mask": mask((2, 1, 6, 5), 0.8), "sinks": normal((4,))},
            "a bias that the batch shares, a mask that the heads share, and sinks, as operands that every transform has to carry",
            {"softcap": 3.0, "alibi_slopes": (0.5, 0.25, 0.0, -0.125)},
            backward_kernels=3,
            axes="b s 4 d, b t 2 d, b t 2 e, 1 4 s t, b 1 s t, 4 -> b s 4 e",
        ),
    ),
    meshed=(
        Meshed(
            "meshed",
            _qkv(8, 8, 8, 1, 1, 16),
            "batch elements or queries on many devices",
            _CAUSAL,
            axes="b s 1 d, b t 1 d, b t 1 e -> b s 1 e",
            split="b s",
            gathered="t d e",
        ),
        Meshed(
            "masked",
            _qkv(8, 8, 8, 1, 1, 16) | _pair(8, 8, 8) | _lengths(8, 8, 8),
            "ids and lengths follow the queries, keys and batch elements that they are of",
            {"causal": "bottom_right", "window": (5, None)},
            axes="b s 1 d, b t 1 d, b t 1 e, b s, b t, b, b -> b s 1 e",
            split="b s",
            gathered="t d e",
        ),
        Meshed(
            "scores",
            _qkv(8, 8, 8, 8, 8, 16) | {"bias": normal((8, 8, 8)), "mask": mask((8, 1, 8, 8), 0.8), "sinks": normal((8,))},
            "bias and mask follow what they are of; what devices share of them is summed over devices",
            {"softcap": 3.0},
            axes="b s h d, b t h d, b t h e, h s t, b 1 s t, h -> b s h e",
            split="b s h",
            gathered="t d e",
        ),
    ),
    cases=(
        Case("full", _qkv(1, 40, 56, 2, 2, 16), "lengths that fill no block"),
        Case("causal", _qkv(1, 70, 70, 2, 2, 16), "several blocks, the diagonal", _CAUSAL),
        Case("bottom_right", _qkv(1, 20, 50, 2, 1, 16), "aligned to the last key", {"causal": "bottom_right"}),
        Case("dead", _qkv(1, 50, 20, 1, 1, 16), "the first queries see nothing", {"causal": "bottom_right"}),
        Case("grouped", _qkv(2, 33, 33, 4, 2, 32), "two query heads a key head, two batch elements"),
        Case("window", _qkv(1, 90, 90, 1, 1, 16), "a band", {"window": (9, 4)}),
        Case("window_causal", _qkv(1, 90, 90, 1, 1, 16), "a sliding window", {"window": (17, None), "causal": True}),
        Case("value_dim", _qkv(1, 24, 24, 2, 2, 24, 40), "head dims that are no powers of two, v's its own"),
        Case("one", _qkv(1, 1, 37, 2, 1, 16), "a single query"),
        Case("scale", _qkv(1, 20, 20, 1, 1, 16), "scale of one's own", {"scale": 0.5}),
        Case("packed", _qkv(2, 70, 70, 1, 1, 16) | {"segment_ids": ids((2, 70), 4, padding=9)}, "one array of ids", _CAUSAL),
        Case("ids", _qkv(2, 40, 24, 2, 1, 16) | _pair(1, 40, 24), "a pair of ids, shared by the batch"),
        Case("lengths", _qkv(3, 50, 70, 2, 1, 16) | _lengths(3, 50, 70), "lengths of both sides, in tiles", config=_TILES),
        Case(
            "all_masks",
            _qkv(3, 40, 60, 1, 1, 16) | _pair(3, 40, 60) | _lengths(3, 40, 60),
            "every mask at once, aligned to each batch element's last key",
            {"causal": "bottom_right", "window": (21, None)},
            _TILES,
        ),
        Case("softcap", _qkv(1, 40, 56, 2, 2, 16), "scores on both sides of the cap's bend", {"softcap": 1.0}),
        Case("softcap_causal", _qkv(1, 50, 50, 2, 1, 16), "the cap before the mask", {"softcap": 2.0} | _CAUSAL, _TILES),
        Case("bias", _qkv(2, 40, 56, 4, 2, 16) | _bias(2, 4, 40, 56), "a bias of everything's own", config=_TILES),
        Case("bias_batch", _qkv(3, 40, 24, 2, 1, 16) | _bias(1, 2, 40, 24), "a gradient summed over the batch", _CAUSAL, _TILES),
        Case("bias_heads", _qkv(2, 20, 24, 4, 2, 16) | _bias(2, 1, 20, 24), "a gradient summed over heads"),
        Case("bias_all", _qkv(2, 20, 24, 4, 2, 16) | {"bias": normal((20, 24))}, "one table for all, with fewer axes"),
        Case("bias_keys", _qkv(2, 40, 24, 4, 2, 16) | _bias(2, 1, 1, 24), "a bias of keys alone", _CAUSAL, _TILES),
        Case("bias_key_heads", _qkv(2, 20, 40, 4, 2, 16) | _bias(1, 4, 1, 40), "of keys and heads", {"softcap": 2.0}),
        Case("mask", _qkv(2, 40, 56, 2, 1, 16) | {"mask": mask((2, 2, 40, 56), 0.5)}, "a mask of everything's own", config=_TILES),
        Case("mask_sparse", _qkv(1, 40, 24, 2, 1, 16) | {"mask": mask((40, 24), 0.05)}, "queries that see nothing", config=_TILES),
        Case("mask_keys", _qkv(3, 20, 24, 2, 1, 16) | {"mask": mask((3, 1, 1, 24), 0.7)}, "padding as a mask", _CAUSAL),
        Case("sinks", _qkv(2, 40, 24, 4, 2, 16) | {"sinks": normal((4,))}, "sinks that weigh as much as keys", config=_TILES),
        Case(
            "sinks_dead",
            _qkv(2, 50, 20, 2, 1, 16) | {"sinks": normal((2,))} | _lengths(2, 50, 20),
            "queries that see their sink alone",
            {"causal": "bottom_right"},
        ),
        Case(
            "alibi",
            _qkv(2, 40, 56, 4, 2, 16) | _lengths(2, 40, 56),
            "slopes, from positions that each batch element's lengths shift",
            {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625), "causal": "bottom_right"},
        ),
        Case(
            "all_scores",
            _qkv(3, 40, 60, 4, 2, 16)
            | _bias(3, 1, 40, 60)
            | {"mask": mask((1, 4, 40, 60), 0.7)}
            | _pair(3, 40, 60)
            | _lengths(3, 40, 60)
            | {"sinks": normal((4,))},
            "everything at once",
            {"causal": "bottom_right", "window": (41, None), "softcap": 4.0, "alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
            _TILES,
        ),
    ),
    compiled=(
        Case("d64", _qkv(4, 4096, 4096, 32, 32, 64), "head dim 64"),
        _D64,
        Case("d128", _qkv(4, 4096, 4096, 16, 16, 128), "head dim 128"),
        _D128,
        Case("d256", _qkv(4, 4096, 4096, 8, 8, 256), "head dim 256"),
    ),
    tuned=(_D128, _D64),
    backward_kernels=2,
    kept=2,  # q and the result
    forward_bytes=_bytes,
    backward_bytes=lambda *given, **operands: 2 * _bytes(*given, **operands),
    forward_flops=_flops,
    backward_flops=lambda options, **operands: 5 * _flops(options, **operands) // 2,  # five products
    one_dtype=True,
)


def _named(inputs):
    """The same inputs by the names that ``jax.nn`` has for them."""
    return {{"q": "query", "k": "key", "v": "value"}.get(name, name): i for name, i in inputs.items()}


_SHARED = {"key_value_seq_lengths": lengths((2,), 9), "query_seq_lengths": lengths((2,), 8)}
DOT_PRODUCT = Spec(
    name="dot_product_attention",
    function=dot_product_attention,
    small=(
        Case(
            "small",
            _named(_qkv(2, 6, 5, 4, 2, 16)) | _bias(1, 4, 6, 5) | {"mask": mask((2, 1, 6, 5), 0.8)},
            "bias and mask, grouped heads",
            {"is_causal": True},
            axes="b s h d, b t 2 d, b t 2 d, 1 h s t, b 1 s t -> b s h d",
        ),
    ),
    meshed=(
        Meshed(
            "meshed",
            _named(_qkv(8, 8, 8, 1, 1, 16)) | {"mask": mask((8, 1, 8, 8), 0.8)},
            "batch elements or queries on many devices, masks with them",
            {"is_causal": True},
            axes="b s 1 d, b t 1 d, b t 1 d, b 1 s t -> b s 1 d",
            split="b s",
            gathered="t d",
        ),
    ),
    cases=(
        Case("plain", _named(_qkv(2, 20, 24, 2, 1, 16)), "by other names", {"scale": 0.5, "local_window_size": (5, 9)}),
        Case("lengths", _named(_qkv(2, 8, 9, 2, 2, 16)) | _SHARED, "lengths of both sides"),
        Case("bias", _named(_qkv(2, 20, 24, 2, 1, 16)) | _bias(1, 2, 20, 24), "a bias that the batch shares", {"is_causal": True}),
    ),
    compiled=(
        Case("d128_bias", _named(_qkv(4, 4096, 4096, 32, 8, 128)) | _bias(1, 32, 4096, 4096), "a bias that the batch shares"),
    ),
    backward_kernels=3,
    kept=2,  # q and the result
    forward_bytes=lambda _, query, key, value, **others: _bytes(_, query, key, value) + sum(x.nbytes for x in others.values()),
    backward_bytes=lambda _, query, key, value, **others: (
        2 * (_bytes(_, query, key, value) + sum(x.nbytes for x in others.values()))
    ),
    forward_flops=lambda options, query, key, value, **_: _flops(options, query, key, value),
    backward_flops=lambda options, query, key, value, **_: 5 * _flops(options, query, key, value) // 2,
    one_dtype=True,
    launches="flash_attention",
    alike="flash_attention",
)
