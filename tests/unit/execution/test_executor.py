"""The state machine of the executor, with gangs whose outcomes a test sets."""

from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.execution.execution_events import (
    DeviceWait,
    GangReport,
    JobEnded,
    PlanUpdate,
    PredictionUpdate,
    SegmentEnded,
    SegmentStarted,
)
from ringmaster.tasks.execution.executor import AT_ONCE_S
from ringmaster.tasks.execution.leases import FileLeases
from ringmaster.tasks.execution.starter import LEASE_RETRY_S
from ringmaster.tasks.storage.journal import JobStatus, begin_jobs
from ringmaster.techniques.processes.gang_events import (
    CheckpointFailed,
    CheckpointSaved,
    EvaluationReported,
    JobReady,
    JobResult,
    RefusedEvent,
    Steps,
)
from ringmaster.techniques.profiles import PREDICTED
from tests.unit.execution.fakes import Bench, FakeRunner, crashes_after, done, ends, in_a_row, job, preempted, profile

SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
def test_jobs_run_side_by_side_on_disjoint_devices(tmp_path, seed):
    jobs = [job(f"j{i}") for i in range(5)]
    profiles = {j.name: (profile("ddp", 2) if j.name == "j2" else profile(),) for j in jobs}
    bench = Bench(tmp_path, jobs, profiles=profiles, runner=FakeRunner(seed))
    assert bench.run()
    assert bench.statuses == {j.name: JobStatus.DONE for j in jobs}
    first_three = [type(event) for event in bench.events if not isinstance(event, PredictionUpdate)][:3]
    assert first_three == [PlanUpdate, SegmentStarted, SegmentStarted]
    assert sorted(bench.runner.names()) == sorted(j.name for j in jobs)
    assert {e.job for e in bench.told(JobEnded)} == {j.name for j in jobs}


def test_an_order_says_all_that_a_gang_must_know(tmp_path):
    bench = Bench(tmp_path, [job("a", num_steps=7)], profiles={"a": (profile("ddp", 2),)})
    bench.run()
    (call,) = bench.runner.calls
    order = call.order
    assert call.num_ranks == 2
    assert (order.technique, order.last_step, order.purpose) == ("ringmaster.techniques.ddp:Ddp", 7, "train")
    assert [slot.index for slot in order.slots] == [0, 1]
    assert order.checkpoint_dir == str(tmp_path / "checkpoints" / "a")
    assert order.model_dir == str(tmp_path / "models" / "a")
    assert order.checkpoint_every_s > 0
    assert from_json(type(order), to_json(order)) == order


def test_memory_is_compared_with_what_was_counted_alike(tmp_path):
    """A prediction counts tensors, and a rank on CPU slots reports its process."""
    counted = replace(profile(), peak_bytes=7)
    bench = Bench(tmp_path, [job("new"), job("known")], profiles={
        "new": (replace(counted, source=PREDICTED),), "known": (counted,),
    })  # fmt: skip
    bench.run()
    told = {event.segment.job: event.predicted_bytes for event in bench.told(SegmentStarted)}
    assert told == {"new": None, "known": 7}
    assert {r.spec.predicted_bytes for r in bench.journal.segments()} == {None, 7}


@SEEDS
def test_a_base_is_done_before_its_child_starts_from_its_weights(tmp_path, seed):
    jobs = [job("child", base="base"), job("base"), job("other")]
    bench = Bench(tmp_path, jobs, runner=FakeRunner(seed))
    assert bench.run()
    names = bench.runner.names()
    assert names.index("child") > names.index("base")
    child = bench.runner.calls[names.index("child")]
    assert child.order.weights_from == str(tmp_path / "models" / "base")
    started = next(i for i, e in enumerate(bench.events) if isinstance(e, SegmentStarted) and e.segment.job == "child")
    ended = next(i for i, e in enumerate(bench.events) if isinstance(e, JobEnded) and e.job == "base")
    assert ended < started


