"""What the three portable kernels share: how tiles are loaded, what a launch is told, and how its tiles are chosen."""

from typing import Any

from jtops._compat.triton import tl, triton
from jtops.core.sizes import next_power_of_2
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.precision import dot_precision
from jtops.kernels.attention.mask import Mask, Shape, mask_of, operand_of
from jtops.kernels.attention.scores import Scores, scores_of

LOG2E = 1.4426950408889634


@triton.jit
def load_rows(ptr, start, rows, stride, cols, n_rows, n_cols, ids, ROWS_INSIDE: tl.constexpr, COLS_INSIDE: tl.constexpr):
    """Load a tile of a matrix with rows `stride` apart: rows ``start + rows``, zeros outside and where `ids`, if there are any, are
    negative. Only the start needs 64 bits.
    """
    ptrs = ptr + start.to(tl.int64) * stride + (rows[:, None] * stride + cols[None, :])
    if ids is not None:
        there = (start + rows < n_rows) & (ids >= 0)
        if COLS_INSIDE:
            tile = tl.load(ptrs, mask=there[:, None], other=0.0)
        else:
            tile = tl.load(ptrs, mask=there[:, None] & (cols < n_cols)[None, :], other=0.0)
    elif ROWS_INSIDE and COLS_INSIDE:
        tile = tl.load(ptrs)
    elif COLS_INSIDE:
        tile = tl.load(ptrs, mask=(start + rows < n_rows)[:, None], other=0.0)
    else:
        tile = tl.load(ptrs, mask=(start + rows < n_rows)[:, None] & (cols < n_cols)[None, :], other=0.0)
    return tile


def arguments(launch: Launch, x) -> dict[str, Any]:
    """The arguments that every kernel takes: operands, mask, sizes, scores."""
    (_, s, h, d), (_, t, g, e) = x.q.shape, x.v.shape
    block_d, block_e = (max(16, next_power_of_2(n)) for n in (d, e))
    return {
        "q": operand_of(launch, x, "q"),
        "k": operand_of(launch, x, "k"),
        "v": operand_of(launch, x, "v"),
        "mask": mask_of(launch, x),  # a shard that has all queries reads that it begins at 0: told so, it takes more registers
        "shape": Shape(s, t, h, g, d, e, launch.options["q_size"]),
        "scores": scores_of(launch, x),
        "D_INSIDE": d == block_d,
        "E_INSIDE": e == block_e,
        "PRECISION": dot_precision(launch.options["precision"], launch.target),
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
    }


def choose(launch: Launch, heuristic: Config, kernel, given: dict[str, Any], name: str) -> Config:
    """The tiles of one kernel; where blocks up to 256 divide both lengths, kernels have less to mask."""
    shape = given["shape"]
    sizes = [f"shape.{size}" for size in ("s", "t", "h", "g", "q_size")]
    return launch.choose(
        heuristic,
        (kernel,),
        given,
        name=name,
        rounded=("mask.left", "mask.right", *sizes, *(f"scores.{table}_{size}" for table in ("bias", "mask") for size in "hst")),
        heads=next_power_of_2(launch.batch * shape.h),
        even=shape.s % 256 == shape.t % 256 == 0,
    )


def masked(mask: Mask) -> bool:
    """Whether some query may not see some key that is there."""
    return any(x is not None for x in (mask.left, mask.right, mask.q_ids, mask.q_lengths, mask.kv_lengths))


def _table_bytes(scores: Scores) -> int:
    """The bytes that bias and mask have for a pair of query and key; shared memory holds a tile of them for each stage."""
    tables = ((scores.bias, scores.bias_s, scores.bias_t), (scores.mask, scores.mask_s, scores.mask_t))
    return sum(table.array.dtype.itemsize for table, s, t in tables if s is not None and t is not None)


def forward_tiles(launch: Launch, given: dict[str, Any], itemsize: int) -> Config:
    """The largest tiles whose operands fit in shared memory: queries once, keys and values as often as there are stages."""
    shape, pair = given["shape"], _table_bytes(given["scores"])
    d, target = max(shape.d, shape.e), launch.target
    if itemsize == 4 and d > 128 and target.arch in (100, 101, 103):
        return Config(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=1)  # q in two parts, and the sum, fill no tensor memory
    block_d = max(16, next_power_of_2(d))
    if itemsize == 2 and block_d <= 128 and given["mask"].q_ids is not None and not pair:
        return Config(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)  # ids are masks in every block, which take registers
    wide = [] if block_d <= 64 or pair else [(128, 128, 8, 3), (128, 128, 8, 2)]  # with short heads, wide tiles only cost registers
    for block_m, block_n, warps, stages in (
        *wide,
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 32, 8, 2),
        (64, 32, 4, 2),
        (64, 32, 4, 1),
        (32, 16, 4, 1),
        (16, 16, 4, 1),
    ):
        if itemsize == 4 and block_m * block_n > 64 * 32:  # and need registers
            continue
        rows = block_m * (2 if itemsize == 4 else 1) + 2 * stages * block_n  # three TF32 products take q in two parts
        if itemsize * block_d * rows + pair * block_m * block_n * stages <= target.max_shared_bytes:
            return Config(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages)
    return Config(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)


def backward_tiles(launch: Launch, given: dict[str, Any], itemsize: int) -> tuple[Config, Config, Config]:
    """Tiles of the three kernels: (dk and dv, dq, a bias)."""
    shape, pair = given["shape"], _table_bytes(given["scores"])
    block_d, memory = max(16, next_power_of_2(max(shape.d, shape.e))), launch.target.max_shared_bytes
    if itemsize == 4 or itemsize * block_d * 4 * 64 > memory:
        small = 32 if block_d <= 64 else 16
        return (Config(BLOCK_M=small, BLOCK_N=small, num_warps=4, num_stages=1),) * 3
    if block_d <= 64 and given["mask"].q_ids is not None and not pair:
        return (Config(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),) * 3
    if block_d <= 128 and itemsize * block_d * (2 * 128 + 4 * 64) + 2 * pair * 64 * 128 <= memory:
        return (
            Config(BLOCK_M=64, BLOCK_N=128, num_warps=8, num_stages=2),
            Config(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2),
            Config(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2),
        )
    if block_d <= 128:
        return (Config(BLOCK_M=64, BLOCK_N=64, num_warps=8, num_stages=1),) * 3
    return (
        Config(BLOCK_M=32, BLOCK_N=64, num_warps=8, num_stages=1),
        Config(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=1),
        Config(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=1),
    )
