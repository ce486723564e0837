"""Engines by name, and the executor's view of their nodes."""
