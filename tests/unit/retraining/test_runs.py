"""Stored retraining runs: found by their date, held by one process, continued by the next."""

import os
import platform
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from sqlalchemy import insert, select, update

from ringmaster.errors import RetrainingInProgress
from ringmaster.tasks.retraining.runs import HOLDERS, RetrainingRuns, RetrainingStatus, RunRecord
from ringmaster.tasks.storage.database import Database, file_url

NIGHT = "2026-11-20"


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "nights.db"), synced=False)
    yield database
    database.close()


@pytest.fixture
def runs(database):
    return RetrainingRuns(database, clock=lambda: 1000.0)


def test_a_night_is_begun_once_and_found_again(runs):
    record = runs.begin("shop", NIGHT)
    assert record == RunRecord(name="shop", run_date=NIGHT, began_s=1000.0)
    runs.save(replace(record, content={"looked": {"a": [1, None]}}))
    assert runs.begin("shop", NIGHT).content == {"looked": {"a": [1, None]}}
    assert runs.find("other", NIGHT) is None


@pytest.mark.parametrize(
    ("status", "is_over"), [(RetrainingStatus.DONE, True), ("failed", True), (RetrainingStatus.INTERRUPTED, False)]
)
def test_a_night_is_over_when_it_is_done_or_has_failed(runs, status, is_over):
    runs.save(replace(runs.begin("shop", NIGHT), status=status))
    found = runs.find("shop", NIGHT)
    assert found is not None
    assert found.is_over == is_over


def test_nights_are_in_the_order_of_their_dates(runs):
    for run_date in ("2026-11-21", "2026-11-19", "2026-11-19.02"):
        runs.begin("shop", run_date)
    runs.begin("other", "2026-11-20")
    assert runs.before("shop", NIGHT).run_date == "2026-11-19.02"
    assert runs.after("shop", NIGHT).run_date == "2026-11-21"
    assert runs.before("shop", "2026-11-19") is None
    assert runs.after("shop", "2026-11-21.99") is None
    assert [record.run_date for record in runs.every("shop")] == ["2026-11-19", "2026-11-19.02", "2026-11-21"]


def test_a_night_is_held_by_one_at_a_time(runs):
    with runs.held("shop", NIGHT):
        with pytest.raises(
            RetrainingInProgress, match=f"the run {NIGHT} of shop is in progress in process {os.getpid()}"
        ):
            runs.held("shop", "2026-11-21").__enter__()
        with runs.held("other", NIGHT):
            pass
    with runs.held("shop", NIGHT):
        pass


def holder(database, **changed):
    row = {
        "name": "shop", "token": "t", "night": NIGHT, "host": platform.node(), "pid": os.getpid(),
        "born_s": psutil.Process().create_time(), "beats": 0,
    }  # fmt: skip
    database.write(lambda connection: connection.execute(insert(HOLDERS).values(**{**row, **changed})))


def test_a_holder_that_died_on_this_machine_is_passed_over(runs, database):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    holder(database, pid=process.pid)
    with runs.held("shop", NIGHT):
        pass


def test_a_later_process_of_the_same_number_is_not_the_holder(runs, database):
    holder(database, born_s=psutil.Process().create_time() - 100)
    with runs.held("shop", NIGHT):
        pass


def test_a_silent_holder_on_another_machine_is_passed_over(runs, database):
    holder(database, host="elsewhere")
    with runs.held("shop", NIGHT, silence_s=0.01):
        pass


def test_a_holder_on_another_machine_that_beats_is_respected(runs, database, monkeypatch):
    holder(database, host="elsewhere")
    looks = RetrainingRuns._holder_of

    def beating(self, name):
        found = looks(self, name)
        beat = update(HOLDERS).values(beats=HOLDERS.c.beats + 1)
        database.write(lambda connection: connection.execute(beat))
        return found

    monkeypatch.setattr(RetrainingRuns, "_holder_of", beating)
    with pytest.raises(RetrainingInProgress, match="on elsewhere"):
        runs.held("shop", NIGHT, silence_s=0.01).__enter__()


def test_a_holder_beats_while_it_works(runs, database):
    def beats():
        return database.read(lambda connection: connection.execute(select(HOLDERS.c.beats)).scalar_one())

    with runs.held("shop", NIGHT, beat_s=0.005):
        while beats() < 2:
            pass
    assert database.read(lambda connection: connection.execute(select(HOLDERS)).all()) == []
