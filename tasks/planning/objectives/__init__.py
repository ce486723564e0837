"""Objectives: what plans minimise. `objective.py` has the interface, `registry.py` finds objectives by name."""
