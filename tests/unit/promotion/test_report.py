"""The report of a night."""

import json
import math

from tasks.promotion.report import FAILED, KEPT, PROMOTED, Verdict, markdown

VERDICTS = [
    Verdict(
        model="prices", is_due=True, why_due="new data: b, the champion was trained on a", metric="loss",
        outcome=PROMOTED, why="better: loss 1 against 2", champion_version=1, candidate_version=2,
        champion_value=2.0, candidate_value=1.0,
    ),
    Verdict(model="faces", is_due=False, why_due="no new data", metric="accuracy", champion_version=7),
    Verdict(
        model="words", is_due=True, why_due="it has no champion yet", metric="loss", outcome=FAILED,
        why="line 3\nis no | JSON",
    ),
]  # fmt: skip


def test_it_says_what_was_due_and_what_came_of_it():
    text = markdown("shop", VERDICTS, batch={"makespan_s": 3.21, "num_trials": 4})
    assert "**2 of 3 models were due; 1 promoted, 1 failed.**" in text
    assert "The batch took 3.2 s on its devices, after 4 trials." in text
    assert "| prices | yes: new data: b, the champion was trained on a | **promoted**; version 2 serves: better" in text
    assert "| faces | no: no new data | **unchanged**; version 7 serves |" in text
    assert "| words | yes: it has no champion yet | **failed**; no version serves: line 3" in text


def test_whatever_a_fault_says_stays_in_its_cell():
    *_, last = markdown("shop", VERDICTS, batch=None).splitlines()
    assert last.endswith("line 3 is no \\| JSON |")


def test_a_night_without_work_says_so():
    text = markdown("shop", VERDICTS[1:2], batch=None)
    assert "**0 of 1 models were due; nothing changed.**" in text
    assert "trials" not in text


def test_its_json_form_has_no_values_that_json_lacks():
    broken = Verdict(
        model="a", is_due=True, why_due="", metric="loss", outcome=KEPT, candidate_value=math.nan, champion_value=1.5
    )
    row = json.loads(json.dumps(broken.to_json(), allow_nan=False))
    assert (row["candidate_value"], row["champion_value"]) == (None, 1.5)
