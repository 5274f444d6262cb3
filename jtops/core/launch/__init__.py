"""From a call to the operation that launches it."""
