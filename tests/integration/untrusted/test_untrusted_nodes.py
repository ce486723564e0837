"""A pool of real gangs with an untrusted node that lies: it is named, and the weights are those of honest nodes."""

import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest

from ringmaster.features.untrusted.execute import SegmentReferee, verification_of
from ringmaster.features.untrusted.job import Untrusted
from ringmaster.tasks.cluster import Cluster, Device
from ringmaster.tasks.device_monitor import Telemetry
from ringmaster.tasks.execution.execution_events import JobEnded, SegmentEnded, SegmentStarted
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.replanner import Replanner
from ringmaster.tasks.pool.controller import HOLDER_OF_SEGMENTS, PoolController
from ringmaster.tasks.pool.node_agent import NodeAgent
from ringmaster.tasks.pool.nodes import NodeRegistry, PoolLeases, Timeouts
from ringmaster.tasks.pool.pool_engine import PoolEngine
from ringmaster.tasks.pool.submissions import Submission, Submissions
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques import Profile
from ringmaster.techniques.processes.order import rank_argument
from ringmaster.techniques.profiles import UNTRUSTED
from tests.integration.untrusted.lies import LIE
from tests.integration.workbench import ADAMW, SINGLE, VIT, is_bit_equal, weights_in

SLOW = Timeouts(beat_every_s=1.0, fence_after_s=200.0, lost_after_s=400.0)  # no node is lost here, however busy
TIMEOUT_S = 300.0
VERIFIED = Untrusted(allow_untrusted=True, verify_steps=2)


class LentServer:
    """A fork server that its node does not own."""

    def __init__(self, server):
        self.start_rank = server.start_rank

    def tick(self, begun_s):
        """Needs no sign of life, as it has no fence."""

    def close(self):
        """Leaves the server to its owner."""


class LyingServer:
    """A fork server whose ranks falsify their training. lie: how they do."""

    def __init__(self, server, lie):
        self._server, self._lie = server, lie

    def start_rank(self, order, *, rank, log):
        """Starts one rank, as `ForkServer` does."""
        argument = {**rank_argument(order, rank=rank), LIE: self._lie}
        return self._server.spawn(target="tests.integration.untrusted.lies:main", argument=argument, log=log)


class LocalPool:
    """A controller and nodes in this process, whose gangs are real. draws: what the referee draws, in order."""

    def __init__(self, database, folder, stack, *, draws=()):
        self.database, self.folder, self.stack, self.events = database, folder, stack, []
        self.engine = PoolEngine(database, timeouts=SLOW)
        stack.callback(self.engine.close)
        self.controller = PoolController(database, engine=self.engine, timeouts=SLOW)
        replanner = Replanner(name="pool", make_plan=self.controller.make_plan, add_terms=self.controller.add_terms)
        self.executor = Executor(
            cluster=Cluster(nodes=()),
            leases=PoolLeases(database),
            holder=HOLDER_OF_SEGMENTS,
            job_table=JobTable(Journal(database, batch=None)),
            engine=self.engine,
            listeners=[self.controller.listen, self._listen],
            replanner=replanner,
        )
        left = list(draws)
        (referee,) = [hook for hook in self.executor.hooks if isinstance(hook, SegmentReferee)]
        referee.draw = lambda: left.pop(0) if left else 1.0

    def _listen(self, event):
        self.events.append(event)
        if isinstance(event, JobEnded):
            self.executor.stop_starting()

    def add_node(self, name, server, slot, *, is_trusted=True):
        device = Device(
            kind="cpu", index=0, name="core", memory_bytes=1 << 33, cores=tuple(slot.cores), is_trusted=is_trusted
        )
        agent = NodeAgent(
            name=name,
            address="127.0.0.1",
            devices=[device],
            database=self.database,
            server=LentServer(server),
            device_monitor=Telemetry(name, [device]),
            timeouts=SLOW,
        )
        self.stack.callback(agent.close)
        agent.start()
        return device.device_kind()

    def train(self, job, kinds, cache_dir):
        """Trains a job to its end; untrusted nodes are planned to be quicker."""
        profiles = tuple(
            Profile(
                technique="single",
                config={"micro_batch": job.global_batch_size, "recompute": "none"},
                num_devices=1,
                num_ranks=1,
                step_s=0.1 if kind.endswith(UNTRUSTED) else 10.0,
                peak_bytes=1,
                device_type=kind,
            )
            for kind in kinds
        )
        submission = Submission(
            id="b",
            name="b",
            jobs=(job,),
            profiles={job.name: profiles},
            folder=str(self.folder / "run"),
            cache_dir=str(cache_dir),
        )
        Submissions(self.database).submit(submission)
        over = threading.Event()
        self.stack.callback(over.set)
        self.engine.nodes()
        self.engine.listen()
        self.controller.take_over(self.executor)
        threading.Thread(target=self.controller.keep_ticking, args=(over,), daemon=True).start()
        timer = threading.Timer(TIMEOUT_S, self.executor.stop_starting)
        timer.start()
        self.executor.serve()
        timer.cancel()
        (ended,) = [each for each in self.events if isinstance(each, JobEnded)]
        assert ended.record.status == "done", (ended, self.decisions)

    @property
    def decisions(self):
        return [each.decision for each in self.events if isinstance(each, SegmentEnded)]

    @property
    def nodes(self):
        """The nodes of the segments, in their order."""
        return [each.segment.devices[0][0] for each in self.events if isinstance(each, SegmentStarted)]

    @property
    def segments(self):
        return [*verification_of(self.executor.job_table.records["b/tiny"]).untrusted_segments]


