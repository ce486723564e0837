"""The past, present and planned segments that a timeline reader reads from a journal."""

import pytest
from sqlalchemy import select

from ringmaster.tasks.execution.execution_events import GangReport
from ringmaster.tasks.execution.step_events import StepEvents
from ringmaster.tasks.pool.submissions import Submission, Submissions
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.tasks.storage.schema import BATCHES
from ringmaster.techniques.processes.gang_events import CheckpointSaved, JobReady, Steps
from tests.unit.execution.fakes import job, profile
from tests.unit.timeline.stories import ZERO_S, Story, halfway, phase, planned


@pytest.fixture
def story(tmp_path):
    story = Story(tmp_path)
    yield story
    story.database.close()


def spans(found):
    return [(span.job, round(span.start_s, 6), round(span.end_s, 6), span.status) for span in found]


def test_what_is_left_of_a_plan_begins_where_devices_are_free(story):
    halfway(story)
    run_timeline = story.timeline_reader().read()
    assert spans(run_timeline.past) == [("a", 0, 4, "crashed"), ("a", 4, 16, "done")]
    assert spans(run_timeline.running) == [("b", 1, 31, "running")]
    assert spans(run_timeline.coming) == [("c", 18, 28, "to come"), ("d", 31, 51, "to come")]
    assert {span.status for span in run_timeline.first} == {"original plan"}
    assert (run_timeline.planned_end_s, run_timeline.ends_s, run_timeline.is_over) == (50.0, 51.0, False)
    assert run_timeline.rows == (("n0", 2),)
    lines = {line.name: line for line in run_timeline.jobs}
    assert (lines["a"].technique, lines["a"].ends_s) == ("single", 16.0)
    assert (lines["d"].technique, lines["d"].num_devices, lines["d"].ends_s) == ("ddp", 2, 51.0)
    assert [note.text for note in run_timeline.notes] == [
        "planned (start): 50 s from then on",
        "a crashed: rank 0 was killed",
    ]


def test_a_job_waits_for_its_base_and_failed_or_paused_ones_do_not_come(story):
    story.plan(
        planned("a", 0, 10, 0),
        planned("b", 0, 5, 1),
        planned("c", 10, 20, 1),
        planned("d", 20, 30, 1),
        after={"c": ("a",)},
    )
    story.ran("a", 0, None, 0)
    story.journal.write_job("a", status="running")
    story.journal.write_job("b", status="failed", message="its loss is not a number")
    story.journal.write_job("c")
    story.journal.write_job("d", status="paused")
    story.now_s = 2.0
    assert spans(story.timeline_reader().read().coming) == [("c", 10, 20, "to come")]


def test_a_new_plan_goes_on_with_what_runs_and_leaves_out_what_it_does_not_know(story):
    story.plan(planned("a", 0, 20, 0), planned("b", 0, 10, 1), planned("c", 20, 30, 0), planned("c", 30, 40, 1))
    story.ran("a", 0, None, 0)
    story.ran("b", 0, 6, 1, status="out_of_memory")
    story.ran("c", 7, None, 1)
    for name in "abc":
        story.journal.write_job(name, status="running")
    story.journal.write_job("b", status="waiting")
    # The new plan leaves out a, which runs: its first plan stays valid. c starts at once where it is.
    story.plan(planned("c", 0, 12, 1), planned("b", 12, 15, 1), at_s=8, why="out of memory")
    story.now_s = 9.0
    run_timeline = story.timeline_reader().read()
    assert spans(run_timeline.running) == [("a", 0, 20, "running"), ("c", 7, 20, "running")]
    assert spans(run_timeline.coming) == [("b", 20, 23, "to come")]
    assert spans(run_timeline.first)[-1] == ("c", 30, 40, "original plan")


@pytest.mark.parametrize(
    ("config", "steps", "statuses"),
    [
        ({}, {"a": 6, "b": 7, "c": 6}, ["running", "running", "running"]),  # all advance with a
        ({"at_once": 2}, {"a": 6, "b": 5, "c": 0}, ["running", "running", "waiting"]),
    ],
    ids=["all", "in-turns"],
)
def test_a_job_waits_in_a_gang_until_its_turn_comes(story, config, steps, statuses):
    story.plan(planned("a", 0, 20, 0))
    story.ran("a", 0, None, 0, fellows={"b": 1, "c": 0}, config=config)
    for name in "abc":
        story.journal.write_job(name, status="running")
    story.journal.put("batch", {"jobs": [{"name": name, "num_steps": 20} for name in "abc"]})
    timeline_reader = story.timeline_reader()
    assert [line.status for line in timeline_reader.read().jobs] == ["running"] * 3  # no step event has been read yet
    number, now_s = story.journal.segments("a")[0].id, iter([0.0, 0.0, 3.0, 3.0, 6.0, 6.0])
    words = StepEvents(story.database, clock=lambda: next(now_s))
    for name, first_step in (("a", 0), ("b", 1), ("a", 3)):
        seconds = [1.0] * (4 if name == "b" else 3)
        event = Steps(job=name, first_step=first_step, seconds=tuple(seconds))
        words.listen(GangReport(number=number, job=name, event=event))
    lines = timeline_reader.read().jobs
    assert {line.name: line.step for line in lines} == steps
    assert [line.status for line in lines] == statuses


