"""Measures a pool from its database alone, so that the measurement outlives every process of the pool."""
