"""What is shown of a running batch: a live table on a terminal, lines in a pipe. The clocks are fake."""

import io
from dataclasses import replace

import pytest

from ringmaster.flows.output import TextConsole, working
from ringmaster.flows.reports.progress import LINES_EVERY_S, BatchProgress, LinesView, LiveView
from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.execution_events import (
    DeviceWait,
    GangReport,
    JobEnded,
    PlanUpdate,
    PredictedEnd,
    Prediction,
    PredictionUpdate,
    SegmentEnded,
    SegmentStarted,
)
from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.techniques.processes.gang_events import (
    EvaluationReported,
    JobReady,
    Outcome,
    OutcomeStatus,
    PhaseStarted,
    Steps,
)

GIB = 2**30


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def segment(job="a"):
    return PlannedSegment(job=job, option=0, last_step=20, devices=(("n", 0), ("n", 1)), start_s=0.0, end_s=9.0)


def started(job="a", number=1, members=(), num_steps=(40,)):
    return SegmentStarted(
        number=number,
        segment=segment(job),
        technique="ddp",
        num_devices=2,
        first_step=0,
        attempt=1,
        members=members,
        num_steps=num_steps,
        predicted_bytes=GIB,
    )


def said(event, job="a", number=1):
    return GangReport(number=number, job=job, event=event)


def steps(first_step, *, seconds=0.5, num=4, job=None, loss=2.5):
    return Steps(
        job=job,
        first_step=first_step,
        seconds=(seconds,) * num,
        losses=(loss,) * num,
        num_samples=8 * num,
        num_tokens=1000 * num,
        peak_bytes=GIB // 2,
    )


def lines(clock):
    console = TextConsole(file=io.StringIO(), width=200, force_terminal=False)
    view = LinesView(console, clock=clock)

    def new():
        text = console.file.getvalue()
        console.file.seek(0)
        console.file.truncate()
        return text.splitlines()

    return view, new


def test_a_pipe_has_a_line_a_running_job_every_thirty_seconds(clock):
    view, new = lines(clock)
    for event in (started(), said(JobReady()), said(steps(0, seconds=9.0, num=1)), said(steps(1)), said(steps(5))):
        view.listen(event)
    assert new() == ["a starts at step 0 on device 0,1"]
    clock.now_s = LINES_EVERY_S - 1
    view.tick()
    assert new() == []
    clock.now_s = LINES_EVERY_S
    view.tick()
    # The first step is slow: it counts in no rate.
    figures = "loss 2.5, 16 samples/s, 2k tokens/s, memory 0.5 of 1 GiB predicted"
    assert new() == [f"a: step 9 of 40, {figures}, ends in 16 s"]
    view.tick()
    assert new() == []
    clock.now_s += LINES_EVERY_S
    view.listen(SegmentEnded(number=1, segment=segment(), outcome=Outcome(status=OutcomeStatus.DONE), decision=""))
    view.tick()
    assert new() == []


def planned_jobs(*rows, why="start"):
    """A plan by rows of (job, device, option, start)."""
    option = Option("ddp", 1, 10.0)
    jobs = tuple(PlanningJob(name, (option, option)) for name in dict.fromkeys(row[0] for row in rows))
    segments = tuple(
        Segment(name, number, start_s, start_s + 10.0, 1.0, 0.0, (("n", (device,)),))
        for name, device, number, start_s in rows
    )
    problem = Problem("p", (PlanningNode("n", 2),), jobs)
    return PlanUpdate(problem=problem, plan=Plan("p", segments), why=why)


