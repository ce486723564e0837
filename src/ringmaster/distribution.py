"""The distribution that this package is installed by."""

from importlib.metadata import version

DISTRIBUTION = "ringmaster-ml"
"""Its name in package indexes. On PyPI, the name of the package belongs to an unrelated project."""


def own_release() -> str:
    """Returns the release of this process."""
    return version(DISTRIBUTION)