def job_of(bench, **changes):
    loss = "tests.integration.untrusted.lies:loss"
    job = bench.job(
        VIT, loss=loss, optimizer=ADAMW, num_steps=8, features=(Untrusted(allow_untrusted=True, verify_steps=2),)
    )
    return replace(job, **changes)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("lie", ["gradient x 1.01", pytest.param("skipped sample", marks=pytest.mark.full)])
def test_a_liar_is_named_and_all_of_its_work_that_nobody_repeated_is_trained_again(
    bench, pool_database, tmp_path, stack, lie
):
    job = job_of(bench)
    pool = LocalPool(pool_database, tmp_path, stack, draws=[0.9, 0.9, 0.0])
    kinds = [
        pool.add_node("anna", bench.server, bench.slot(0)),
        pool.add_node("mallory", LyingServer(bench.server, lie), bench.slot(1), is_trusted=False),
    ]
    pool.add_node("berta", bench.server, bench.slot(1))
    pool.train(job, kinds, bench.cache_dir)

    assert pool.nodes[:3] == ["mallory"] * 3 and "mallory" not in pool.nodes[3:]
    assert {*pool.nodes[3:5]} == {"anna", "berta"}, "another node decides"
    (why,) = [each for each in pool.decisions if "expelled" in each]
    assert "node mallory did not train as ordered" in why and "between step 4 and step 5" in why
    (node,) = [each for each in NodeRegistry(pool_database).all() if each.name == "mallory"]
    assert node.health == {"0": why}
    weights = weights_in(tmp_path / "run" / "models" / "tiny")
    assert is_bit_equal(weights, bench.reference(job.without(Untrusted), SINGLE).weights)


@pytest.mark.full
def test_an_honest_node_is_not_accused_and_its_work_counts(bench, pool_database, tmp_path, stack):
    job = job_of(bench)
    pool = LocalPool(pool_database, tmp_path, stack, draws=[0.9, 0.0, 0.9, 0.0])
    kinds = [
        pool.add_node("anna", bench.server, bench.slot(0)),
        pool.add_node("victor", bench.server, bench.slot(1), is_trusted=False),
    ]
    pool.train(job, kinds, bench.cache_dir)

    assert pool.nodes == ["victor", "victor", "anna", "victor", "victor", "anna"]
    assert [each.is_repeated for each in pool.segments] == [False, True, False, True]
    assert not any("expelled" in each for each in pool.decisions)
    weights = weights_in(tmp_path / "run" / "models" / "tiny")
    assert is_bit_equal(weights, bench.reference(job.without(Untrusted), SINGLE).weights)
