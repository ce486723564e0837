"""Nights: kept by their date, held by one process, gone on with by the next."""

import os
import platform
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from sqlalchemy import insert, select, update

from ringmaster.tasks.pool.database import Database, file_url
from ringmaster.tasks.retraining.nights import DONE, HOLDERS, INTERRUPTED, NightHeld, NightRecord, Nights

NIGHT = "2026-11-20"


@pytest.fixture
def database(tmp_path):
    database = Database(file_url(tmp_path / "nights.db"), synced=False)
    yield database
    database.close()


@pytest.fixture
def nights(database):
    return Nights(database, clock=lambda: 1000.0)


def test_a_night_is_begun_once_and_found_again(nights):
    record = nights.begin("shop", NIGHT)
    assert record == NightRecord(name="shop", night=NIGHT, began_s=1000.0)
    nights.save(replace(record, content={"looked": {"a": [1, None]}}))
    assert nights.begin("shop", NIGHT).content == {"looked": {"a": [1, None]}}
    assert nights.find("other", NIGHT) is None


@pytest.mark.parametrize(("status", "is_over"), [(DONE, True), ("failed", True), (INTERRUPTED, False)])
def test_a_night_is_over_when_it_is_done_or_has_failed(nights, status, is_over):
    nights.save(replace(nights.begin("shop", NIGHT), status=status))
    found = nights.find("shop", NIGHT)
    assert found is not None
    assert found.is_over == is_over


def test_nights_are_in_the_order_of_their_dates(nights):
    for night in ("2026-11-21", "2026-11-19", "2026-11-19.02"):
        nights.begin("shop", night)
    nights.begin("other", "2026-11-20")
    assert nights.before("shop", NIGHT).night == "2026-11-19.02"
    assert nights.after("shop", NIGHT).night == "2026-11-21"
    assert nights.before("shop", "2026-11-19") is None
    assert nights.after("shop", "2026-11-21.99") is None
    assert [record.night for record in nights.every("shop")] == ["2026-11-19", "2026-11-19.02", "2026-11-21"]


def test_a_night_is_held_by_one_at_a_time(nights):
    with nights.held("shop", NIGHT):
        with pytest.raises(NightHeld, match=f"the night {NIGHT} of shop is under way in process {os.getpid()}"):
            nights.held("shop", "2026-11-21").__enter__()
        with nights.held("other", NIGHT):
            pass
    with nights.held("shop", NIGHT):
        pass


def holder(database, **changed):
    row = {
        "name": "shop", "token": "t", "night": NIGHT, "host": platform.node(), "pid": os.getpid(),
        "born_s": psutil.Process().create_time(), "beats": 0,
    }  # fmt: skip
    database.write(lambda connection: connection.execute(insert(HOLDERS).values(**{**row, **changed})))


def test_a_holder_that_died_on_this_machine_is_passed_over(nights, database):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    holder(database, pid=process.pid)
    with nights.held("shop", NIGHT):
        pass


def test_a_later_process_of_the_same_number_is_not_the_holder(nights, database):
    holder(database, born_s=psutil.Process().create_time() - 100)
    with nights.held("shop", NIGHT):
        pass


def test_a_silent_holder_on_another_machine_is_passed_over(nights, database):
    holder(database, host="elsewhere")
    with nights.held("shop", NIGHT, silence_s=0.01):
        pass


def test_a_holder_on_another_machine_that_beats_is_respected(nights, database, monkeypatch):
    holder(database, host="elsewhere")
    looks = Nights._holder_of

    def beating(self, name):
        found = looks(self, name)
        beat = update(HOLDERS).values(beats=HOLDERS.c.beats + 1)
        database.write(lambda connection: connection.execute(beat))
        return found

    monkeypatch.setattr(Nights, "_holder_of", beating)
    with pytest.raises(NightHeld, match="on elsewhere"):
        nights.held("shop", NIGHT, silence_s=0.01).__enter__()


def test_a_holder_beats_while_it_works(nights, database):
    def beats():
        return database.read(lambda connection: connection.execute(select(HOLDERS.c.beats)).scalar_one())

    with nights.held("shop", NIGHT, beat_s=0.005):
        while beats() < 2:
            pass
    assert database.read(lambda connection: connection.execute(select(HOLDERS)).all()) == []
