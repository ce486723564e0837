"""Preemptive plans: jobs are divided among groups of nodes, and each group runs a sequence of configurations."""
