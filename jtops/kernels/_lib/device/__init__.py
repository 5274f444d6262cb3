"""Triton functions that several ops share."""
