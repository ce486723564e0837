"""Losses that jobs select by name, one file each, and their registry. No file imports torch when it is imported."""
