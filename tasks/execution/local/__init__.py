"""Execution on this machine: the engine that runs its gangs, the leases of its devices, and their metrics."""
