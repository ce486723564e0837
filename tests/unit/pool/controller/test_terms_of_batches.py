"""The joint planning terms of all batches of a pool."""

import json

import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.features.quotas.commands import quotas_in_words
from ringmaster.features.quotas.job import UserQuota
from ringmaster.features.quotas.pool_quotas import quota_of, set_quotas
from ringmaster.features.quotas.terms import Quotas
from ringmaster.flows.cli import app
from ringmaster.tasks.control.batch_terms import HEAVIEST, ActiveBatch, combined_terms
from ringmaster.tasks.control.requests import RequestKind, RequestStatus
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.storage.schema import PLANS
from tests.unit.pool.bench import EPOCH_S, PoolBench, set_pool, submission
from tests.unit.pool.workers import Worker


def standing(id, *, priorities=None, **terms):
    return ActiveBatch(
        id=id,
        name=id,
        job_names=("a", "b"),
        given=PlanningTerms(**terms),
        started_s=EPOCH_S,
        priorities=priorities or {},
    )


@pytest.mark.parametrize(
    ("batches", "objective"),
    [
        ([], "makespan"),
        ([standing("x"), standing("y")], "makespan"),
        ([standing("x"), standing("y", objective="weighted")], "weighted"),
        ([standing("x", objective="cost"), standing("y", objective="cost")], "cost"),
        ([standing("x", objective="cost"), standing("y")], "weighted"),
        ([standing("x", priorities={"": 2.0}), standing("y")], "weighted"),
        ([standing("x", priorities={"": 1.0}), standing("y")], "makespan"),
    ],
)
def test_the_objective_of_all_batches(batches, objective):
    assert combined_terms(batches).objective == objective


def test_weights_are_multiplied_and_deadlines_count_from_each_start():
    one = standing("x", deadlines_s={"a": 60.0}, weights={"a": 3.0}, priorities={"": 2.0, "a": 5.0})
    terms = combined_terms([one, standing("y")])
    assert terms.weights == {"x/a": 30.0, "x/b": 2.0, "y/a": 1.0, "y/b": 1.0}
    assert terms.deadlines_s == {"x/a": EPOCH_S + 60.0}


def test_jobs_without_a_user_belong_to_their_batch():
    terms = combined_terms([standing("x", users={"a": "ana"}), standing("y", users={"b": "ana"})])
    assert terms.users == {"x/a": "ana", "x/b": "x", "y/a": "y", "y/b": "ana"}


def test_a_user_has_the_least_quota_of_all_batches():
    one = Quotas(users={"ana": UserQuota(max_devices=4), "ben": UserQuota(share=0.5)})
    other = Quotas(users={"ana": UserQuota(max_devices=2, share=0.5), "kim": UserQuota(max_devices=1)})
    (combined,) = combined_terms([standing("x", features=(one,)), standing("y", features=(other,))]).features
    assert combined.users == {**one.users, **other.users}


def test_a_quota_of_the_pool_holds_in_all_batches_from_then_on(database, pool):
    pool.pass_seconds(1, Worker(database, num_devices=4))
    quotas = Quotas(users={"ana": UserQuota(max_devices=3)})
    terms = PlanningTerms(users={"a": "ana", "b": "ana"}, features=(quotas,))
    pool.submit(submission("b1", terms=terms), submission("b2", terms=PlanningTerms(users={"a": "ben"})))
    assert pool.plans[-1].quotas == {"ana": 3}
    set_quotas(database, {"ana": quota_of("2"), "ben": quota_of("25%"), "kim": quota_of("1")})
    left = Quotas(users={"ana": UserQuota(max_devices=2), "ben": UserQuota(share=0.25)})
    assert set_quotas(database, {"kim": quota_of("none")}) == left
    pool.pass_seconds(3, Worker(database, num_devices=4))
    assert pool.plans[-1].quotas == {"ana": 2, "ben": 1}
    lines = quotas_in_words(database)
    assert lines[:2] == ["quota of ana: 2", "quota of ben: 25%"]
    assert any(line.startswith("ana may hold 2 devices at a time") for line in lines[2:])
    after = PoolBench(database, pool.clock)  # another controller
    after.step()
    assert after.plans[-1].quotas == {"ana": 2, "ben": 1}


