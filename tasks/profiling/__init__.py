"""Profiling: measures by trials on the real devices how fast each job runs under each technique."""
