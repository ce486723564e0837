"""Batches of one pool that may wait for good hours, beside others that are to end soon."""

from functools import partial

import pytest

from ringmaster.features.tariffs.pool_tariff import set_tariffs
from ringmaster.features.tariffs.series import HOUR_S, Series
from ringmaster.features.tariffs.terms import Tariff, Tariffs
from ringmaster.flows.pool.batch_requests import check_terms, objectives_in_words, objectives_of_pool
from ringmaster.tasks.execution.dispatch import waits_of
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem, verify
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.planning.solve import checked_plan
from ringmaster.tasks.planning.two_objectives import plan_by_two
from ringmaster.tasks.pool import controller
from ringmaster.tasks.storage.database import Database, file_url
from tests.unit.execution.fakes import profile
from tests.unit.features.tariffs.test_keys import load
from tests.unit.pool.bench import EPOCH_S, Clock, PoolBench, submission
from tests.unit.pool.workers import Worker

MAKE_PLAN = partial(checked_plan, work_s=0.1, seed=0)
PRICES = Series(values=(3.0, 1.0), times_s=(EPOCH_S - HOUR_S, EPOCH_S + HOUR_S), ends_s=EPOCH_S + 3 * HOUR_S)


def problem(**fields):
    node = PlanningNode("n0", 1, price_steps=((0.0, 3.0 / HOUR_S), (2 * HOUR_S, 1.0 / HOUR_S)))
    option = Option("single", 1, HOUR_S)
    patient, soon = PlanningJob("x/a", (option,), weight=0.0), PlanningJob("y/a", (option,))
    return Problem("p", (node,), (patient, soon), switch_cost_s=0.0, **fields)


@pytest.mark.parametrize("budgets", [{}, {"cost": 4.5}, {"cost": 1e-6}])
def test_patient_jobs_wait_in_what_the_others_leave(budgets):
    mixed = problem(budgets=budgets)
    plan = plan_by_two(mixed, first="weighted", second="cost", make_plan=MAKE_PLAN)
    assert verify(plan, problem()) == [] and plan.objective == "weighted"
    starts_s = {segment.job: segment.start_s for segment in plan.segments}
    assert starts_s["y/a"] <= 0.01 * HOUR_S and starts_s["x/a"] >= 2 * HOUR_S - 1e-6
    assert {segment.job for segment in waits_of(plan, mixed)} >= {"x/a"}
    assert plan.value == pytest.approx(HOUR_S, rel=0.02) and plan.value_bound <= plan.value


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "pool.db"), synced=False)
    yield database
    database.close()


def test_a_pool_plans_batches_of_both_kinds(database, monkeypatch):
    monkeypatch.setattr(controller, "PLANNING_WORK_S", 0.2)
    set_tariffs(database, Tariffs(every=Tariff(price=PRICES)))
    pool = PoolBench(database, Clock())
    pool.pass_seconds(1, Worker(database, num_devices=1))
    slow = {"a": (profile(step_s=60.0),)}
    cost = submission("b1", jobs=("a",), profiles=slow, terms=PlanningTerms(objective="cost"))
    pool.submit(cost, submission("b2", jobs=("a",), profiles=slow))
    mixed = pool.plans[-1]
    assert {job.id: job.weight for job in mixed.jobs} == {"b1/a": 0.0, "b2/a": 1.0}
    starts_s = {segment.job: segment.start_s for segment in pool.controller.make_plan(mixed).segments}
    assert starts_s["b2/a"] < 60.0 and starts_s["b1/a"] > HOUR_S - 60.0


def test_what_becomes_of_a_batch_beside_others_is_said_when_it_is_submitted(database, tmp_path):
    assert objectives_of_pool(database) == set()
    pool = PoolBench(database, Clock())
    pool.submit(submission("b1"), submission("b2", terms=PlanningTerms(objective="weighted")))
    assert objectives_of_pool(database) == {"makespan", "weighted"}
    notices = []
    check_terms(load(tmp_path, objective="cost", price=1.0), database, notice=notices.append)
    (line,) = notices
    assert line == (
        "the pool trains batches by makespan, weighted: these are planned first, by their ends, and this one by cost "
        "in what they leave"
    )
    assert objectives_in_words("makespan", {"cost"}).endswith("these are planned in what this batch leaves")
    assert "nothing waits for good hours" in objectives_in_words("cost", {"emissions"})
    assert objectives_in_words("makespan", {"weighted"}) == objectives_in_words("cost", set()) == ""
