"""Sweeps of one job over many values: sampling, early stopping, scheduling and results, without Prefect."""
