"""Found by name and read as source: importing it would fail."""

raise RuntimeError("the check of a batch file imported a user's module")


def build():
    """A model."""


try:
    from math import sqrt as focal
except ImportError:
    focal = None
