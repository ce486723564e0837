"""Kernels that change the last digits of a step, for jobs that permit it."""
