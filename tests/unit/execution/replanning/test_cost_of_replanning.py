"""What looking for better plans costs: a share of the time, however large the batch is."""

from concurrent.futures import Future
from itertools import pairwise

from ringmaster.tasks.execution.replan_policy import ReplanPolicy
from ringmaster.tasks.execution.replanner import LOOK_SHARE, PLANNING_SHARE, Replanner
from tests.unit.execution.fakes import at_once
from tests.unit.execution.serving import Pool

EAGER = ReplanPolicy(every=0.01, least=0.01, surprise=10.0)
PLAN_S, LOOK_S = 5.0, 3.0


def eager(pool, **options):
    """Has an executor look for better plans all the time."""
    manager = pool.executor._plan_manager
    manager.replanner = Replanner(
        name="batch", make_plan=pool.bench.plan, policy=EAGER, clock=pool.gangs.clock, **options
    )
    return manager.replanner


def test_plans_that_nobody_requested_take_a_share_of_the_time(tmp_path, monkeypatch):
    pool, begun_s = Pool(tmp_path, ["a", "b", "c"], num_steps=500), []

    def think_a_while(think):
        begun_s.append(pool.gangs.now_s)
        future = Future()
        pool.at(pool.gangs.now_s + PLAN_S, lambda: future.set_result(think()))
        return future

    eager(pool, background=think_a_while)
    monkeypatch.setattr("ringmaster.tasks.execution.replanner.could_gain", lambda *_, **__: True)
    pool.serve(until_s=600.0)
    assert len(begun_s) > 3
    assert all(later_s - s >= PLAN_S / PLANNING_SHARE for s, later_s in pairwise(begun_s))


def test_forecasts_take_a_share_of_the_time(tmp_path, monkeypatch):
    pool, looks_s = Pool(tmp_path, ["a", "b", "c"], num_steps=500), []
    replanner = eager(pool, background=at_once)
    plain = replanner.timeline

    def slow(state, left=None):
        looks_s.append(pool.gangs.now_s)
        pool.gangs.now_s += LOOK_S
        return plain(state, left)

    monkeypatch.setattr(replanner, "timeline", slow)
    monkeypatch.setattr(replanner, "seconds_left", lambda state: {})  # predictions have a share of their own
    monkeypatch.setattr("ringmaster.tasks.execution.replanner.could_gain", lambda *_, **__: False)
    monkeypatch.setattr(replanner._when, "planned", lambda now_s, ends_s: None)
    pool.serve(until_s=600.0)
    assert len(looks_s) > 3
    assert all(later_s - s >= LOOK_S / LOOK_SHARE for s, later_s in pairwise(looks_s[1:]))
