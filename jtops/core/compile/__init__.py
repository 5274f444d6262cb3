"""From a bound kernel to machine code."""
