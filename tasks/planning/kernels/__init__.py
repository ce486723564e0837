"""Compiled inner loops (kernels) of the searches, and their compilation."""
