"""Scheduled retraining: which models are due and fit in the time and budget, their promotion, and the results."""
