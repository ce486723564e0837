"""Adapters: small modules that are trained in place of a frozen model's own weights.

Importing the package alone imports no torch.
"""
