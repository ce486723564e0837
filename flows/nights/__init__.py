"""A night of retraining, step by step."""
