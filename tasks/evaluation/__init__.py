"""How good a finished model is, and whether it is better than another."""
