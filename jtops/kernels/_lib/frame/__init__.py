"""The frame, which makes an op of launchers and a reference."""
