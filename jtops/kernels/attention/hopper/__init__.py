"""Attention's kernels for Hopper GPUs (sm_90a), in Gluon."""
