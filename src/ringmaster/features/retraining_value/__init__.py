"""Retraining decided by value: a model is retrained when another day of waiting costs more than retraining."""
