"""Options over several nodes, for jobs that no single node can train."""

from types import SimpleNamespace

import pytest

from ringmaster.tasks.cluster import Cluster, Device, Node
from ringmaster.tasks.planning import solve, verify
from ringmaster.tasks.profiling.search import (
    GUESSED_STARTUP_ON_A_NODE_S,
    GUESSED_STEP_S,
    ConfigSearch,
    ProfilingFailure,
    option_profiles,
    planning_problem,
    predicted_profiles,
    shapes_over_nodes,
)
from ringmaster.tasks.profiling.speed_beliefs import SpeedBeliefs
from ringmaster.tasks.profiling.stage import _too_large
from ringmaster.techniques.preflight_result import Candidate, MemoryEstimate, Preflight
from ringmaster.techniques.technique import GangShape
from tests.unit.execution.fakes import job, profile
from tests.unit.profiling.solos import FACTS

NODE = GangShape(kind="gpu", num_devices=4, memory_bytes=1 << 30)


def candidate(technique="fsdp", num_devices=8, step_s=None, **changes):
    return Candidate(
        technique=technique,
        config={},
        num_devices=num_devices,
        num_ranks=num_devices,
        least_bytes=7,
        step_s=step_s,
        **changes,
    )


def search(*kinds):
    return SimpleNamespace(failures=[ProfilingFailure(kind=kind, message="why") for kind in kinds])


@pytest.mark.parametrize(
    ("profiles", "kinds", "is_too_large"),
    [
        ([profile()], [], False),
        ([], [], True),  # no trial was made: nothing fits
        ([], ["out_of_memory", "killed"], True),
        ([], ["out_of_memory", "failed"], False),
    ],
)
def test_a_job_whose_trials_fail_for_another_reason_than_memory_gets_no_larger_gang(profiles, kinds, is_too_large):
    found = _too_large([job("a")], {"a": profiles}, {"a": [search(), search(*kinds)]})
    assert [each.name for each in found] == ["a"] * is_too_large


def preflight(*candidates):
    return Preflight(job="a", data={}, facts=FACTS, candidates=candidates, refusals=())


def test_gangs_double_and_end_with_all_nodes():
    assert [(s.num_nodes, s.num_devices) for s in shapes_over_nodes(NODE, num_nodes=6)] == [(2, 8), (4, 16), (6, 24)]
    assert [s.num_nodes for s in shapes_over_nodes(NODE, num_nodes=4)] == [2, 4]
    assert shapes_over_nodes(NODE, num_nodes=1) == ()


def test_of_each_technique_the_quickest_looking_option_is_taken():
    shapes = shapes_over_nodes(NODE, num_nodes=2)
    found = predicted_profiles(
        preflight(
            candidate(step_s=3.0),
            candidate(step_s=2.0, memory=MemoryEstimate(device_bytes=99)),
            candidate("ddp"),
            candidate("tensor", num_devices=16, step_s=1.0),
        ),
        shapes=shapes,
    )
    assert [(p.technique, p.step_s, p.peak_bytes, p.num_nodes, p.source) for p in found] == [
        ("fsdp", 2.0, 99, 2, "predicted"),
        ("ddp", GUESSED_STEP_S, 7, 2, "predicted"),
    ]


def test_such_a_job_is_planned_on_both_nodes_beside_others():
    devices = tuple(Device(kind="cpu", index=i, name="cpu", memory_bytes=1, cores=(i,)) for i in range(2))
    cluster = Cluster(nodes=(Node(name="n1", devices=devices), Node(name="n2", devices=devices)))
    shapes = shapes_over_nodes(GangShape(kind="cpu", num_devices=2, memory_bytes=1), num_nodes=2)
    wide = predicted_profiles(preflight(candidate(num_devices=4, step_s=1.0)), shapes=shapes)
    jobs = [job("a", num_steps=50), job("b", num_steps=50)]
    problem = planning_problem(jobs, {"a": wide, "b": (profile(step_s=1.0),)}, cluster, name="both")
    plan = solve(problem, work_s=0.5)
    verify(plan, problem)
    segments = [segment for segment in plan.segments if segment.job == "a"]
    assert segments
    assert all(sorted(node for node, _ in segment.devices) == ["n1", "n2"] for segment in segments)


def test_a_predicted_profile_has_the_predicted_seconds_beside_its_steps():
    beside = {"startup_s": 2.0, "save_s": 0.3, "stall_s": 0.1, "evaluate_s": 0.4, "export_s": 0.5}
    (known,) = option_profiles([of_one(candidate(step_s=1.0, **beside))], SpeedBeliefs())
    assert {name: getattr(known, name) for name in beside} == beside
    (unknown,) = option_profiles([of_one(candidate())], SpeedBeliefs())
    assert (unknown.startup_s, unknown.save_s, unknown.stall_s) == (GUESSED_STARTUP_ON_A_NODE_S, 0.0, None)


def of_one(one):
    return ConfigSearch(key="k", job="a", candidates=(one,), fingerprints=["f"])
