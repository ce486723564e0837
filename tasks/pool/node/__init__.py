"""A node of a pool: its agent, its gangs, its heartbeat and its devices."""
