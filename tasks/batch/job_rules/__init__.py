"""Validation rules of the parts of a job, which work on plain values."""
