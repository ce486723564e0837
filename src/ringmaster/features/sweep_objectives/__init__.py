"""Constraints of a sweep, which its best trial must keep, and several objectives, of which it has a Pareto front."""
