"""Runs an external trainer as a child process: its order, its events, its checkpoints, and its end."""
