"""Completions that a model in training writes to prompts: their sampling, their rewards, and the batch made of them."""
