"""The referee of an executor with fake gangs: what follows on the outcomes of untrusted nodes."""

from functools import partial

import pytest

from ringmaster.features.untrusted import execute
from ringmaster.features.untrusted.execute import SegmentReferee, StateCommitment, verification_of
from ringmaster.features.untrusted.job import Untrusted
from ringmaster.tasks.cluster import Cluster, Node
from ringmaster.tasks.execution.execution_events import SegmentEnded, SegmentStarted
from ringmaster.tasks.planning import Plan, Segment
from ringmaster.techniques import Profile
from ringmaster.techniques.checkpoints.checkpoint import folder_of
from ringmaster.techniques.profiles import UNTRUSTED
from tests.fake_engine import cpu_devices
from tests.unit.execution.fakes import Bench, FakeRunner, done, ends, job

KIND = "cpu"
VOLUNTEER, TRUSTED = (
    Profile(technique="single", num_devices=1, num_ranks=1, step_s=s, peak_bytes=1, save_s=0.1, device_type=kind)
    for s, kind in ((0.1, KIND + UNTRUSTED), (1.0, KIND))
)


def on_own_node(problem, *, expelled=()):
    """Plans each job on the node v, or else on t, which is trusted."""
    segments, free_s = [], {"v": 0.0, "t": 0.0}
    for row in problem.jobs:
        kinds = [each.device_type.endswith(UNTRUSTED) for each in row.options]
        number = len(kinds) - 1 if expelled else 0
        node = "v" if kinds[number] else "t"
        end_s = free_s[node] + row.options[number].runtime_s
        segments.append(Segment(row.id, number, free_s[node], end_s, 1.0, 0.0, ((node, (0,)),)))
        free_s[node] = end_s
    return Plan(problem.name, tuple(segments))


def checkpointed(call, runner):
    """A gang that ends in order and leaves a checkpoint."""
    (runner.folder / "checkpoints" / call.order.job.name / folder_of(call.order.last_step)).mkdir(parents=True)
    return done(call, runner)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A factory of batches with one job of 4 steps, on the nodes v (a volunteer) and t."""
    lies, expelled = set(), []

    def commitment(root, *, node, first_step, last_step):
        value = "lie" if node in lies else "truth"
        return StateCommitment(
            node=node, first_step=first_step, last_step=last_step, steps=(last_step,), digests=(value,), final=value
        )

    monkeypatch.setattr(execute, "commitment_of", commitment)

    def make(*, script=None, draw=1.0, liars=(), names=("a",)):
        lies.update(liars)
        runner = FakeRunner(script={name: script or [checkpointed] * 20 for name in names})
        runner.folder = tmp_path
        runner.steps = Steps(tmp_path)
        jobs = [job(name, num_steps=4, features=(Untrusted(allow_untrusted=True, verify_steps=2),)) for name in names]
        profiles = {each.name: (VOLUNTEER, TRUSTED) for each in jobs}
        bench = Bench(
            tmp_path, jobs, profiles=profiles, runner=runner, make_plan=partial(on_own_node, expelled=expelled)
        )
        bench.expelled, bench.executor.on_expelled = expelled, lambda node, why: expelled.append(node)
        devices = cpu_devices(1)
        nodes = Cluster(nodes=(Node(name="t", devices=devices), Node(name="v", devices=devices))).nodes
        bench.cluster = Cluster(nodes=(nodes[0], Cluster(nodes=nodes[1:]).untrusted().nodes[0]))
        bench.executor._plan_manager.cluster = bench.cluster
        monkeypatch.setattr("ringmaster.tasks.cluster.Device.device_kind", kind_of)
        (referee,) = [hook for hook in bench.executor.hooks if isinstance(hook, SegmentReferee)]
        referee.draw = lambda: draw
        return bench

    return make


def kind_of(device):
    return KIND if device.is_trusted else KIND + UNTRUSTED


class Steps(dict):
    """The newest checkpoints on disk, as fake gangs find them."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def get(self, name, default=0):
        folders = sorted((self.folder / "checkpoints" / name).glob("step-*"))
        return int(folders[-1].name.removeprefix("step-")) if folders else default


def nodes(bench):
    return [(each.segment.job, each.segment.devices[0][0]) for each in bench.told(SegmentStarted)]


def decisions(bench):
    return [each.decision for each in bench.told(SegmentEnded)]


def test_work_that_is_not_drawn_counts(made):
    bench = made()
    assert bench.run()
    assert nodes(bench) == [("a", "v"), ("a", "v")]


def test_work_that_is_drawn_is_repeated_and_goes_on(made):
    bench = made(draw=0.0)
    assert bench.run()
    assert nodes(bench) == [("a", "v"), ("a", "t")] * 2
    assert verification_of(bench.journal.jobs()["a"]).repeated is None
    assert "steps 0 to 2 are verified" in decisions(bench)[0]


def test_a_liar_gets_no_more_work_and_loses_what_it_has(made):
    bench = made(draw=0.0, liars=["v"])
    assert bench.run()
    assert nodes(bench) == [("a", "v"), ("a", "t"), ("a", "t"), ("a", "t")]
    assert bench.expelled == ["v"]
    assert bench.statuses == {"a": "done"}


@pytest.mark.parametrize("status", ["invalid", "crashed", "out_of_memory"])
def test_what_an_untrusted_node_says_fails_no_job(made, status):
    bench = made(script=[ends(status), *[checkpointed] * 5])
    assert bench.run()
    assert nodes(bench)[:2] == [("a", "v"), ("a", "t")] and "v" not in dict(nodes(bench)[1:]).values()
    assert verification_of(bench.journal.jobs()["a"]).trusted_only
    assert bench.statuses == {"a": "done"}


def test_a_volunteer_that_leaves_is_no_fault(made):
    bench = made(script=[ends("lost"), *[checkpointed] * 5])
    assert bench.run()
    assert nodes(bench) == [("a", "v")] * 3
