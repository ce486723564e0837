"""A night of retraining: which models are due, what of them fits in the night, and what came of it."""
