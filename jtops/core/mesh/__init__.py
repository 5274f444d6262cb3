"""Which device has which part."""
