"""What gangs report of their jobs, in figures for users, and how it is stored for other processes."""

import pytest
import torch

from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.execution_events import GangReport, SegmentEnded
from ringmaster.tasks.execution.job_progress import JobFigures, JobProgress, range_text
from ringmaster.tasks.execution.step_events import EVERY_S, MAX_PHASES, MAX_STEPS, StepEvents
from ringmaster.tasks.recording.mlflow_writer import metric_points
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.techniques.data import num_tokens_of
from ringmaster.techniques.processes.gang_events import (
    EvaluationReported,
    JobReady,
    Outcome,
    PartialEvaluation,
    PhaseStarted,
    RowValues,
    Steps,
)

REPORT = Steps(
    first_step=4,
    seconds=(0.5, 0.5),
    losses=(3.0, 2.0),
    wall_s=5.0,
    num_samples=16,
    num_tokens=300,
    peak_bytes=2_000_000,
)


@pytest.mark.parametrize(
    ("batch", "num_tokens"),
    [
        ({"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, 3),
        ({"input_ids": torch.ones(2, 3)}, 6),
        ({"pixel_values": torch.ones(2, 3, 4, 4)}, 0),
    ],
    ids=["padded", "packed", "images"],
)
def test_tokens_are_counted_without_padding(batch, num_tokens):
    assert num_tokens_of(batch) == num_tokens


def test_rates_leave_out_the_first_report_which_has_the_slow_first_step():
    progress = JobProgress()
    progress.handle_event(JobReady())
    progress.handle_event(Steps(first_step=0, seconds=(20.0,), losses=(9.0,), num_samples=8))
    assert progress.figures().samples_per_s == 0.4
    progress.handle_event(REPORT)
    figures = progress.figures()
    assert (figures.samples_per_s, figures.tokens_per_s, figures.loss, figures.phase) == (16.0, 300.0, 2.0, "")
    assert progress.left_s(10) == 2.0


def test_a_gang_whose_first_reports_were_not_heard_trains_once_it_reports_steps():
    progress = JobProgress()
    assert progress.figures().phase == "starting"
    progress.handle_event(REPORT, now_s=2.0)
    assert progress.figures().phase == ""
    assert progress.phase_s == 2.0
    progress.handle_event(PhaseStarted(phase="evaluating"))
    progress.handle_event(REPORT)
    assert progress.figures().phase == "evaluating"


def test_a_phase_ends_with_the_next_one():
    progress = JobProgress()
    for phase in ("saving", "training"):
        progress.handle_event(PhaseStarted(phase=phase), now_s=3.0)
        assert progress.figures().phase == ("" if phase == "training" else phase)
    progress.handle_event(
        PhaseStarted(phase="training", timeout_s=9.0), now_s=7.0
    )  # the same phase with another timeout
    assert progress.phase_s == 3.0


@pytest.mark.parametrize(
    ("rate", "text"), [(0.25, "0.25"), (512.4, "512"), (999.7, "1k"), (65_540.0, "65.5k"), (999_800.0, "1M")]
)
def test_rates_have_three_digits(rate, text):
    assert JobFigures(samples_per_s=rate).cells[1] == text


@pytest.mark.parametrize(
    ("low_s", "high_s", "text"),
    [(181, 302, "3.0 to 5.0 min"), (3.2, 8.4, "3 to 8 s"), (-4.0, 5.0, "at most 5 s"), (7.9, 8.1, "8 s")],
)
def test_a_range_of_times_is_short(low_s, high_s, text):
    assert range_text(low_s, high_s) == text


def test_the_newest_steps_of_a_report_keep_its_rates():
    newest = REPORT.newest(1)
    assert (newest.step, newest.seconds, newest.losses) == (6, (0.5,), (2.0,))
    assert (newest.num_samples, newest.num_tokens, newest.peak_bytes) == (8, 150, 2_000_000)


def test_mlflow_gets_speed_and_memory():
    points = {point.key: (point.value, point.step) for point in metric_points(REPORT, at_ms=0)}
    assert points["train/samples_per_s"] == (16.0, 6)
    assert points["train/tokens_per_s"] == (300.0, 6)
    assert points["train/peak_memory_megabytes"] == (2.0, 6)


def test_a_new_phase_is_stored_at_once_with_all_before_it(tmp_path):
    database = Database(file_url(tmp_path / "journal.db"), synced=False)
    events = StepEvents(database, clock=lambda: 0.0)

    def tell(event):
        events.listen(GangReport(number=1, job="a", event=event))

    tell(Steps(first_step=0, seconds=(0.1,) * (MAX_STEPS + 5), losses=(1.0,) * (MAX_STEPS + 5)))
    tell(REPORT)
    tell(EvaluationReported(step=6, metrics={"loss": 1.0}))
    stored = [event.content for event in MessageStore(database).events(after=0)]
    assert [(event.first_step, len(event.losses)) for event in stored] == [(5, MAX_STEPS)]
    tell(PhaseStarted(phase="saving"))
    tell(PhaseStarted(phase="saving", timeout_s=9.0))
    stored = [event.content for event in MessageStore(database).events(after=0)]
    assert [type(event) for event in stored] == [Steps, Steps, EvaluationReported, PhaseStarted]
    database.close()


def test_steps_between_writes_are_stored_as_one_event_and_the_last_ones_at_the_end(tmp_path):
    database = Database(file_url(tmp_path / "journal.db"), synced=False)
    events = StepEvents(database, clock=lambda: 0.0)
    for step in range(4):
        report = Steps(first_step=step, seconds=(0.5,), losses=(float(step),), num_samples=3, num_tokens=7)
        events.listen(GangReport(number=1, job="a", event=report))
    events.listen(GangReport(number=1, job="a", event=EvaluationReported(step=4, metrics={"loss": 1.0})))
    assert len(MessageStore(database).events(after=0)) == 1
    segment = PlannedSegment(job="a", option=0, devices=(("n0", 0),), start_s=0, end_s=1, last_step=4)
    events.listen(SegmentEnded(number=1, segment=segment, outcome=Outcome(status="done"), decision=""))
    _, rest, evaluation = [event.content for event in MessageStore(database).events(after=0)]
    assert (rest.first_step, rest.losses, rest.num_samples, rest.num_tokens) == (1, (1.0, 2.0, 3.0), 9, 21)
    assert evaluation.metrics == {"loss": 1.0}
    database.close()


def test_phases_that_follow_each_other_quickly_are_stored_at_intervals(tmp_path):
    database = Database(file_url(tmp_path / "journal.db"), synced=False)
    now_s = 0.0
    events = StepEvents(database, clock=lambda: now_s)

    def evaluate(times):
        for _ in range(times):
            for phase in ("evaluating", "training"):
                events.listen(GangReport(number=1, job="a", event=PhaseStarted(phase=phase)))

    def stored():
        return [event.content.phase for event in MessageStore(database).events(after=0)]

    evaluate(50)
    assert len(stored()) == MAX_PHASES
    now_s = EVERY_S
    evaluate(50)
    assert len(stored()) == MAX_PHASES + 1
    now_s = EVERY_S * 100
    events.listen(GangReport(number=1, job="a", event=PhaseStarted(phase="exporting")))
    assert stored()[-1] == "exporting"
    database.close()


def test_metrics_of_a_part_of_the_rows_are_no_figures_of_the_job():
    progress = JobProgress()
    progress.handle_event(EvaluationReported(step=2, metrics={"loss": 1.0}))
    part = PartialEvaluation(begin=0, whole=4, rows=RowValues(values=(9.0, 9.0), counts=(1.0, 1.0)))
    progress.handle_event(EvaluationReported(step=4, metrics={"loss": 9.0}, part=part))
    assert progress.metrics == {"loss": 1.0}
