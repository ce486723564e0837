"""Promotion of models: evaluation, approval by a person if requested, and records."""
