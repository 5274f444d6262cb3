"""Products of matrices with plug points: which tile a program does, and what becomes of its sums, are jitted functions."""
