"""Several adapters trained at once on one frozen base: one forward and backward for all, and each its own update."""
