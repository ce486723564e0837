"""Ray as a provider: an actor for each node of the pool, on an existing Ray cluster or one of this machine alone."""
