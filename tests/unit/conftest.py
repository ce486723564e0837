"""Fixtures for all unit tests."""

import itertools

import pytest

from ringmaster.tasks.planning.kernels.clock import clock
from ringmaster.tasks.planning.plans import local_search

PLACEMENTS = 3_000  # local search's effort: a quarter of the planner's, which is enough for the tests' small problems


@pytest.fixture(autouse=True)
def planned_without_haste(monkeypatch):
    """Ends searches for plans by their iteration counts, so that plans do not depend on the load of the machine.

    The planner's clock advances a nanosecond at each reading, so that a time limit of zero expires at once.
    """
    looks = itertools.count()
    monkeypatch.setattr(clock, "now_s", lambda: 1e-9 * next(looks))


@pytest.fixture(autouse=True)
def planned_with_less_effort(monkeypatch):
    """Reduces the effort of local search."""
    monkeypatch.setattr(local_search, "PLACEMENTS", PLACEMENTS)
    monkeypatch.setitem(local_search.improve.__kwdefaults__, "placements", PLACEMENTS)
