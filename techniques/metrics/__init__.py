"""Metrics on held-out data, selected by name. No module imports torch when it is imported."""
