"""What is read from a journal about past, present and plan, and how it is drawn."""

import contextvars
import threading
from base64 import b64decode
from uuid import UUID
from xml.etree import ElementTree

import pytest
from prefect.logging import disable_run_logger
from sqlalchemy import insert, select

from tasks.execution.behind import Behind
from tasks.execution.chronicle_svg import MOST_TITLED, render_svg
from tasks.execution.chronicle_text import FAULT_MARK, RUNNING_FILL, TO_COME_FILL, axis, rows
from tasks.execution.events import GangSaid, JobEnded
from tasks.execution.journal import Journal
from tasks.execution.task import GanttArtifact
from tasks.execution.words import Words
from tasks.pool.mail import Mail
from tasks.pool.schema import BATCHES, JOBS
from tasks.pool.submissions import Submission, Submissions
from tests.unit.execution.fakes import job, profile
from tests.unit.execution.stories import ZERO_S, Story, planned

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def story(tmp_path):
    story = Story(tmp_path)
    yield story
    story.database.close()


def spans(found):
    return [(span.job, round(span.start_s, 6), round(span.end_s, 6), span.status) for span in found]


def halfway(story):
    """a has crashed once and is done, late; b runs; c and d are to come."""
    story.plan(planned("a", 0, 10, 0), planned("b", 0, 30, 1), planned("c", 10, 20, 0), planned("d", 30, 50, 0, 1))
    story.ran("a", 0, 4, 0, status="crashed", message="rank 0 was killed")
    story.ran("a", 4, 16, 0)
    story.ran("b", 1, None, 1)
    for name, status in {"a": "done", "b": "running", "c": "waiting", "d": "waiting"}.items():
        story.journal.write_job(name, status=status)
    story.now_s = 18.0


