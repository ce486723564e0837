"""What holds for all tests that run nothing but this process."""

import itertools
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def planned_without_haste(monkeypatch):
    """Searches for plans end with their counts of iterations: what they find must not depend on how busy a machine is.

    Their clock goes a nanosecond further each time it is looked at, so that a limit of nothing is still over at once.
    """
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 1e-9 * next(looks))
    for module in ("search", "fused"):
        monkeypatch.setattr(f"tasks.planning.{module}.time", clock)
