"""What holds for all tests that run nothing but this process."""

import itertools

import pytest

from ringmaster.tasks.planning.kernels.clock import clock
from ringmaster.tasks.planning.plans import local_search

PLACEMENTS = 3_000  # of local search, a quarter of what the planner takes: enough for problems as small as tests' are


@pytest.fixture(autouse=True)
def planned_without_haste(monkeypatch):
    """Searches for plans end with their counts of iterations: what they find must not depend on how busy a machine is.

    The planner's clock goes a nanosecond further each time it is looked at, so that a limit of nothing is over at once.
    """
    looks = itertools.count()
    monkeypatch.setattr(clock, "now_s", lambda: 1e-9 * next(looks))


@pytest.fixture(autouse=True)
def planned_with_less_effort(monkeypatch):
    """Local search tries fewer lists."""
    monkeypatch.setattr(local_search, "PLACEMENTS", PLACEMENTS)
    monkeypatch.setitem(local_search.improve.__kwdefaults__, "placements", PLACEMENTS)