@pytest.mark.parametrize(
    ("told", "ends_s"),
    [
        ({"a": 4, "b": 4}, 16),  # c starts when a and b have taken 6 more steps
        ({"a": 10, "b": 10, "c": 3}, 7),  # the lead job has finished, its gang has not
    ],
    ids=["waiting", "last"],
)
@pytest.mark.parametrize(("total", "is_known"), [(10, True), (None, False)], ids=["steps", "epochs"])
def test_a_gang_whose_jobs_take_turns_ends_with_the_last_of_them(story, told, ends_s, total, is_known):
    story.plan(planned("a", 0, 20, 0))
    story.ran("a", 0, None, 0, fellows={"b": 0, "c": 0}, config={"at_once": 2})
    for name in "abc":
        story.journal.write_job(name, status="running")
    story.journal.put("batch", {"jobs": [{"name": name, "num_steps": total} for name in "abc"]})
    timeline_reader, message_store = story.timeline_reader(), MessageStore(story.database)
    number = story.journal.segments("a")[0].id
    for k, (name, step) in enumerate(told.items()):
        word = Steps(job=name, first_step=0, seconds=tuple([1.0] * step))
        message_store.store(number, "n0", events=[(k, word)])
    assert spans(timeline_reader.read().running) == [("a", 0, ends_s if is_known else 20, "running")]


def test_a_job_has_as_many_steps_as_its_last_phase_or_its_new_definition_says(story):
    story.journal.put("batch", {"jobs": [{"name": name, "num_steps": 20} for name in "abc"]})
    story.plan(planned("a", 0, 10, 0))
    settled = {"num_steps": 30}
    both = {"phases": (phase(20), phase(12)), "settled": settled}
    for name, changes in (("a", both), ("b", {"settled": settled}), ("c", {})):
        story.journal.write_job(name, status="waiting", step=5, **changes)

    assert [line.num_steps for line in story.timeline_reader().read().jobs] == [12, 30, 20]


def test_words_of_a_gangs_jobs_are_written_together(story):
    halfway(story)
    number, now_s = story.journal.segments("b")[0].id, iter([0.0, 0.0, 1.0, 1.5, 2.5, 2.5])
    words = StepEvents(story.database, clock=lambda: next(now_s))
    for name, first_step in (("b", 0), ("d", 0), ("d", 2), ("b", 2)):  # the events of d are stored as one
        event = Steps(job=name, first_step=first_step, seconds=(2.0, 2.0))
        words.listen(GangReport(number=number, job=name, event=event))
    told = [(word.content.job, word.content.first_step) for word in MessageStore(story.database).events(after=0)]
    assert told == [("b", 0), ("d", 0), ("b", 2)]


def test_a_crashed_segment_comes_again_and_one_that_went_on_does_not(story):
    story.plan(planned("a", 0, 10, 0), planned("a", 10, 20, 1), planned("b", 0, 10, 1))
    story.ran("a", 0, 3, 0, status="crashed")
    story.ran("b", 0, 9, 1)
    story.journal.write_job("a")
    story.journal.write_job("b", status="done")
    story.now_s = 9.5
    assert [span.devices[0][1] for span in story.timeline_reader().read().coming] == [0, 1]
    story.ran("a", 9.5, 12, 0)
    story.now_s = 13.0
    assert spans(story.timeline_reader().read().coming) == [("a", 13, 23, "to come")]


def test_what_gangs_say_makes_forecasts_better(story):
    halfway(story)
    message_store, timeline_reader = MessageStore(story.database), story.timeline_reader()
    number = timeline_reader.read().running[0].number
    message_store.store(number, "n0", events=[(0, JobReady(step=0))])
    message_store.store(number, "n0", events=[(1, Steps(first_step=0, seconds=(3.0, 2.0, 2.0)))])
    run_timeline = timeline_reader.read()
    assert spans(run_timeline.running) == [("b", 1, 32, "running")]  # 7 more steps of 2 s
    assert next(line.step for line in run_timeline.jobs if line.name == "b") == 3


def test_a_segment_that_takes_longer_goes_on_as_fast_as_it_was(story):
    story.plan(planned("a", 0, 10, 0))
    story.ran("a", 0, None, 0)
    story.journal.write_job("a", status="running", step=6)
    story.now_s = 12.0
    assert spans(story.timeline_reader().read().running) == [("a", 0, 20, "running")]


