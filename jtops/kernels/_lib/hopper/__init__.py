"""What kernels for Hopper (sm_90a), written in Gluon, share: rings of tiles, a queue of work, arithmetic on accumulators."""
