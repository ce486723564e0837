"""Execution on this machine: the runner of its gangs, the leases of its devices, and their metrics."""
