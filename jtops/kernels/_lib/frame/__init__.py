"""What makes an op of launchers and a reference."""
