"""The date of a retraining run, and the models of each of its rounds."""

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from ringmaster.errors import InputError
from ringmaster.flows import retrain_daily
from ringmaster.flows.commands.running import exit_code
from ringmaster.flows.retraining import retraining_run
from ringmaster.tasks.retraining.production import Production, ProductionEntry, RetrainingEntry
from ringmaster.tasks.retraining.runs import RetrainingRuns, RetrainingStatus, RunRecord
from ringmaster.tasks.storage.database import Database, file_url


@dataclass(frozen=True)
class Model:
    name: str


@pytest.fixture
def production(tmp_path):
    models = (Model("a"), Model("b"))
    entry = ProductionEntry(name="shop", night=RetrainingEntry(starts="02:00"))
    return Production(entry=entry, models=models, devices="auto", folder=tmp_path)


@pytest.fixture
def clock():
    token = retraining_run.current_clock.set(lambda: at("2026-11-21T03:00").timestamp())
    yield
    retraining_run.current_clock.reset(token)


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def started_by(monkeypatch, *, auto_scheduled):
    run = SimpleNamespace(auto_scheduled=auto_scheduled, expected_start_time=at("2026-11-20T02:00"))
    monkeypatch.setattr(retraining_run, "current_flow_run", lambda: run)


def test_a_night_that_is_named_is_meant(production, clock):
    assert retraining_run._date(production, "2026-11-05") == "2026-11-05"
    with pytest.raises(InputError, match="give its date, such as"):
        retraining_run._date(production, "last night")


def test_the_night_of_now_is_meant_otherwise(production, clock, monkeypatch):
    assert retraining_run._date(production, None) == "2026-11-21"
    started_by(monkeypatch, auto_scheduled=False)
    assert retraining_run._date(production, None) == "2026-11-21"


def test_a_run_of_the_schedule_that_comes_late_is_of_its_own_night(production, clock, monkeypatch):
    started_by(monkeypatch, auto_scheduled=True)
    assert retraining_run._date(production, None) == "2026-11-20"


def test_a_further_round_is_for_those_that_are_asked_for(production):
    assert retraining_run._of_this_round(production, ["b"], is_over=False) == production
    assert retraining_run._of_this_round(production, ["b"], is_over=True).models == (Model("b"),)
    with pytest.raises(InputError, match="there is no model 'c' to force"):
        retraining_run._of_this_round(production, ["c"], is_over=False)


def test_rounds_are_numbered_and_one_that_is_not_over_goes_on(tmp_path):
    database = Database(file_url(tmp_path / "nights.db"), synced=False)
    runs = RetrainingRuns(database, clock=lambda: 0.0)
    assert retraining_run._round(runs, "shop", "2026-11-20") == "2026-11-20"
    for key in ("2026-11-20", "2026-11-20.02"):
        runs.begin("shop", key)
        assert retraining_run._round(runs, "shop", "2026-11-20") == key
        runs.save(RunRecord(name="shop", run_date=key, status=RetrainingStatus.DONE))
    assert retraining_run._round(runs, "shop", "2026-11-20") == "2026-11-20.03"
    database.close()


def test_a_night_that_was_cut_short_hides_nothing_that_one_before_it_left(production, tmp_path):
    database = Database(file_url(tmp_path / "nights.db"), synced=False)
    runs = RetrainingRuns(database, clock=lambda: 0.0)
    for key, content in (("2026-11-18", {"champions": {"a": 1}}), ("2026-11-19", {"looked": {}}), ("2026-11-21", {})):
        runs.begin("shop", key)
        runs.save(RunRecord(name="shop", run_date=key, content=content))
    tonight = retraining_run.RetrainingRun(
        production=production,
        record=runs.begin("shop", "2026-11-20"),
        last=runs.before("shop", "2026-11-20"),
        forced=(),
        node_context=None,
        runs=runs,
        moves=None,
        folder=tmp_path,
    )
    assert tonight.left_by_earlier("champions") == {"a": 1}
    assert tonight.left_by_earlier("waited") == {}
    tonight.save(waited={"b": 2})
    assert runs.find("shop", "2026-11-20").content == {"waited": {"b": 2}}
    made = []
    assert tonight.step("looked", lambda: made.append(1) or {"a": 1}) == {"a": 1}
    assert tonight.step("looked", lambda: made.append(1)) == {"a": 1}
    assert made == [1]
    database.close()


@pytest.mark.parametrize("deadline", ["02:30", "04:00", None])
@pytest.mark.parametrize("auto_scheduled", [False, True])
@pytest.mark.parametrize("content", [None, {"looked": {}}])
def test_a_run_by_hand_after_its_deadline_is_not_begun(
    production, clock, tmp_path, monkeypatch, deadline, auto_scheduled, content
):
    database = Database(file_url(tmp_path / "nights.db"), synced=False)
    runs = RetrainingRuns(database, clock=lambda: 0.0)
    night = RetrainingEntry(starts="02:00", deadline=deadline)
    production = replace(production, entry=ProductionEntry(name="shop", night=night))
    started_by(monkeypatch, auto_scheduled=auto_scheduled)
    if content is not None:
        runs.save(replace(runs.begin("shop", "2026-11-21"), content=content))
    answered = retraining_run._answered(runs, production, "2026-11-21", is_forced=False)
    if deadline == "02:30" and not auto_scheduled and content is None:
        assert answered.status == RetrainingStatus.LATE
        said = retrain_daily._known(answered)
        assert said["status"] == "failed"
        assert "its deadline, 2026-11-21 02:30 UTC, has passed" in said["report"]
        assert "`--night 2026-11-22`" in said["report"]
        assert exit_code(said) == 1
    else:
        assert answered is None
    database.close()


@pytest.mark.parametrize(
    ("ended", "status"), [("2026-11-20", RetrainingStatus.DONE), ("2026-11-21", RetrainingStatus.SKIPPED)]
)
def test_what_another_process_has_ended_while_this_one_came_to_hold_it_is_not_done_again(
    production, tmp_path, monkeypatch, ended, status
):
    database = Database(file_url(tmp_path / "nights.db"))
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    runs = RetrainingRuns(database, clock=time.time)
    runs.begin("shop", "2026-11-20")

    @contextmanager
    def held(_, name, run):
        runs.save(replace(runs.begin(name, ended), status=RetrainingStatus.DONE, content={"answer": {"night": ended}}))
        yield

    monkeypatch.setattr(RetrainingRuns, "held", held)
    with retraining_run.open_run(production, run_date="2026-11-20", force=()) as answered:
        assert (answered.run_date, answered.status) == ("2026-11-20", status)
    database.close()
