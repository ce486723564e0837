"""Evaluation of finished models, and comparison of two models."""
