"""Reports for users: progress of a running batch, the plan, the result, and the timeline of a pool."""