@SEEDS
def test_a_job_goes_on_with_its_next_segment(tmp_path, seed):
    jobs = [job("a"), job("b"), job("c")]
    bench = Bench(tmp_path, jobs, runner=FakeRunner(seed), make_plan=partial(in_a_row, num_parts=3))
    assert bench.run()
    assert [call.order.last_step for call in bench.runner.calls if call.order.job.name == "a"] == [3, 7, 10]
    assert [e.first_step for e in bench.told(SegmentStarted) if e.segment.job == "a"] == [0, 3, 7]


def test_a_crash_is_tried_again_and_after_three_times_given_up(tmp_path):
    runner = FakeRunner(script={"bad": [ends("crashed")] * 9, "shaky": [ends("crashed")] * 2})
    bench = Bench(tmp_path, [job("bad"), job("shaky"), job("good")], runner=runner)
    assert bench.run()
    assert bench.statuses == {"bad": JobStatus.FAILED, "shaky": JobStatus.DONE, "good": JobStatus.DONE}
    assert runner.names().count("bad") == runner.names().count("shaky") == 3
    assert [e.attempt for e in bench.told(SegmentStarted) if e.segment.job == "bad"] == [1, 2, 3]
    assert bench.journal.jobs()["bad"].message == "as it should (crashed 3 times)"


def raises(message, *, num_steps=0):
    def act(call, runner):
        return replace(crashes_after(num_steps)(call, runner), message=message, is_of_code=True)

    return act


def test_the_same_error_of_code_at_the_same_step_is_final_at_the_second_time(tmp_path):
    runner = FakeRunner(
        script={
            "bad": [raises("labels", num_steps=2), *(raises("labels") for _ in range(9))],
            "other": [raises("labels"), raises("rows")],
            "further": [raises("labels", num_steps=1) for _ in range(5)],
        }
    )
    bench = Bench(tmp_path, [job("bad"), job("other"), job("further")], runner=runner)
    assert bench.run()
    assert bench.statuses == {"bad": JobStatus.FAILED, "other": JobStatus.DONE, "further": JobStatus.DONE}
    assert [e.attempt for e in bench.told(SegmentStarted) if e.segment.job == "bad"] == [1, 2]
    assert bench.journal.jobs()["bad"].message == "labels (crashed 2 times)"


def test_a_crash_that_got_further_does_not_count_against_the_next(tmp_path):
    runner = FakeRunner(script={"a": [crashes_after(1) for _ in range(7)]})
    bench = Bench(tmp_path, [job("a")], runner=runner)
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.DONE}
    assert [e.first_step for e in bench.told(SegmentStarted)] == list(range(8))
    assert [e.event.step for e in bench.told(GangReport)] == list(range(1, 8))


def test_a_job_that_waits_for_a_full_disk_says_so_in_its_record_until_it_is_saved(tmp_path):
    messages = []

    def poll(event):
        if isinstance(event, GangReport):
            messages.append(bench.executor.job_table.records["a"].message)

    def saves(call, runner):
        call.on_event(CheckpointFailed(step=4, message="a damaged one was passed over"))
        call.on_event(CheckpointFailed(step=4, message="disk full", waits=True))
        call.on_event(CheckpointSaved(step=5))
        return done(call, runner)

    bench = Bench(tmp_path, [job("a")], runner=FakeRunner(script={"a": [saves]}))
    bench.other_listeners.append(poll)
    assert bench.run()
    assert messages == ["", "disk full", ""]
    assert bench.journal.jobs()["a"].message == ""


def test_a_gang_that_could_not_even_start_counts_as_a_crash(tmp_path):
    def no_server(call, runner):
        raise ConnectionRefusedError("no fork server")

    bench = Bench(tmp_path, [job("a")], runner=FakeRunner(script={"a": [no_server]}))
    assert bench.run()
    assert "no fork server" in bench.told(SegmentEnded)[0].outcome.message
    assert bench.statuses == {"a": JobStatus.DONE}


