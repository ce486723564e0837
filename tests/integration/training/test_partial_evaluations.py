"""Gangs that evaluate a part of the held-out rows, and go on or end it as they are commanded."""

from dataclasses import replace

import pytest

from ringmaster.features.rung_evaluation.row_parts import end_of, rows_up_to
from ringmaster.techniques import EvaluationSpec
from ringmaster.techniques.job_specs import EvaluationSlice
from ringmaster.techniques.processes.gang_events import EvaluationReported
from ringmaster.techniques.processes.reporter import STOP
from tests.integration.workbench import SINGLE, VIT, Layout

RUNG, WHOLE = 2, 180  # of the 183 rows that are held out
FIRST = EvaluationSlice(step=RUNG, end=0.1)


def parts_of(bench, folder, layout, *slices, commands=(), status="done"):
    """The reports of a gang that trains up to the rung. commands: after each of the first reports, what it is sent."""
    evaluation = EvaluationSpec(max_rows=WHOLE, at_steps=(RUNG,), parts=slices)
    left = list(commands)

    def on_event(gang, event):
        if isinstance(event, EvaluationReported) and left:
            for command in left.pop(0):
                gang.send(command)

    trained = bench.train(
        bench.job(VIT, num_steps=4, evaluation=evaluation), layout, folder, on_event=on_event, last_step=RUNG
    )
    assert (trained.outcome.status, trained.outcome.result.step) == (status, RUNG), trained.outcome
    return [event.part for event in trained.events if isinstance(event, EvaluationReported)]


@pytest.mark.parametrize("layout", [SINGLE, Layout("ddp", 2)], ids=str)
def test_a_part_is_evaluated_until_it_is_enough(bench, tmp_path, layout):
    (first,) = parts_of(bench, tmp_path, layout, FIRST)
    assert (first.begin, end_of(first), first.whole) == (0, 64, WHOLE)
    rest = EvaluationSlice(step=RUNG, begin=end_of(first) / WHOLE, end=1.0)
    parts = parts_of(bench, tmp_path, layout, FIRST, rest)
    assert parts[0].begin == 64 and end_of(parts[-1]) == WHOLE and len(parts) > 5
    assert [part.begin for part in parts[1:]] == [end_of(part) for part in parts[:-1]], "each row once"
    enough = rows_up_to("tiny", step=RUNG, share=0.0)
    ended = parts_of(bench, tmp_path, layout, FIRST, rest, commands=[[enough]])
    assert 1 <= len(ended) < len(parts) and ended == parts[: len(ended)]
    stopped = parts_of(bench, tmp_path, layout, FIRST, rest, commands=[[STOP]], status="preempted")
    assert len(stopped) < len(parts), "its next gang computes the others"
    further = rows_up_to("tiny", step=RUNG, share=1.0)
    longer = parts_of(bench, tmp_path, layout, FIRST, replace(rest, end=0.8), commands=[[further]])
    assert longer == parts