def test_what_is_left_of_a_plan_begins_where_devices_are_free(story):
    halfway(story)
    chronicle = story.historian().read()
    assert spans(chronicle.past) == [("a", 0, 4, "crashed"), ("a", 4, 16, "done")]
    assert spans(chronicle.running) == [("b", 1, 31, "running")]
    assert spans(chronicle.coming) == [("c", 18, 28, "to come"), ("d", 31, 51, "to come")]
    assert {span.status for span in chronicle.first} == {"planned first"}
    assert (chronicle.planned_end_s, chronicle.ends_s, chronicle.is_over) == (50.0, 51.0, False)
    assert chronicle.rows == (("n0", 2),)
    lines = {line.name: line for line in chronicle.jobs}
    assert (lines["a"].technique, lines["a"].ends_s) == ("single", 16.0)
    assert (lines["d"].technique, lines["d"].num_devices, lines["d"].ends_s) == ("ddp", 2, 51.0)
    assert [note.text for note in chronicle.notes] == [
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
    assert spans(story.historian().read().coming) == [("c", 10, 20, "to come")]


def test_a_new_plan_goes_on_with_what_runs_and_leaves_out_what_it_does_not_know(story):
    story.plan(planned("a", 0, 20, 0), planned("b", 0, 10, 1), planned("c", 20, 30, 0), planned("c", 30, 40, 1))
    story.ran("a", 0, None, 0)
    story.ran("b", 0, 6, 1, status="out_of_memory")
    story.ran("c", 7, None, 1)
    for name in "abc":
        story.journal.write_job(name, status="running")
    story.journal.write_job("b", status="waiting")
    # Planned anew without a, which runs: its own plan stays the first one. c goes on at once where it is.
    story.plan(planned("c", 0, 12, 1), planned("b", 12, 15, 1), at_s=8, why="out of memory")
    story.now_s = 9.0
    chronicle = story.historian().read()
    assert spans(chronicle.running) == [("a", 0, 20, "running"), ("c", 7, 20, "running")]
    assert spans(chronicle.coming) == [("b", 20, 23, "to come")]
    assert spans(chronicle.first)[-1] == ("c", 30, 40, "planned first")


def test_a_crashed_segment_comes_again_and_one_that_went_on_does_not(story):
    story.plan(planned("a", 0, 10, 0), planned("a", 10, 20, 1), planned("b", 0, 10, 1))
    story.ran("a", 0, 3, 0, status="crashed")
    story.ran("b", 0, 9, 1)
    story.journal.write_job("a")
    story.journal.write_job("b", status="done")
    story.now_s = 9.5
    assert [span.devices[0][1] for span in story.historian().read().coming] == [0, 1]
    story.ran("a", 9.5, 12, 0)
    story.now_s = 13.0
    assert spans(story.historian().read().coming) == [("a", 13, 23, "to come")]


def test_what_gangs_say_makes_forecasts_better(story):
    halfway(story)
    mail, historian = Mail(story.database), story.historian()
    number = historian.read().running[0].number
    mail.say(number, "n0", words=[(0, {"event": "ready", "step": 0})])
    mail.say(number, "n0", words=[(1, {"event": "steps", "first_step": 0, "seconds": [3.0, 2.0, 2.0]})])
    chronicle = historian.read()
    assert spans(chronicle.running) == [("b", 1, 32, "running")]  # 7 more steps of 2 s
    assert next(line.step for line in chronicle.jobs if line.name == "b") == 3


def test_a_segment_that_takes_longer_goes_on_as_fast_as_it_was(story):
    story.plan(planned("a", 0, 10, 0))
    story.ran("a", 0, None, 0)
    story.journal.write_job("a", status="running", step=6)
    story.now_s = 12.0
    assert spans(story.historian().read().running) == [("a", 0, 20, "running")]


def test_a_batch_that_was_resumed_is_told_from_then_on(story):
    story.plan(planned("a", 0, 10, 0))
    story.ran("a", 0, 5, 0, status="preempted")
    story.ran("a", 5, None, 0)  # nobody was left to end it
    story.journal.write_job("a", status="waiting", step=5)
    story.journal.put("status", "interrupted")
    story.plan(planned("a", 0, 5, 1), at_s=5000, why="resumed")
    story.journal.put("status", "running")
    story.now_s = 5001.0
    chronicle = story.historian().read()
    assert (chronicle.past, chronicle.is_over) == ((), False)
    assert spans(chronicle.coming) == [("a", 1, 6, "to come")]


def test_a_batch_that_was_interrupted_is_over_until_it_is_resumed(story):
    story.plan(planned("a", 0, 10, 0))
    story.ran("a", 0, 5, 0, status="preempted")
    story.journal.write_job("a", status="waiting", step=5)
    story.journal.put("status", "interrupted")
    chronicle = story.historian().read()
    assert (chronicle.is_over, chronicle.coming) == (True, ())


def test_a_segment_that_nobody_ended_gives_way_to_the_next_one(story):
    story.plan(planned("a", 0, 10, 0))
    story.ran("a", 0, None, 0)
    story.ran("a", 2, None, 0)
    story.journal.write_job("a", status="running")
    story.now_s = 3.0
    assert spans(story.historian().read().running) == [("a", 2, 12, "running")]


def test_signatures_change_with_what_happens_alone(story):
    halfway(story)
    historian = story.historian()
    seen = [historian.signature(), historian.signature()]
    story.journal.write_job("b", step=5)
    seen.append(historian.signature())
    story.ran("c", 18, None, 0)
    seen.append(historian.signature())
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
    whole = story.historian(is_pool=True).read()
    assert [line.name for line in whole.jobs] == ["old/a", "new/a"]
    assert spans(whole.first) == [("old/a", 1, 11, "planned first"), ("new/a", 2, 22, "planned first")]
    assert [line.num_steps for line in whole.jobs] == [10, 10]
    one = story.historian(is_pool=True).read("new")
    assert spans(one.first) == [("a", 0, 20, "planned first")]
    assert spans(one.running) == [("a", 1, 21, "running")]
    everything.write_job("old/a", status="done")
    submissions.end("old")
    assert [line.name for line in story.historian(is_pool=True).read().jobs] == ["new/a"]
    assert story.historian(is_pool=True).read("old").is_over
    story.database.close()


def _submitted(story):
    return story.database.read(lambda connection: connection.execute(select(BATCHES.c.submitted_s)).scalars().all())


def test_the_svg_tells_past_present_and_plan_apart(story):
    halfway(story)
    text = render_svg(story.historian().read())
    root = ElementTree.fromstring(text)
    titles = [node.text for node in root.iter(f"{SVG}title")]
    assert "a: single on 1 devices, 0 s to 4 s, crashed: rank 0 was killed" in titles
    assert "b: single on 1 devices, 1 s to 31 s, running" in titles
    assert "now" in titles
    assert sum(node.get("class") == "fault" for node in root.iter(f"{SVG}path")) == 1
    assert "forecast to end after 51 s · planned first 50 s (+2.0%)" in text


def test_pictures_of_many_jobs_stay_small(tmp_path):
    story = Story(tmp_path, nodes=[(f"n{i}", 8) for i in range(4)])
    segments = [planned(f"job{i}", i // 32, i // 32 + 1, i % 8, node=f"n{i // 8 % 4}") for i in range(1000)]
    story.plan(*segments)
    submissions = [{"batch": "", "name": f"job{i}", "status": "waiting", "step": 0} for i in range(1000)]
    rows_ = [{**row, "message": "", "details": {}} for row in submissions]
    story.database.write(lambda connection: connection.execute(insert(JOBS), rows_))
    chronicle = story.historian().read()
    text = render_svg(chronicle)
    assert len(chronicle.first) == len(chronicle.coming) == 1000 > MOST_TITLED
    assert "left out" not in text and text.count("h") > 2000  # every box is there
    assert len(text) < 200_000
    story.database.close()


def test_text_fills_its_columns_and_says_what_is_what_without_colours(story):
    halfway(story)
    chronicle = story.historian().read()
    found, left_out = rows(chronicle, 60)
    texts = {row.name: "".join(piece.text for piece in row.pieces) for row in found}
    assert left_out == 0 and {len(text) for text in texts.values()} == {60}
    assert FAULT_MARK in texts["n0:0"] and TO_COME_FILL in texts["n0:0"]
    assert RUNNING_FILL in texts["n0:1"]
    assert "now" in axis(chronicle, 60) and len(axis(chronicle, 60)) == 61
    assert rows(chronicle, 60, most=2)[1] == 1


class AtOnce:
    """A background without a thread."""

    def __init__(self, act):
        self.ask = act

    def close(self):
        pass


class Artifacts:
    """Prefect's artifacts, without a server."""

    def __init__(self):
        self.texts = []

    def create(self, text):
        self.texts.append(text)
        return UUID(int=7)

    def update(self, artifact, text):
        assert artifact == UUID(int=7)
        self.texts.append(text)


def test_a_picture_that_is_drawn_after_its_flow_run_has_ended_raises_nothing(story):
    tried = []

    def update(artifact, text):
        tried.append(text)
        raise RuntimeError("Cannot send a request, as the client has been closed.")  # httpx's words

    with disable_run_logger():
        gantt = GanttArtifact(story.historian(), create=Artifacts().create, update=update, in_background=AtOnce)
        gantt.close()
    assert len(tried) == 1


def test_the_picture_in_prefect_follows_the_batch_but_not_each_step(story):
    halfway(story)
    artifacts, clock = Artifacts(), iter([0.0, 4.0, 11.0, 11.0, 12.0, 13.0, 13.0])
    gantt = GanttArtifact(
        story.historian(),
        create=artifacts.create,
        update=artifacts.update,
        in_background=AtOnce,
        clock=lambda: next(clock),
    )
    number = story.journal.segments("b")[0].id
    for _ in range(2):
        event = {"event": "steps", "first_step": 0, "seconds": [2.0, 2.0]}
        gantt.listen(GangSaid(number=number, job="b", event=event))
    assert len(artifacts.texts) == 2
    first, second = (_picture(text) for text in artifacts.texts)
    assert "forecast to end after 51 s" in first and "forecast to end after 54 s" in second
    ended = JobEnded(job="b", status="done", message="", details={})
    gantt.listen(ended)
    assert len(artifacts.texts) == 2
    for name in "bcd":
        story.journal.write_job(name, status="done")
    gantt.listen(ended)
    assert len(artifacts.texts) == 3
    gantt.close()
    assert len(artifacts.texts) == 4


def test_what_is_done_behind_is_done_once_more_after_it_was_asked_for():
    acts, is_at_it, may_go_on = [], threading.Event(), threading.Event()

    def act():
        acts.append(where.get())
        is_at_it.set()
        may_go_on.wait(10)

    where = contextvars.ContextVar("where")
    where.set("the flow's context")
    behind = Behind(act, name="test")
    behind.ask()
    assert is_at_it.wait(10)
    for _ in range(3):
        behind.ask()  # nobody waits for the act that is on its way
    behind.close(patience_s=0.0)
    assert len(acts) == 1
    may_go_on.set()
    behind.close()
    assert acts == ["the flow's context"] * 2


def _picture(text):
    head, _, data = text.partition("(data:image/svg+xml;base64,")
    assert head == "![Gantt chart]"
    return b64decode(data.partition(")")[0]).decode()


def test_gangs_on_this_machine_can_be_watched_from_another_process(story):
    halfway(story)
    number = story.journal.segments("b")[0].id
    now_s = iter([0.0, 0.0, 1.0, 2.5, 2.5])
    words = Words(story.database, clock=lambda: next(now_s))
    for first_step in (0, 2, 4):  # the second comes too soon after the first
        event = {"event": "steps", "first_step": first_step, "seconds": [2.0, 2.0], "losses": [1.0, 1.0]}
        words.listen(GangSaid(number=number, job="b", event=event))
    words.listen(GangSaid(number=number, job="b", event={"event": "checkpoint", "step": 6}))
    chronicle = story.historian().read()
    assert spans(chronicle.running) == [("b", 1, 26, "running")]  # 4 more steps of 2 s
    assert len(Mail(story.database).words(after=0)) == 2
