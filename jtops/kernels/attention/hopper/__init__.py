"""Attention's kernels for Hopper (sm_90a)."""
