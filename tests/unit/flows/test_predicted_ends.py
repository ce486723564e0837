"""Predicted ends in `ringmaster status`."""

import time

import pytest

from ringmaster.flows.reports.watch import runs_of, status_table
from ringmaster.tasks.execution.execution_events import PredictedEnd, Prediction
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.fact_keys import NEWEST_PREDICTION
from ringmaster.tasks.storage.journal import JobStatus, Journal
from ringmaster.tasks.timeline.reader import TimelineReader


def prediction(**changes):
    bounds = {"earliest_s": 60.0, "latest_s": 120.0}
    ends = {
        "a": PredictedEnd(end_s=100.0, low_s=80.0, high_s=130.0, **bounds),
        "b": PredictedEnd(end_s=9.0, low_s=8.0, high_s=9),
    }
    figures = {"makespan_s": 100.0, "low_s": 80.0, "high_s": 130.0, "load": 1.0, "spread": 0.1, "num_earlier": 0}
    return Prediction(**figures, jobs=ends, **changes)


def test_status_says_in_how_long_each_job_ends_that_has_not_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    folder = tmp_path / "batches" / "night" / "2026-11-25T00-00-00"
    folder.mkdir(parents=True)
    journal = Journal.of_file(folder / "journal.db")
    began_s = time.time() - 20.0
    journal.put(NEWEST_PREDICTION, prediction(since_s=began_s, made_s=15.0).to_json())
    journal.write_job("a", status=JobStatus.RUNNING)
    journal.write_job("b", status=JobStatus.DONE)
    journal.close()
    rows = {row["job"]: row for run in runs_of("night") for row in run.rows}
    assert rows["b"]["ends_in"] is None
    assert rows["a"]["ends_in"]["end_s"] == pytest.approx(80.0, abs=5.0)
    assert rows["a"]["ends_in"]["low_s"] < rows["a"]["ends_in"]["end_s"] < rows["a"]["ends_in"]["high_s"]
    assert rows["a"]["ends_in"]["earliest_s"] == pytest.approx(40.0, abs=5.0)
    assert rows["a"]["ends_in"]["latest_s"] == pytest.approx(100.0, abs=5.0)
    text = status_table(rows.values()).plain
    assert "ends in" in text.splitlines()[0]
    assert " to " in text.splitlines()[1]


def test_a_batch_of_which_nothing_goes_on_has_no_predicted_end(tmp_path):
    database = Database(file_url(tmp_path / "journal.db"), synced=False)
    journal = Journal(database, batch="")
    journal.put(NEWEST_PREDICTION, prediction(since_s=time.time(), made_s=0.0).to_json())
    journal.write_job("a", status=JobStatus.PAUSED)
    journal.write_job("b", status=JobStatus.DONE)
    reader = TimelineReader(database, name="night")
    assert reader.read().predicted == {}
    journal.write_job("a", status=JobStatus.WAITING)
    assert set(reader.read().predicted) == {""}
    database.close()
