"""The SPEC of flash attention."""

from jtops.kernels._lib.frame.launch import Config
from jtops.kernels._lib.spec import Case, Meshed, Spec, ids, lengths, normal
from jtops.kernels.attention.op import flash_attention


def _qkv(b, s, t, h, g, d, e=None):
    return {"q": normal((b, s, h, d)), "k": normal((b, t, g, d)), "v": normal((b, t, g, e or d))}


def _lengths(b, s, t):
    """Lengths, some of them past what there is: then everything counts."""
    return {"q_lengths": lengths((b,), s + 2), "kv_lengths": lengths((b,), t + 2)}


def _pair(b, s, t):
    return {"segment_ids": (ids((b, s), 3, padding=1), ids((b, t), 3, padding=1))}


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
