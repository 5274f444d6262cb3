"""The bridge from Triton to JAX: lowering, compiling and interpreting kernels. Nothing here knows an op."""
