"""The curated ops, a file or a folder each; what they share is in `_lib`."""
