"""The interpreter: NumPy runs kernels."""
