"""Kernels run by NumPy."""
