"""Sources of data, one per file."""
