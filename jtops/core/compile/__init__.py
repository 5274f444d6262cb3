"""The way from a bound kernel to machine code."""