def test_a_batch_that_was_resumed_is_told_from_then_on(story):
    story.plan(planned("a", 0, 10, 0))
    story.ran("a", 0, 5, 0, status="preempted")
    story.ran("a", 5, None, 0)  # no process was left to end the segment
    story.journal.write_job("a", status="waiting", step=5)
    story.journal.put("status", "interrupted")
    story.plan(planned("a", 0, 5, 1), at_s=5000, why="resumed")
    story.journal.put("status", "running")
    story.now_s = 5001.0
    run_timeline = story.timeline_reader().read()
    assert (run_timeline.past, run_timeline.is_over) == ((), False)
    assert spans(run_timeline.coming) == [("a", 1, 6, "to come")]


def test_a_batch_that_was_interrupted_is_over_until_it_is_resumed(story):
    story.plan(planned("a", 0, 10, 0))
    story.ran("a", 0, 5, 0, status="preempted")
    story.journal.write_job("a", status="waiting", step=5)
    story.journal.put("status", "interrupted")
    run_timeline = story.timeline_reader().read()
    assert (run_timeline.is_over, run_timeline.coming) == (True, ())


def test_a_segment_that_nobody_ended_gives_way_to_the_next_one(story):
    story.plan(planned("a", 0, 10, 0))
    story.ran("a", 0, None, 0)
    story.ran("a", 2, None, 0)
    story.journal.write_job("a", status="running")
    story.now_s = 3.0
    assert spans(story.timeline_reader().read().running) == [("a", 2, 12, "running")]


def test_signatures_change_with_what_happens_alone(story):
    halfway(story)
    timeline_reader = story.timeline_reader()
    seen = [timeline_reader.archive.signature(), timeline_reader.archive.signature()]
    story.journal.write_job("b", step=5)
    seen.append(timeline_reader.archive.signature())
    story.ran("c", 18, None, 0)
    seen.append(timeline_reader.archive.signature())
    assert seen[0] == seen[1] and len(set(seen)) == 3


def test_a_pool_begins_with_its_oldest_standing_batch_and_each_batch_with_itself(tmp_path):
    story = Story(tmp_path)
    submissions, everything = Submissions(story.database), Journal(story.database, batch=None)
    for name in ("old", "new"):
        submission = Submission(
            id=name,
            name=name,
            jobs=(job("a"),),
            profiles={"a": (profile(),)},
            folder="f",
            cache_dir="c",
        )
        submissions.submit(submission)
    offset_s = min(_submitted(story)) - ZERO_S
    story.plan(planned("old/a", 0, 10, 0), at_s=offset_s + 1)
    story.plan(planned("old/a", 0, 9, 0), planned("new/a", 0, 20, 1), at_s=offset_s + 2, why="a batch was submitted")
    story.ran("old/a", offset_s + 1, None, 0)
    story.ran("new/a", offset_s + 3, None, 1)
    everything.write_job("old/a", status="running")
    everything.write_job("new/a", status="running")
    story.now_s = offset_s + 5
    whole = story.timeline_reader(is_pool=True).read()
    assert [line.name for line in whole.jobs] == ["old/a", "new/a"]
    assert spans(whole.first) == [("old/a", 1, 11, "original plan"), ("new/a", 2, 22, "original plan")]
    assert [line.num_steps for line in whole.jobs] == [10, 10]
    one = story.timeline_reader(is_pool=True).read("new")
    assert spans(one.first) == [("a", 0, 20, "original plan")]
    assert spans(one.running) == [("a", 1, 21, "running")]
    everything.write_job("old/a", status="done")
    submissions.end("old")
    assert [line.name for line in story.timeline_reader(is_pool=True).read().jobs] == ["new/a"]
    assert story.timeline_reader(is_pool=True).read("old").is_over
    story.database.close()


def _submitted(story):
    return story.database.read(lambda connection: connection.execute(select(BATCHES.c.submitted_s)).scalars().all())


def test_gangs_on_this_machine_can_be_watched_from_another_process(story):
    halfway(story)
    number = story.journal.segments("b")[0].id
    now_s = iter([0.0, 0.0, 1.0, 2.5, 2.5])
    words = StepEvents(story.database, clock=lambda: next(now_s))
    for first_step in (0, 2, 4):  # the second event is too soon after the first to be written
        event = Steps(first_step=first_step, seconds=(2.0, 2.0), losses=(1.0, 1.0))
        words.listen(GangReport(number=number, job="b", event=event))
    words.listen(GangReport(number=number, job="b", event=CheckpointSaved(step=6)))
    run_timeline = story.timeline_reader().read()
    assert spans(run_timeline.running) == [("b", 1, 26, "running")]  # 4 more steps of 2 s
    assert len(MessageStore(story.database).events(after=0)) == 2


def test_a_clock_that_was_set_back_shows_no_time_before_what_was_recorded(story):
    halfway(story)
    story.now_s = -86_400.0
    run_timeline = story.timeline_reader().read()
    assert run_timeline.now_s == 16
    assert all(span.end_s >= span.start_s >= 0 for span in (*run_timeline.running, *run_timeline.coming))
