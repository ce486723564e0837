"""Helpers that start groups of jobs with their gangs, and read the results."""

import psutil

from ringmaster.techniques import Adapter
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from tests.integration.stubs import HEEDED, heard
from tests.integration.workbench import SINGLE, Layout, is_bit_equal, weights_in

GROUP = Layout("tests.integration.stubs:HeedingSharedBase")
HANGING = Layout("tests.integration.stubs:HangingSharedBase")
LORA, IA3 = Adapter(rank=4), Adapter(kind="ia3")
HEADED = Adapter(rank=4, modules_to_save=("lm_head",))
LEADER, EVEN, BRIEF = "leader", "even", "brief"


class Groups:
    """Trains jobs as a group, each in a folder of its own; the first job leads."""

    def __init__(self, bench, base, folder):
        self._bench, self._base, self.folder = bench, base, folder

    def train(self, jobs, *, layout=GROUP, on_event=lambda *_: None, last_steps=None, fellow_changes=None, **changes):
        last_steps, fellow_changes = last_steps or {}, fellow_changes or {}

        def ordered(job):
            return {"last_step": last_steps.get(job.name, job.num_steps), "weights_from": self._base}

        members = tuple(
            self._bench.order(job, layout, self.folder / job.name, **ordered(job), **fellow_changes.get(job.name, {}))
            for job in jobs[1:]
        )
        lead, number = jobs[0], 0

        def on_heeded_event(gang, event):
            nonlocal number
            on_event(gang, event)
            if event.NAME in HEEDED:
                number += 1
                heard(self.folder / lead.name / "gang", gang.pids[0], number).touch()

        return self._bench.train(
            lead,
            layout,
            self.folder / lead.name,
            on_event=on_heeded_event,
            members=members,
            **{**ordered(lead), **changes},
        )

    def train_alone(self, job, **changes):
        return self._bench.train(job, SINGLE, self.folder / job.name, weights_from=self._base, **changes)

    def weights(self, job):
        return weights_in(self.folder / job.name / "model")

    def step(self, job):
        """The step of the job's newest checkpoint."""
        return CheckpointStore(self.folder / job.name / "checkpoints").newest().manifest.step


def tell(command, *, at="ready", job=LEADER):
    """Returns an `on_event` that sends the gang a command at the first event `at` of a job."""
    told = []

    def on_event(gang, event):
        if at == event.NAME and getattr(event, "job", None) == job and not told:
            told.append(command)
            gang.send(command)

    return on_event


def assert_was_taken_for_hung(trained, pids):
    assert trained.outcome.status == "crashed"
    assert "while training: killed as hung" in trained.outcome.message
    assert pids and not [pid for pid in pids if psutil.pid_exists(pid)]


def said(trained, event, job):
    return [e for e in trained.said(event) if e.job == job.name]


def losses(trained, job):
    """Returns (first step, losses) from the step events of the gang, and asserts that no step is missing."""
    events = said(trained, "steps", job)
    first = at = events[0].first_step
    for event in events:
        assert event.first_step == at
        at += len(event.losses)
        assert len(event.seconds) == len(event.losses)
    return first, [loss for event in events for loss in event.losses]


def result_of(trained, job):
    result = trained.outcome.result
    return result if job.name == trained.order.job.name else result.members[job.name]


def assert_ended_as_alone(groups, trained, jobs, alone):
    for job in jobs:
        mine, result = alone(job), result_of(trained, job)
        assert (result.status, result.step) == ("done", job.num_steps), job.name
        assert result.metrics == mine.outcome.result.metrics, job.name
        assert is_bit_equal(groups.weights(job), mine.weights), job.name
        first, told = losses(trained, job)
        assert told == mine.losses[first:], job.name
