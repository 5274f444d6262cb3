"""The way from a call to the operation that launches it."""
