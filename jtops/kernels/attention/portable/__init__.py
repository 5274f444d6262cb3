"""Attention's kernels in plain Triton, for every GPU."""
