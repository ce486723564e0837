"""A pool in operation: its controller, its nodes, their runs in Prefect, and the recovery from failures of each."""
