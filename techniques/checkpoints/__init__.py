"""Checkpoints: the state of a job in canonical form, written atomically, read under any layout."""
