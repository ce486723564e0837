"""Adapters: small modules that are trained in the place of a frozen model's own weights. Imports no torch by itself."""