def test_a_pipe_has_a_line_about_a_plan_that_decides_something_and_none_if_only_times_are_others(clock):
    view, new = lines(clock)
    view.listen(planned_jobs(("a", 0, 0, 0.0), ("b", 1, 0, 0.0), ("c", 0, 0, 10.0)))
    assert new() == ["planned (start): 20.0 s for 3 jobs"]
    view.listen(planned_jobs(("a", 0, 0, 0.0), ("b", 1, 0, 0.0), ("c", 0, 0, 25.0), why="a is late by 15 s"))
    view.listen(planned_jobs(("b", 1, 0, 0.0), ("c", 0, 0, 9.0), why="a has ended"))
    assert new() == []
    view.listen(planned_jobs(("b", 1, 0, 0.0), ("c", 0, 1, 9.0), why="c is late by 9 s"))
    view.listen(planned_jobs(("b", 1, 0, 0.0), ("c", 1, 1, 12.0), why="b is early by 9 s"))
    view.listen(planned_jobs(("c", 1, 1, 0.0), ("b", 1, 0, 12.0), why="c is urgent"))
    view.listen(planned_jobs(("c", 1, 1, 0.0), ("b", 1, 0, 12.0), ("d", 0, 0, 0.0), why="d was added"))
    assert [line.partition(":")[0] for line in new()] == [
        "planned (c is late by 9 s)",
        "planned (b is early by 9 s)",
        "planned (c is urgent)",
        "planned (d was added)",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_restart_has_a_line_with_its_reason(clock, is_terminal):
    console = TextConsole(file=io.StringIO(), width=200, force_terminal=False)
    view = (LiveView if is_terminal else LinesView)(console, clock=clock)
    view.listen(started())
    again = started(number=2)
    reason = "a new plan (a is late by 9 s)"
    view.listen(replace(again, first_step=7, segment=replace(again.segment, reason=reason)))
    line = f"a starts at step 7 on device 0,1: {reason}"
    assert console.file.getvalue().splitlines()[-1] == line


def test_evaluations_and_ends_have_lines_at_once(clock):
    view, new = lines(clock)
    view.listen(started())
    view.listen(said(EvaluationReported(step=20, metrics={"loss": 1.25, "accuracy": 0.5})))
    view.listen(JobEnded(record=JobRecord(name="a", status="done", metrics={"loss": 1.0})))
    view.listen(JobEnded(record=JobRecord(name="b", status="done", metrics={})))  # of no row
    ends = ["a is done: loss 1", "b is done: no metric was computed"]
    assert new()[1:] == ["a at step 20: loss 1.25, accuracy 0.5", *ends]


def test_a_pipe_says_what_a_gang_does_beside_training_and_what_is_done_before_it(clock):
    view, new = lines(clock)
    view.notice("in preflight: a")
    clock.now_s = LINES_EVERY_S
    view.tick()
    assert new() == ["in preflight: a", "still in preflight: a, 30 s"]
    view.listen(started())
    clock.now_s += 1.0
    view.listen(said(PhaseStarted(phase="loading data and model", timeout_s=300.0)))
    clock.now_s += LINES_EVERY_S
    view.tick()
    assert new()[-1] == "a: step 0 of 40, loading data and model, 30 s"


def test_all_jobs_of_a_gang_have_lines_and_share_its_phases(clock):
    progress = BatchProgress(clock=clock)
    progress.handle_event(started(members=("b",), num_steps=(40, 20)))
    progress.handle_event(said(steps(0, job="b", loss=1.0), job="b"))
    progress.handle_event(said(PhaseStarted(phase="saving", timeout_s=1.0)))
    clock.now_s = 3.0
    assert progress.lines() == [
        "a: step 0 of 40, saving, 3 s",
        "b: step 4 of 20, loss 1, 16 samples/s, 2k tokens/s, memory 0.5 of 1 GiB predicted, saving, 3 s",
    ]


def test_the_predicted_end_is_shown_instead_of_the_present_speed(clock):
    progress = BatchProgress(clock=clock)
    progress.handle_event(started())
    for event in (JobReady(), steps(0), steps(4)):
        progress.handle_event(said(event))
    ends = {"a": PredictedEnd(end_s=300.0, low_s=200.0, high_s=400.0)}
    found = Prediction(
        makespan_s=300.0, low_s=200.0, high_s=500.0, load=1.0, spread=0.1, num_earlier=0, jobs=ends, since_s=1000.0
    )
    clock.now_s = 20.0
    progress.handle_event(PredictionUpdate(batch="", prediction=found, age_s=20.0))
    assert progress.lines()[0].endswith("ends in 3.0 to 6.3 min")
    assert progress.headline().endswith("ends in 3.0 to 8.0 min")
    clock.now_s = 450.0  # the job should have ended: its present speed is shown
    assert progress.lines()[0].endswith("ends in 16 s")
    assert progress.headline().endswith("ends in at most 50 s")
    clock.now_s = 501.0
    assert "ends in" not in progress.headline()


def test_a_pipe_says_that_devices_are_waited_for(clock):
    view, new = lines(clock)
    view.listen(DeviceWait(holders=("batch other",)))
    clock.now_s = LINES_EVERY_S
    view.tick()
    assert new() == ["waiting for devices held by batch other", "still waiting for devices held by batch other, 30 s"]


def screen(view):
    view._live.refresh()
    console = TextConsole(file=io.StringIO(), width=view._console.width, force_terminal=False)
    console.print(view._picture())
    return console.file.getvalue()


@pytest.mark.parametrize("width", [100, 140])
def test_the_live_table_fits_its_terminal_and_changes_every_second(clock, width):
    console = TextConsole(file=io.StringIO(), width=width, height=30, force_terminal=True)
    with LiveView(console, clock=clock) as view:
        view.notice("planning 2 jobs")
        clock.now_s = 2.0
        assert "planning 2 jobs, 2 s" in screen(view)
        view.listen(started("a-job-with-a-long-name-lr1e-3"))
        for event in (JobReady(), steps(0), steps(4)):
            view.listen(said(event, job="a-job-with-a-long-name-lr1e-3"))
        shown = screen(view)
        assert max(map(len, shown.splitlines())) <= width
        for text in ("ddp on 0,1", "8/40", "2.5", "16", "2k", "0.5 of 1 GiB", "16 s"):
            assert text in shown
        view.listen(said(PhaseStarted(phase="evaluating", timeout_s=9.0), job="a-job-with-a-long-name-lr1e-3"))
        before = screen(view)
        clock.now_s += 1.0
        assert screen(view) != before
        assert "evaluating, 1 s" in screen(view)


@pytest.mark.parametrize(
    ("width", "shown_there", "left_out"),
    [
        (40, ("job-a", "8/40", "2.5", "16 s"), ("samples/s", "memory")),
        (80, ("job-a", "ddp on 0,1", "0.5 of 1 GiB", "16 s"), ()),
    ],
)
def test_a_narrow_terminal_has_fewer_columns_with_whole_cells(clock, width, shown_there, left_out):
    view = LiveView(TextConsole(file=io.StringIO(), width=width, force_terminal=True), clock=clock)
    view.listen(started("job-a"))
    for event in (JobReady(), steps(0), steps(4)):
        view.listen(said(event, job="job-a"))
    picture = screen(view)
    for text in shown_there:
        assert text in picture
    for text in left_out:
        assert text not in picture


def test_more_jobs_than_lines_of_the_terminal_are_counted(clock):
    console = TextConsole(file=io.StringIO(), width=100, height=10, force_terminal=True)
    view = LiveView(console, clock=clock)
    for number in range(9):
        view.listen(started(f"job-{number}", number=number))
    shown = screen(view)
    assert "job-5" in shown and "job-6" not in shown
    assert "and 3 more jobs" in shown


def test_what_goes_on_before_the_view_has_its_seconds(clock, monkeypatch):
    console = TextConsole(file=io.StringIO(), width=100, force_terminal=True)
    monkeypatch.setattr("ringmaster.flows.output.error_console", lambda: console)
    with working("reading batch.yaml", clock=clock) as say:
        clock.now_s = 4.0
        say("in preflight: a")
        clock.now_s = 7.0
    assert "in preflight: a, 3 s" in console.file.getvalue()  # the last picture
    assert "\nin preflight: a" not in console.file.getvalue()  # no line besides the spinner
