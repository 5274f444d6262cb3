"""What ops over rows share: how whole and long rows are shared out among programs, on the host and in kernels."""
