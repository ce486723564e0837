"""A pool in operation: its executor, its nodes, their runs in Prefect, and the recovery from failures of each."""
