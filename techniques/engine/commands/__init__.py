"""Runs an external trainer as a child: its order, what it says, its checkpoints, and its end."""
