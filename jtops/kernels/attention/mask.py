"""Device code that forward and backward share: who sees whom, and tiles of q, k, v."""

from jtops._compat.triton import tl, triton


@triton.jit
def load_rows(ptr, start, rows, stride, cols, n_rows, n_cols, ROWS_INSIDE: tl.constexpr, COLS_INSIDE: tl.constexpr):
    """A tile of the matrix whose rows are `stride` apart: rows ``start + rows``, zeros outside. Only the start needs 64 bits."""
    ptrs = ptr + start.to(tl.int64) * stride + (rows[:, None] * stride + cols[None, :])
    if ROWS_INSIDE and COLS_INSIDE:
        tile = tl.load(ptrs)
    elif COLS_INSIDE:
        tile = tl.load(ptrs, mask=(start + rows < n_rows)[:, None], other=0.0)
    else:
        tile = tl.load(ptrs, mask=(start + rows < n_rows)[:, None] & (cols < n_cols)[None, :], other=0.0)
    return tile


@triton.jit
def batch_number(b, inner, own):
    """The row of an operand that serves batch element b (see `Rows`), wide enough to multiply."""
    return (b // inner % own).to(tl.int64)


@triton.jit
def bounds_of(
    b, q_lengths_ptr, kv_lengths_ptr, ql_inner, ql_own, kl_inner, kl_own, q_size, t, left, right, BOTTOM_RIGHT: tl.constexpr
):
    """The bounds of batch element b: its lengths, what turns a query's index into its position, and the window."""
    q_length = q_size
    kv_length = t
    if q_lengths_ptr is not None:
        q_length = tl.minimum(tl.load(q_lengths_ptr + batch_number(b, ql_inner, ql_own)).to(tl.int32), q_size)
    if kv_lengths_ptr is not None:
        kv_length = tl.minimum(tl.load(kv_lengths_ptr + batch_number(b, kl_inner, kl_own)).to(tl.int32), t)
    shift = 0
    if BOTTOM_RIGHT:
        shift = kv_length - q_length
    return q_length, kv_length, shift, left, right


@triton.jit
def sees(index, keys, q_ids, kv_ids, bounds, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_IDS: tl.constexpr):
    """Which query sees which key. Both sides come with the axis of the other, so the mask has the order that the caller needs.

    `index` are the queries' indices in the whole sequence.
    """
    q_length, kv_length, shift, left, right = bounds
    mask = (index < q_length) & (keys < kv_length)
    if HAS_LEFT:
        mask = mask & (keys >= index + (shift - left))
    if HAS_RIGHT:
        mask = mask & (keys <= index + (shift + right))
    if HAS_IDS:
        mask = mask & (q_ids == kv_ids) & (kv_ids >= 0)
    return mask


@triton.jit
def key_range(first, last, bounds, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Of the keys that queries first..last (indices) may see: start, start of the unmasked middle, its stop, stop; in blocks."""
    q_length, kv_length, shift, left, right = bounds
    start = 0
    stop = kv_length
    full_start = 0
    full_stop = kv_length
    if HAS_RIGHT:
        stop = tl.minimum(stop, last + shift + right + 1)
        full_stop = tl.minimum(full_stop, first + shift + right + 1)
    if HAS_LEFT:
        start = tl.maximum(start, first + shift - left)
        full_start = tl.maximum(full_start, last + shift - left)
    if first >= q_length:
        stop = 0
    if last >= q_length:  # queries past the length mask every block
        full_stop = 0
    start = start // BLOCK * BLOCK
    stop = tl.maximum(stop, start)
    full_start = tl.minimum((full_start + BLOCK - 1) // BLOCK * BLOCK, (stop + BLOCK - 1) // BLOCK * BLOCK)
    full_stop = tl.maximum(tl.maximum(full_stop, 0) // BLOCK * BLOCK, full_start)
    return start, full_start, full_stop, stop


@triton.jit
def query_range(first, last, offset, s, bounds, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Of this shard's queries those that may see keys first..last: start and stop, in blocks."""
    q_length, kv_length, shift, left, right = bounds
    start = 0
    stop = tl.minimum(s, q_length - offset)
    if HAS_RIGHT:  # query position >= key - right
        start = tl.maximum(start, first - right - shift - offset)
    if HAS_LEFT:  # query position <= key + left
        stop = tl.minimum(stop, last + left - shift - offset + 1)
    if first >= kv_length:
        stop = 0
    return start // BLOCK * BLOCK, stop
