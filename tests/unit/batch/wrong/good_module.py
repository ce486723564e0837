"""A module that is found by name and read as source. Importing it would fail."""

raise RuntimeError("the check of a batch file imported a user's module")


def build():
    """Builds a model."""


try:
    from math import sqrt as focal
except ImportError:
    focal = None
