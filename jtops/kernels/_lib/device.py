"""Device functions that several ops share."""

from jtops.core.compat import triton


@triton.jit
def own_row(row, inner, own):
    """The row of an operand that serves row `row` of the call (see `Rows`)."""
    return row // inner % own
