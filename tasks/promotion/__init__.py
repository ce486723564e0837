"""Promotion of models: aliases in the registry move when a better model is found."""