def test_an_option_that_runs_out_of_memory_is_struck_out_and_the_rest_planned_anew(tmp_path):
    profiles = {"a": (profile("single", 1), profile("fsdp", 2)), "b": (profile(),), "c": (profile(),)}
    runner = FakeRunner(script={"a": [ends("out_of_memory")]})
    bench = Bench(tmp_path, [job("a"), job("b"), job("c")], profiles=profiles, runner=runner)
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.DONE, "b": JobStatus.DONE, "c": JobStatus.DONE}
    used = [call.order.technique for call in runner.calls if call.order.job.name == "a"]
    assert used == ["ringmaster.techniques.single:Single", "ringmaster.techniques.fsdp:Fsdp"]
    assert [len(problem.job("a").options) for problem in bench.plans] == [2, 1]
    assert bench.told(PlanUpdate)[1].why == "a ran out of memory under single on 1"


def test_the_last_option_out_of_memory_fails_the_job_alone(tmp_path):
    runner = FakeRunner(script={"a": [ends("out_of_memory", "no room")]})
    bench = Bench(tmp_path, [job("a"), job("b")], runner=runner)
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.FAILED, "b": JobStatus.DONE}
    assert bench.journal.jobs()["a"].message == "ran out of memory under its last option: no room"


@SEEDS
def test_a_new_plan_leaves_what_runs_and_what_follows_it(tmp_path, seed):
    profiles = {"a": (profile(), profile("fsdp", 2)), "b": (profile(),)}
    runner = FakeRunner(seed, script={"a": [ends("out_of_memory")]})
    make_plan = partial(in_a_row, num_parts=2)
    bench = Bench(tmp_path, [job("a"), job("b")], profiles=profiles, runner=runner, make_plan=make_plan)
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.DONE, "b": JobStatus.DONE}
    assert [call.order.last_step for call in runner.calls if call.order.job.name == "b"] == [5, 10]


def test_a_wrong_job_fails_with_all_that_adapt_it_and_the_others_go_on(tmp_path):
    jobs = [job("c", base="b"), job("b", base="a"), job("d", base="a"), job("a"), job("x"), job("y", base="x")]
    runner = FakeRunner(script={"a": [ends("invalid", "width 3 is not a power of two")]})
    bench = Bench(tmp_path, jobs, runner=runner)
    assert bench.run()
    assert bench.statuses == {
        "a": JobStatus.FAILED,
        "b": JobStatus.FAILED,
        "c": JobStatus.FAILED,
        "d": JobStatus.FAILED,
        "x": JobStatus.DONE,
        "y": JobStatus.DONE,
    }
    messages = {name: record.message for name, record in bench.journal.jobs().items()}
    assert messages["a"] == "width 3 is not a power of two"
    assert messages["b"] == messages["d"] == "its base a has failed"
    assert messages["c"] == "its base b has failed"
    told = [event.job for event in bench.told(JobEnded)]
    assert sorted(told) == sorted(set(told)) == ["a", "b", "c", "d", "x", "y"]


def test_a_job_that_nothing_can_train_fails_before_the_start(tmp_path):
    jobs = [job("a"), job("b", base="a"), job("c")]
    bench = Bench(tmp_path, jobs, profiles={"a": (), "b": (profile(),), "c": (profile(),)})
    left = begin_jobs(bench.journal, jobs, faults={"a": "no technique can train it here"})
    assert [j.name for j in left] == ["b", "c"]
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.FAILED, "b": JobStatus.FAILED, "c": JobStatus.DONE}
    assert bench.runner.names() == ["c"]


def test_devices_of_others_are_waited_for(tmp_path, monkeypatch):
    bench = Bench(tmp_path, [job("a")])
    names = ["here:cpu:0", "here:cpu:1"]
    bench.leases.take_each([names], holder="batch tonight")
    inbox, rounds = bench.executor._inbox, []

    def get(timeout=None):
        if not inbox.messages and not bench.runner.running:
            assert timeout is not None, "nobody would ever tell"
            rounds.append(timeout)
            bench.leases.give_back(names)
            inbox.messages.append((0, None))
        return type(inbox).get(inbox, timeout)

    monkeypatch.setattr(inbox, "get", get, raising=False)
    assert bench.run()
    assert len(rounds) == 1
    assert [event.holders for event in bench.told(DeviceWait)] == [("batch tonight",)]
    assert bench.statuses == {"a": JobStatus.DONE}


