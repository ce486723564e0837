"""Scheduled retraining: which models are due, which of them fit in the time and budget, and the results."""
