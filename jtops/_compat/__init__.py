"""Private and version-dependent names of jax and triton."""
