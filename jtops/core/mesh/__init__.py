"""Sharding: which device has which part."""
