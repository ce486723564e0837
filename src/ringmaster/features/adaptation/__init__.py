"""Adaptations with steps: a student that learns from a teacher, and a model whose pruned weights stay zero."""