def test_messages_that_have_arrived_are_handled_in_one_turn_unless_it_is_to_stop(tmp_path):
    bench, handled = Bench(tmp_path, [job("a")]), []
    executor = bench.executor
    for number in range(3):
        executor.call(partial(handled.append, number))
    executor.serve(num_turns=1)
    assert handled == [0, 1, 2]

    def takes_long():
        bench.runner.now_s += AT_ONCE_S

    executor.call(takes_long)
    executor.call(partial(handled.append, 3))
    executor.serve(num_turns=1)
    assert handled == [0, 1, 2], "segments may be waiting to be started"
    executor.serve(num_turns=1)
    assert handled.pop() == 3
    executor.call(executor.stop_starting)
    executor.call(partial(handled.append, 3))
    executor.serve()
    assert handled == [0, 1, 2]


def test_devices_are_given_back_however_a_gang_ends(tmp_path):
    script = {"a": [ends("crashed")], "b": [ends("invalid")], "c": [preempted]}
    bench = Bench(tmp_path, [job(name) for name in "abc"], runner=FakeRunner(script=script))
    assert bench.run()
    assert bench.leases.held() == {}
    assert bench.statuses == {"a": JobStatus.DONE, "b": JobStatus.FAILED, "c": JobStatus.DONE}


def test_two_batches_share_the_devices_and_none_serves_two(tmp_path):
    """Both batches run in one thread: whenever one has no message to handle, the other takes a turn."""
    leases = FileLeases(tmp_path / "leases.db")
    benches = [Bench(tmp_path / name, [job(f"{name}{i}") for i in range(4)], leases=leases) for name in "ab"]
    held = {}

    def watch(bench, event):
        if isinstance(event, SegmentStarted):
            for device in event.segment.devices:
                assert device not in held, f"{device} serves two batches"
                held[device] = (bench, event.number)
        if isinstance(event, SegmentEnded):
            for device in [d for d, who in held.items() if who == (bench, event.number)]:
                del held[device]

    for number, bench in enumerate(benches):
        bench.other_listeners.append(partial(watch, number))
    second_started = []
    plain_get = benches[0].executor._inbox.get

    def get(timeout=None):
        if not second_started:  # the first batch now holds both devices, so the second finds none free
            second_started.append(True)
            other = benches[1]
            make_first_plan(other)
            assert other.executor._starter.start_what_can(other.cluster) == LEASE_RETRY_S
        return plain_get(timeout)

    benches[0].executor._inbox.get = get
    assert benches[0].run()
    assert benches[1].run()
    assert [set(bench.statuses.values()) for bench in benches] == [{JobStatus.DONE}, {JobStatus.DONE}]
    assert leases.held() == {}
    assert benches[1].told(DeviceWait)


def test_what_is_planned_on_a_held_device_starts_on_an_idle_one(tmp_path):
    leases = FileLeases(tmp_path / "leases.db")
    bench = Bench(tmp_path, [job("a")], leases=leases)
    (planned,) = planned_devices(bench)
    assert leases.take([bench.cluster.lease_names()[planned]], holder="batch other")
    assert bench.run()
    (started,) = [event for event in bench.events if isinstance(event, SegmentStarted)]
    assert started.segment.devices != (planned,)
    assert not any(isinstance(event, DeviceWait) for event in bench.events)
    assert bench.statuses == {"a": JobStatus.DONE}


def make_first_plan(bench):
    bench.executor._plan_manager.begin(bench.first_plan())


def planned_devices(bench):
    """Returns the devices of the first plan of a bench, whose executor has not begun."""
    make_first_plan(bench)
    (segment,) = bench.executor._plan_progress.planned
    bench.executor._plan_progress.planned = []
    return segment.devices


