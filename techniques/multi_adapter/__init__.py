"""A frozen base that computes for several adapters at once: one forward and backward for the rows of all of them."""
