"""Fixtures for all unit tests."""

import pytest

from ringmaster.tasks.planning.plans import list_scheduling

PLACEMENTS = 3_000  # local search's effort: a quarter of the planner's, which is enough for the tests' small problems


@pytest.fixture(autouse=True)
def planned_with_less_effort(monkeypatch):
    """Reduces the effort of local search."""
    monkeypatch.setattr(list_scheduling, "PLACEMENTS", PLACEMENTS)
    monkeypatch.setitem(list_scheduling.improve.__kwdefaults__, "placements", PLACEMENTS)