def test_a_future_of_any_kind_will_do(tmp_path):
    """The executor needs only `add_done_callback` and `result`. The callback may run before `start` has returned."""
    bench, started = Bench(tmp_path, [job("a"), job("b")]), []

    def at_once(call):
        started.append(call.order.job.name)
        future = Future()
        future.set_result(done(call, bench.runner))
        return future

    bench.runner.start = at_once
    assert bench.run()
    assert started == ["a", "b"]
    assert set(bench.statuses.values()) == {JobStatus.DONE}


class Gauge:
    """A listener that raises at the first end of a segment."""

    PURPOSE = "the gauge"

    def __init__(self):
        self.heard = []

    def listen(self, event):
        self.heard.append(event)
        if isinstance(event, SegmentEnded):
            raise RuntimeError("no \0 needle")


def test_a_listener_that_raises_is_told_once_and_detached_and_ends_nothing(tmp_path, caplog):
    bench, gauge = Bench(tmp_path, [job("a"), job("b")]), Gauge()
    bench.executor._listeners._listeners.insert(0, gauge.listen)
    bench.expected_faults = ["the gauge stopped on an error: RuntimeError: no \\x00 needle"]
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.DONE, "b": JobStatus.DONE}
    assert len(bench.told(SegmentEnded)) == 2, "the others hear all events"
    assert sum(isinstance(event, SegmentEnded) for event in gauge.heard) == 1
    assert caplog.text.count("the gauge is detached") == caplog.text.count("Traceback") == 1


def reports(event, outcome=done):
    """An outcome for `FakeRunner.script`: the gang reports an event first."""

    def act(call, runner):
        call.on_event(event)
        return outcome(call, runner)

    return act


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        (EvaluationReported(step=11, metrics={}), "is about step 11, and its last step is 10"),
        (CheckpointSaved(step=10**9), "is about step 1000000000"),
        (Steps(first_step=9, seconds=(1.0, 1.0)), "is about step 11"),
        (JobReady(job="x/y", step=1), "is about 'x/y', which its gang does not train"),
        (RefusedEvent(message="metric '/a' cannot have this name", name="metrics"), "metric '/a' cannot have this"),
    ],
    ids=lambda value: getattr(value, "NAME", None),
)
@pytest.mark.parametrize("outcome", [done, preempted, ends("crashed"), ends("lost")])
def test_an_event_that_cannot_be_of_a_job_fails_that_job_alone(tmp_path, event, complaint, outcome):
    bench = Bench(tmp_path, [job("a"), job("b")], runner=FakeRunner(script={"a": [reports(event, outcome)]}))
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.FAILED, "b": JobStatus.DONE}
    assert complaint in bench.journal.jobs()["a"].message
    assert [event.job for event in bench.told(JobEnded) if event.record.status == JobStatus.FAILED] == ["a"]
    assert bench.journal.jobs()["a"].step <= 10


def test_an_event_that_the_executor_fails_on_costs_its_job_alone(tmp_path, monkeypatch, caplog):
    bench = Bench(
        tmp_path,
        [job("a"), job("b")],
        runner=FakeRunner(script={"a": [reports(EvaluationReported(step=1, metrics={}))]}),
    )

    def fail(name, event):
        raise ZeroDivisionError("as it should")

    monkeypatch.setattr(bench.executor.job_table, "evaluated", fail)
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.FAILED, "b": JobStatus.DONE}
    (segment,) = bench.journal.segments("a")
    assert segment.outcome.status == "invalid", "whatever its gang has reported"
    for message in (segment.outcome.message, bench.journal.jobs()["a"].message):
        assert "event 'metrics' cannot be handled: ZeroDivisionError" in message
    assert "Traceback" in caplog.text


def test_an_outcome_without_its_step_fails_its_job_alone(tmp_path):
    def stepless(call, runner):
        return replace(done(call, runner), result=JobResult(first_step=0))

    bench = Bench(tmp_path, [job("a"), job("b")], runner=FakeRunner(script={"a": [stepless]}))
    assert bench.run()
    assert bench.statuses == {"a": JobStatus.FAILED, "b": JobStatus.DONE}
    why = "its gang ended with an outcome that cannot be read: ValueError: the result has no step"
    assert why in bench.journal.jobs()["a"].message
