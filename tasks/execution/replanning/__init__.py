"""Re-planning of a running batch: when to plan the rest again, and whether to follow the new plan."""
