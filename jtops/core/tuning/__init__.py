"""Configs measured on the device."""
