"""The passes around the Hopper backward's main kernel, which computes dk and dv whole and adds up dq in float32.

A program of either has a tile of BLOCK_M queries of one head, heads innermost, so that neighbouring programs read neighbouring
memory. BLOCK_D, 64 or 128, is how many columns the main kernel's tiles have; E and D are those that v and q have.

What they share with the main kernel, by number of the tile, ``line = (batch * heads + head) * tiles + tile``:

* lse2, delta: float32 ``[lines * BLOCK_M]``. A query that is padding or sees no key has lse2 = +inf, so its probabilities are 0.
* dq sums: float32 ``[lines, 8192]``, in the order in which the main kernel's threads hold a tile (see `postprocess_kernel`).
* turns: int32 ``[lines]``, how many blocks of keys have added to the tile; None where they add in any order.
"""

from jtops._compat.triton import tl, triton


@triton.jit(do_not_specialize=["s", "h"])
def preprocess_kernel(
    out_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    sums_ptr,
    turns_ptr,
    s,
    h,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute delta = rowsum(do * out) - dlse, and lse in base 2; clear the sums of dq and the turns."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(s, BLOCK_M)
    head = pid % h
    tile = pid // h % tiles
    b = pid // h // tiles
    line = (b.to(tl.int64) * h + head) * tiles + tile
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < s
    places = (b.to(tl.int64) * s + rows) * h + head  # of [batch, s, h]
    columns = tl.arange(0, BLOCK_D)[None, :]
    at = places[:, None] * E + columns
    there = inside[:, None] & (columns < E)
    out = tl.load(out_ptr + at, mask=there, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + at, mask=there, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + places, mask=inside, other=-float("inf"))
    delta = tl.sum(do * out, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + places, mask=inside, other=0.0)
    alive = lse > -float("inf")
    lines = line * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(lse2_ptr + lines, tl.where(alive, lse * 1.4426950408889634, float("inf")))
    tl.store(delta_ptr + lines, tl.where(alive, delta, 0.0))
    tl.store(sums_ptr + line * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D), tl.zeros((BLOCK_M * BLOCK_D,), tl.float32))
    if turns_ptr is not None:
        tl.store(turns_ptr + line, 0)


@triton.jit(do_not_specialize=["s", "h"])
def postprocess_kernel(sums_ptr, dq_ptr, scale, s, h, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Compute dq = scale * sums, in q's dtype and order, without the columns that are padding.

    A tile of sums is two squares of 64 x 64, one of each consumer: the left and right halves of 64 queries of 128 columns, or the
    upper and lower ones of 128 queries of 64 columns. Of a square a thread (warp w, lane 4 r + c) holds rows 16 w + r and 8
    further, and of every 8 columns numbers 2 c and 2 c + 1: 32 numbers, which lie together.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(s, BLOCK_M)
    head = pid % h
    tile = pid // h % tiles
    b = pid // h // tiles
    line = (b.to(tl.int64) * h + head) * tiles + tile
    sums = tl.load(sums_ptr + line * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D))
    dq = (sums * scale).to(dq_ptr.dtype.element_ty)
    dq = dq.reshape(2, 4, 8, 4, 8, 2, 2)  # warpgroup, warp, r, c | columns / 8, the upper or lower 8 rows, column % 2
    if BLOCK_D == 128:
        dq = dq.permute(1, 5, 2, 0, 4, 3, 6).reshape(BLOCK_M, BLOCK_D)
    else:
        dq = dq.permute(0, 1, 5, 2, 4, 3, 6).reshape(BLOCK_M, BLOCK_D)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)[None, :]
    at = ((b.to(tl.int64) * s + rows) * h + head)[:, None] * D + columns
    tl.store(dq_ptr + at, dq, mask=(rows < s)[:, None] & (columns < D))
