"""Plans without preemption: simulated annealing, an exhaustive search for few jobs, and a time-indexed MILP."""
