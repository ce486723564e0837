"""Nodes that Slurm lends: its commands, what they say of the pool's jobs, and the engine."""
