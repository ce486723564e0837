"""Losses that jobs select by name. No module imports torch when it is imported."""
