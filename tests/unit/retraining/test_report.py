"""The report of a retraining run."""

import base64
import json
import math
import re
from dataclasses import replace

import pytest

from ringmaster.tasks.retraining.promotion import KEPT, PROMOTED
from ringmaster.tasks.retraining.report import (
    FAILED,
    LEFT,
    ModelResult,
    RetrainingReport,
    cost_of_batch,
)

VERDICTS = (
    ModelResult(
        model="prices", is_due=True, why_due="new data: b, the champion was trained on a", metric="loss",
        outcome=PROMOTED, why="better: loss 1 against 2", champion_version=1, candidate_version=2,
        champion_value=2.0, candidate_value=1.0, num_rows=200, gain=1.0, gain_low=-0.5, gain_high=2.5,
    ),
    ModelResult(
        model="faces", is_due=False, why_due="no new data", metric="accuracy", champion_version=7,
        notes=("label has drifted: PSI 0.4, above 0.2, but there is no new data to learn from",),
    ),
    ModelResult(
        model="words", is_due=True, why_due="it has no champion yet", metric="loss", outcome=FAILED,
        why="line 3\nis no | JSON <b> a_b",
    ),
    ModelResult(
        model="songs", is_due=True, why_due="new data", metric="loss", outcome=LEFT, why="no time", champion_version=3,
    ),
)  # fmt: skip
BATCH = {
    "makespan_s": 3.21,
    "jobs": [
        {"segments": [{"device_s": 3600.0}]},
        {"segments": [{"device_s": 3600.0}]},
    ],
}  # fmt: skip
REPORT = RetrainingReport(
    name="shop",
    run_date="2026-11-20",
    model_results=VERDICTS,
    began_s=1_795_140_000.0,
    deadline_s=1_795_154_400.0,
    missed=2,
    batch=BATCH,
    plan={"makespan_s": 3.0, "gap": 0.0125, "num_jobs": 3},
    svg="<svg/>",
    cost=0.123456,
    budget=2.0,
    num_trials=4,
    profiling_s=6.2,
    left={"prices": "its sweep does not fit in the run"},
)


def test_a_model_that_could_not_be_inspected_has_a_reason_too():
    lost = ModelResult(model="lost", is_due=False, why_due="", metric="loss", outcome="failed", why="it is gone")
    assert "- **lost** is not: it could not be inspected\n" in replace(REPORT, model_results=(lost,)).markdown()


def test_it_says_what_was_due_and_what_came_of_it():
    text = REPORT.markdown()
    assert text.startswith("# Retraining of shop, 2026-11-20\n")
    assert "**3 of 4 models were due; 1 promoted, 1 failed, 1 left for the next run.**" in text
    assert "- **prices** is due: new data: b, the champion was trained on a" in text
    assert "- **faces** is not: no new data" in text
    assert (
        "| prices | **promoted** | version 1, loss 2 | version 2, loss 1 | +1 (-0.5 to +2.5) | 200 | version 2 |"
        in text
    )
    assert "- **prices** promoted: better: loss 1 against 2" in text
    assert "| faces | unchanged | version 7 |  |  |  | version 7 |" in text
    assert "- **faces** unchanged" not in text
    assert "| songs | **left for the next run** | version 3 |  |  |  | version 3 |" in text
    assert "- **songs** left for the next run: no time" in text
    assert "- **faces**: label has drifted" in text


def test_it_says_when_the_night_was_and_what_it_cost():
    text = REPORT.markdown()
    assert "Begun at 2026-11-20 02:00 UTC, to be over by 2026-11-20 06:00 UTC; 2 earlier runs were missed" in text
    assert "- Planned: 3 jobs in 3.0 s, at most 1.2% above the best plan with these runtimes." in text
    fused = replace(REPORT, plan={**REPORT.plan, "num_groups": 1, "num_fused": 2}).markdown()
    assert "- Planned: 3 jobs in 3.0 s, 2 of them together in 1 group, at most 1.2%" in fused
    assert "- Trained in 3.2 s." in text
    assert "- Measured: 4 trials in 6.2 s, of what was not known yet." in text
    assert "- Cost: 0.123 of 2 device-hours." in text
    assert "- **prices**: its sweep does not fit in the run." in text


def test_the_picture_is_in_the_page_and_can_be_left_out():
    (found,) = re.findall(r"data:image/svg\+xml;base64,([^)]*)\)", REPORT.markdown())
    assert base64.b64decode(found) == b"<svg/>"
    assert "base64" not in REPORT.markdown(with_picture=False)


def test_what_more_devices_would_have_gained():
    text = replace(REPORT, gains=("With one more GPU the last job would end 41.0 to 44.0 min earlier.",)).markdown()
    assert "## What more devices would gain\n\n- With one more GPU the last job would end 41.0" in text
    assert "What more devices" not in REPORT.markdown()


def test_whatever_a_fault_says_stays_in_its_line_and_is_no_markdown():
    assert "- **words** failed: line 3\\\\nis no \\| JSON &lt;b&gt; a_b" in REPORT.markdown().splitlines()


def test_a_night_without_work_says_so():
    text = RetrainingReport(name="shop", run_date="2026-11-20", model_results=VERDICTS[1:2]).markdown()
    assert "**0 of 1 models were due; nothing changed.**" in text
    assert "Plan and cost" not in text
    assert "missed" not in text


def test_its_json_form_has_no_values_that_json_lacks():
    broken = ModelResult(
        model="a", is_due=True, why_due="", metric="loss", outcome=KEPT, candidate_value=math.nan, champion_value=1.5
    )
    row = json.loads(json.dumps(broken.to_json(), allow_nan=False))
    assert (row["candidate_value"], row["champion_value"]) == (None, 1.5)
    told = json.loads(json.dumps(REPORT.to_json(), allow_nan=False))
    assert [model["outcome"] for model in told["models"]] == [PROMOTED, "unchanged", FAILED, LEFT]
    assert told["headline"].startswith("3 of 4 models were due")


def test_what_a_batch_cost_counts_every_device():
    assert cost_of_batch(BATCH) == 2.0
    assert cost_of_batch(BATCH, price_per_device_hour=1.5) == 3.0


def test_a_result_that_was_kept_before_gangs_shared_their_cost_has_one_too():
    jobs = [{"segments": [{"seconds": 1800.0, "num_devices": 4}]}]
    assert cost_of_batch({"jobs": jobs}) == 2.0


def test_nights_can_be_compared_by_figures():
    figures = {"num_due": 3, "num_promoted": 1, "num_kept": 0, "num_failed": 1, "num_left": 1}
    assert REPORT.figures() == {**figures, "num_trials": 4, "cost": 0.123456}


def test_money_by_the_hour_is_the_cost_of_a_batch_and_its_jobs_share_it():
    rows = [{"name": name, "segments": [{"device_s": device_s}]} for name, device_s in (("a", 3600.0), ("b", 1800.0))]
    batch = {"jobs": rows}
    assert cost_of_batch(batch, price_per_device_hour=2.0) == pytest.approx(3.0)
    batch["spending"] = {"measured": {"money": 9.0}, "planned": None}
    assert cost_of_batch(batch, price_per_device_hour=2.0) == pytest.approx(9.0)
    assert cost_of_batch(batch, jobs={"a"}) == pytest.approx(6.0)
