"""A job that its plan lets wait between two segments: its model has the bits of one that was never disturbed."""

import pytest

from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.execution.engine import EngineContext, LocalEngine
from ringmaster.tasks.execution.execution_events import PlanUpdate, SegmentEnded, SegmentStarted
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.job_table import JobTable, JobTableEntry
from ringmaster.tasks.execution.replanner import Replanner
from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment
from ringmaster.tasks.storage.journal import begin_jobs
from ringmaster.techniques import Profile
from tests.fake_engine import cpu_devices
from tests.integration.workbench import ADAMW, is_bit_equal, weights_in
from tests.unit.execution.fakes import CALM, LeasesInMemory, open_journal

BEGINS_S, PAUSE_S = 1.8e9, 3600.0
HERE = (("here", (0,)),)


def paused_plan(problem: Problem) -> Plan:
    """Returns a plan in which each job does half of its work, and the other half after a pause."""
    (job,) = problem.jobs
    halves = (
        Segment(job.id, 0, 0.0, 1.0, 0.5, 0.0, HERE),
        Segment(job.id, 0, PAUSE_S, PAUSE_S + 1.0, 0.5, 0.0, HERE),
    )
    return Plan(problem.name, halves, objective="cost")


@pytest.mark.parametrize("is_exact", [False, True], ids=["fp32", "exact"])
def test_a_job_that_pauses_by_its_plan_has_the_bits_of_an_undisturbed_one(bench, tmp_path, is_exact):
    job = bench.job(optimizer=ADAMW, num_steps=8, exact=is_exact)
    profile = Profile(
        technique="single",
        config={"micro_batch": job.global_batch_size, "recompute": "none"},
        num_devices=1,
        num_ranks=1,
        step_s=0.1,
        peak_bytes=1,
        save_s=0.1,
    )
    journal, events = open_journal(tmp_path), []
    begin_jobs(journal, [job], faults={})
    table = JobTable(journal)
    paths = RunPaths(folder=tmp_path, cache_dir=tmp_path / "cache")
    table.add([JobTableEntry(job_in_batch=job, job=job, profiles=(profile,), paths=paths)])
    steps = ((0.0, 2.0), (PAUSE_S, 1.0))
    problem = Problem(
        "paused",
        (PlanningNode("here", 1, price_steps=steps),),
        (PlanningJob(job.name, (Option("single", 1, 2.0),)),),
    )
    plan = PlanUpdate(problem=problem, plan=paused_plan(problem), why="start", begins_s=BEGINS_S)

    def wall_clock() -> float:
        """Lets the pause be over as soon as the first segment has ended."""
        has_paused = any(isinstance(event, SegmentEnded) for event in events)
        return BEGINS_S + (2 * PAUSE_S if has_paused else 1.0)

    engine = LocalEngine(EngineContext(folder=tmp_path, launcher=bench.server))
    executor = Executor(
        cluster=Cluster(nodes=(Node(name="here", devices=cpu_devices(1)),)),
        leases=LeasesInMemory(),
        holder="test",
        job_table=table,
        engine=engine,
        plan=plan,
        replanner=Replanner(name="paused", make_plan=lambda given: plan.plan, policy=CALM),
        listeners=[events.append],
        wall_clock=wall_clock,
    )
    try:
        assert executor.run()
    finally:
        engine.close()
    kinds = [type(event) for event in events if isinstance(event, SegmentStarted | SegmentEnded)]
    assert kinds == [SegmentStarted, SegmentEnded] * 2
    first, second = journal.segments()
    assert (first.outcome.step, second.outcome.first_step, second.outcome.step) == (4, 4, 8)
    assert is_bit_equal(weights_in(paths.model_dir(job.name)), bench.reference(job).weights)
