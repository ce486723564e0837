"""Gradient centralization: each gradient of a matrix has the mean 0 over the inputs of an output."""
