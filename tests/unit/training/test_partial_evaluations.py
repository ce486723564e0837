"""Evaluations of a part of the held-out rows, as a job's session reports them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ringmaster.techniques.processes.gang_events import JobResult, PartialEvaluation, RowValues
from ringmaster.techniques.training.job_session import JobSession

PART = PartialEvaluation(begin=0, whole=4, rows=RowValues(values=(0.1, 0.1), counts=(1.0, 1.0)))


class EventRecorder(list):
    def send(self, event):
        self.append(event)


@pytest.mark.parametrize(("part", "ends"), [(None, True), (PART, False)])
def test_only_an_evaluation_of_all_rows_ends_a_job_at_its_target(part, ends):
    target = SimpleNamespace(
        ends_job=lambda metrics: metrics["loss"] < 1.0, change_report=lambda report: replace(report, part=part)
    )
    session = JobSession.__new__(JobSession)
    session.rank_job = SimpleNamespace(
        callbacks=(target,), next_step=2, job=SimpleNamespace(total_steps=8), num_evaluated_rows=lambda: 4
    )
    session.progress, session._sender = SimpleNamespace(flush=lambda: None), EventRecorder()
    session._metrics, session._result = None, JobResult()
    session.measured({"loss": 0.1}, seconds=1.0)
    assert session.is_at_its_end is ends
    assert [event.part for event in session._sender] == [part]