def test_a_large_plan_without_quotas_is_not_read(database, pool):
    pool.pass_seconds(1, Worker(database, num_devices=4))
    pool.submit(submission("b1"))
    database.write(lambda connection: connection.execute(update(PLANS).values(content={"problem": {"jobs": None}})))
    assert quotas_in_words(database) == []


@pytest.mark.parametrize("text", ["0", "-1", "0%", "101%", "4.5", "x", "", "4%%", "1000000", "²"])
def test_what_is_no_quota_is_refused(text):
    with pytest.raises(ValueError, match="is not a quota"):
        quota_of(text)


def test_quotas_are_set_and_shown_by_a_command(tmp_path, monkeypatch):
    set_pool(monkeypatch, tmp_path)

    def run(*words):
        return CliRunner().invoke(app, ["pool", "quota", *words])

    assert run().output == "no user has a quota\n"
    assert run("ana", "4").output == "quota of ana: 4\n"
    assert run("ben", "25%").output == "quota of ana: 4\nquota of ben: 25%\n"
    assert json.loads(run("ana", "none", "--json").stdout) == {"quotas": {"ben": {"share": 0.25}}, "prices": []}
    assert "quota of ben: 25%" in CliRunner().invoke(app, ["status"]).output
    for words in (["ana"], ["ana", "many"]):
        assert isinstance(run(*words).exception, InputError)


def test_a_deadline_is_closer_when_the_batch_waited_before(database, pool):
    pool.pass_seconds(10, Worker(database))
    pool.submit(submission(terms=PlanningTerms(deadlines_s={"a": 300.0})))
    (problem,) = pool.plans[-1:]
    assert problem.job("b1/a").deadline_s == pytest.approx(290.0)
    assert problem.job("b1/b").deadline_s is None


def test_a_priority_changes_what_is_minimised_and_outlives_the_executor(database, pool):
    pool.pass_seconds(1, Worker(database, num_devices=1))
    pool.submit(submission("b1"), submission("b2"))
    assert pool.plans[-1].job("b2/a").weight == 1.0
    done = pool.ask(RequestKind.SET, batch="nightly-b2", jobs=[], settings={"priority": 4})
    assert (done.status, done.answer) == (RequestStatus.DONE, {"message": "priority 4 for batch nightly-b2"})
    pool.ask(RequestKind.SET, batch="b2", jobs=["a"], settings={"priority": 0.5})
    assert pool.objectives == ["weighted"]
    after = PoolBench(database, pool.clock)
    after.step()
    for problem in (pool.plans[-1], after.plans[-1]):
        assert {row.id: row.weight for row in problem.jobs} == {"b1/a": 1.0, "b1/b": 1.0, "b2/a": 2.0, "b2/b": 4.0}


def test_priorities_that_no_planner_can_weigh_with_disturb_nobody(database, pool):
    pool.pass_seconds(1, Worker(database, num_devices=1))
    pool.submit(submission("b1", terms=PlanningTerms(weights={"a": 1e14})), submission("b2"))
    refused = pool.ask(RequestKind.SET, batch="b2", jobs=[], settings={"priority": 1e16})
    assert (refused.status, "at most 1000" in refused.answer["message"]) == (RequestStatus.REFUSED, True)
    for jobs in ([], ["a"]):
        assert (
            pool.ask(RequestKind.SET, batch="b1", jobs=jobs, settings={"priority": 1000}).status == RequestStatus.DONE
        )
    assert {row.id: row.weight for row in pool.plans[-1].jobs}["b1/a"] == HEAVIEST
