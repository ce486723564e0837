"""Groups of jobs that may be offered to the planner, and the record of the planner's choice."""

from importlib import import_module

import pytest

from ringmaster.errors import ProblemError
from ringmaster.flows.batch import group_choice
from ringmaster.flows.batch.group_choice import choose_job_groups, goals_in
from ringmaster.tasks.planning.solve import checked_plan
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.profiling.stage import ProfilingResult
from ringmaster.tasks.storage.fact_keys import FUSION
from ringmaster.tasks.storage.journal import GroupDecision, JobStatus, begin_jobs
from ringmaster.techniques import Profile
from ringmaster.techniques.profiles import GroupMemberProfile
from tests.unit.execution.fakes import cluster, job, open_journal, profile

JOBS = [job(name, num_steps=100) for name in "abcd"]


def group(*members, step_s=1.0):
    together = tuple(GroupMemberProfile(job=name, num_steps=100, step_s=0.1) for name in members)
    return Profile(technique="shared_base", num_devices=1, num_ranks=1, step_s=step_s, peak_bytes=1, members=together)


@pytest.fixture
def journal(tmp_path):
    journal = open_journal(tmp_path)
    begin_jobs(journal, JOBS, faults={})
    yield journal
    journal.close()


@pytest.fixture(autouse=True)
def without_prefect(monkeypatch):
    monkeypatch.setattr(group_choice, "show_groups", lambda fusion, problem: None)


def choose(journal, *groups, goals=None, add_terms=lambda problem: problem):
    profiled = ProfilingResult(jobs=tuple(JOBS), preflights={}, profiles={each.name: (profile(),) for each in JOBS})
    profiled = type(profiled)(**{**vars(profiled), "groups": {"a": tuple(groups)}})
    groups = choose_job_groups(
        profiled,
        jobs=JOBS,
        name="nightly",
        cluster=cluster(1),
        records=journal.jobs(),
        add_terms=add_terms,
        objective="makespan",
        work_s=2.0,
        goals=goals,
    )
    groups.report(journal, notice=print)
    return groups


def test_what_is_quicker_together_is_chosen_and_kept(journal):
    together = choose(journal, group("b", "c", "d"), group("b"))
    assert {leader: [f.job for f in p.members] for leader, (p,) in together.profiles.items()} == {"a": ["b", "c", "d"]}
    kept = journal.read(FUSION, GroupDecision)
    assert kept.groups == {"a": ("b", "c", "d")}
    assert kept.together_s < kept.alone_s <= kept.practice_s
    assert kept.lower_bound_s <= kept.together_s + 1e-6
    assert kept.words.startswith("fused 4 jobs into 1 group")


def test_the_batch_is_first_planned_as_its_groups_were_chosen(journal, monkeypatch):
    together = choose(journal, group("b", "c", "d"))
    left = [each for each in JOBS if each.name == "a"]
    problem = planning_problem(left, together.profiles, cluster(1), name="nightly")
    module = import_module(checked_plan.__module__)  # the package has the function under the module's name
    monkeypatch.setattr(module, "solve", lambda *_, **__: pytest.fail("it was searched for again"))
    plan = checked_plan(problem, work_s=2.0, seed=0, start=together.plan)
    assert plan.segments == together.plan.segments
    assert plan.makespan_s == journal.get(FUSION)["together_s"]


def test_what_is_no_quicker_together_is_not(journal):
    assert choose(journal, group("b", "c", "d", step_s=10.0)).profiles == {}
    assert journal.get(FUSION)["groups"] == {}


def test_without_candidates_nothing_is_planned_nor_kept(journal):
    assert choose(journal).plan is None
    assert journal.get(FUSION) is None


def test_jobs_that_have_ended_or_await_their_values_are_in_no_group(journal):
    journal.write_job("b", status=JobStatus.DONE)
    journal.write_job("c", goal=0)
    together = choose(journal, group("b", "c", "d"), goals=goals_in(journal.jobs()))
    assert [f.job for f in together.profiles["a"][0].members] == ["d"]


def test_a_group_that_has_parted_and_a_job_that_has_left_stay_so(journal):
    journal.write_job("b", left_group=True)
    assert [f.job for f in choose(journal, group("b", "c")).profiles["a"][0].members] == ["c"]
    journal.write_job("a", parted=True)
    assert choose(journal, group("b", "c")).profiles == {}


def test_deadlines_that_cannot_be_met_are_told_by_whoever_plans_the_jobs(journal, monkeypatch):
    def refuse(*_, **__):
        raise ProblemError(["a misses its deadline"])

    monkeypatch.setattr(group_choice, "choose_groups", refuse)
    assert choose(journal, group("b")).profiles == {}
    assert journal.get(FUSION) is None
