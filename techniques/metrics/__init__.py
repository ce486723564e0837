"""Metrics on held-out data, one file each, and their registry. Importing the package imports no torch."""
