"""Clones: jobs that are added to a batch while it runs, like one of its jobs but for some settings."""
