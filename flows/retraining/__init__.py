"""A retraining run, step by step: inspect, select, train, compare, report."""
