"""The date of a retraining run, and the models of each of its rounds."""

import re
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from prefect.client.schemas.objects import StateType

from ringmaster.errors import InputError, RetrainingFailed
from ringmaster.flows import retrain_daily
from ringmaster.flows.batch.flow_runs import final_state
from ringmaster.flows.caller import Caller
from ringmaster.flows.commands.running import exit_code
from ringmaster.flows.retraining import retraining_run
from ringmaster.tasks.retraining.production import Production, ProductionEntry, RetrainingEntry, load_production
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
    return lambda: at("2026-11-21T03:00").timestamp()


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def started_by(monkeypatch, *, auto_scheduled):
    run = SimpleNamespace(auto_scheduled=auto_scheduled, expected_start_time=at("2026-11-20T02:00"))
    monkeypatch.setattr(retraining_run, "current_flow_run", lambda: run)


def test_a_night_that_is_named_is_meant(production, clock):
    assert retraining_run._date(production, "2026-11-05", clock=clock) == "2026-11-05"
    with pytest.raises(InputError, match="give its date, such as"):
        retraining_run._date(production, "last night", clock=clock)


def test_the_night_of_now_is_meant_otherwise(production, clock, monkeypatch):
    assert retraining_run._date(production, None, clock=clock) == "2026-11-21"
    started_by(monkeypatch, auto_scheduled=False)
    assert retraining_run._date(production, None, clock=clock) == "2026-11-21"


def test_a_run_of_the_schedule_that_comes_late_is_of_its_own_night(production, clock, monkeypatch):
    started_by(monkeypatch, auto_scheduled=True)
    assert retraining_run._date(production, None, clock=clock) == "2026-11-20"


@pytest.fixture
def runs(tmp_path, clock):
    database = Database(file_url(tmp_path / "nights.db"), synced=False)
    yield RetrainingRuns(database, clock=clock)
    database.close()


def ended_with(runs, key, status=RetrainingStatus.DONE, **outcomes):
    """Stores a run with the outcomes of its models."""
    models = [{"model": name, "outcome": outcome} for name, outcome in outcomes.items()]
    runs.save(replace(runs.begin("shop", key), status=status, content={"answer": {"models": models}}))


def test_a_further_round_is_for_those_that_are_asked_for(production, runs):
    assert retraining_run._names_of_round(production, [], ["b"]) is None
    ended_with(runs, "2026-11-20", a="kept", b="kept")
    rounds = runs.rounds("shop", "2026-11-20")
    names = retraining_run._names_of_round(production, rounds, ["b"])
    assert retraining_run._of_this_round(production, names).models == (Model("b"),)
    assert retraining_run._of_this_round(production, None) == production
    with pytest.raises(InputError, match="there is no model 'c' to force"):
        retraining_run._names_of_round(production, rounds, ["c"])


def test_a_round_that_is_not_over_goes_on_with_its_models(production, runs):
    ended_with(runs, "2026-11-20", a="kept", b="kept")
    for content in ({"names": ["b"], "forced": []}, {"forced": ["b"]}):
        runs.save(replace(runs.begin("shop", "2026-11-20.02"), content=content))
        force = content["forced"]
        assert retraining_run._names_of_round(production, runs.rounds("shop", "2026-11-20"), force) == ["b"]


@pytest.mark.parametrize("has_registry", [False, True])
def test_a_date_is_run_again_for_the_models_that_failed_and_those_without_a_result(production, runs, has_registry):
    entry = production.entry.model_copy(update={"registry": has_registry})
    production = replace(production, entry=entry, models=(*production.models, Model("new")), broken={"x": "its fault"})

    def left():
        return retraining_run._left_of(runs.rounds("shop", "2026-11-20"), production)

    ended_with(runs, "2026-11-20", RetrainingStatus.FAILED, a="failed", b="kept", tagged="failed", x="failed")
    assert left() == {"a", "new", "x"} | ({"tagged"} if has_registry else set())
    ended_with(runs, "2026-11-20.02", RetrainingStatus.FAILED, a="promoted", x="failed", new="kept", tagged="kept")
    assert left() == {"x"}
    ended_with(runs, "2026-11-20.03", x="kept")
    assert left() == set()
    assert retraining_run._answered(runs, production, "2026-11-20", is_forced=False).run_date == "2026-11-20.03"


def test_a_date_of_which_nothing_failed_is_not_run_again_for_a_new_model(production, runs):
    ended_with(runs, "2026-11-20", a="kept")
    assert retraining_run._left_of(runs.rounds("shop", "2026-11-20"), production) == set()


@pytest.mark.parametrize(("night", "is_refused"), [("2026-11-22", False), ("2026-11-23", True), ("2062-11-30", True)])
def test_a_date_after_that_of_the_next_start_is_refused(production, clock, night, is_refused):
    with pytest.raises(InputError, match="later than the next one, 2026-11-22") if is_refused else nullcontext():
        assert retraining_run._date(production, night, clock=clock) == night


@pytest.mark.parametrize(
    ("begun", "status"),
    [
        ("2026-11-22", RetrainingStatus.SKIPPED),
        ("2026-11-23", RetrainingStatus.AHEAD),
        ("2062-11-30.02", RetrainingStatus.AHEAD),
    ],
)
@pytest.mark.parametrize("is_forced", [False, True])
def test_a_run_that_a_wrong_clock_began_is_named_and_can_be_forgotten(
    production, clock, runs, tmp_path, monkeypatch, begun, status, is_forced
):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path))
    runs.begin("shop", begun)
    runs.begin("other", begun)
    answered = retraining_run._answered(runs, production, "2026-11-21", is_forced=is_forced)
    answer = retrain_daily._known(answered, print)
    assert (answered.status, exit_code(answer)) == (status, 1)
    if status == RetrainingStatus.AHEAD:
        assert answer["status"] == "failed"
        assert f"forget that run by `--forget {begun[:10]}`" in answer["report"]
    else:
        assert answer["status"] == "skipped"
    with pytest.raises(InputError, match=f"no retraining run 2026-11-01. To fix: name one of them; .* {begun[:10]}"):
        retraining_run.forget_run(production, "2026-11-01")
    retraining_run.forget_run(production, begun[:10])
    assert retraining_run._answered(runs, production, "2026-11-21", is_forced=is_forced) is None
    assert runs.every("other")


MODELS = """\
name: shop
models:
  - name: words
    job: {model: {architecture: LlamaForCausalLM}, num_steps: 5}
    data: {path: words.jsonl, seq_len: 8}
"""


def a_file(path, text=MODELS):
    path.parent.mkdir(exist_ok=True)
    path.with_name("words.jsonl").write_text('{"text": "a b"}\n')
    path.write_text(text)
    return load_production(path)


@pytest.mark.parametrize(
    ("path", "text", "is_refused"),
    [
        ("a/r.yaml", MODELS.replace("num_steps: 5", "num_steps: 6"), False),  # the file was changed
        ("a/copy.yaml", MODELS, False),
        ("a/other.yaml", MODELS.replace("words", "more"), True),
        ("a/other.yaml", MODELS.replace("num_steps: 5", "num_steps: 6"), True),
        ("a/other.yaml", MODELS + "    min_gain: 0.1\n", True),
        ("b/r.yaml", MODELS, True),  # its data is another file
        ("link/r.yaml", MODELS.replace("num_steps: 5", "num_steps: 6"), False),
    ],
)
def test_another_file_of_the_same_name_is_refused(runs, tmp_path, path, text, is_refused):
    first = a_file(tmp_path / "a/r.yaml")
    assert retraining_run._check_file(runs, first) is None
    runs.begin("shop", "2026-11-19")  # of an earlier release
    source = {"file": str(first.file), "file_digest": first.digest}
    runs.save(replace(runs.begin("shop", "2026-11-20"), content=source))
    runs.begin("shop", "2026-11-21")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a/more.jsonl").write_text('{"text": "a b"}\n')
    other = a_file(tmp_path / path, text)
    told = (
        f"the runs of 'shop' are of {first.file}, a file with other models or data. To fix: give {other.file} another"
    )
    with pytest.raises(InputError, match=re.escape(told)) if is_refused else nullcontext():
        retraining_run._check_file(runs, other)
    first.file.unlink()  # it was moved
    retraining_run._check_file(runs, other)


def test_a_run_that_is_skipped_is_not_complete_in_prefect():
    state = final_state(
        {"status": "skipped"}, status="skipped", message="skipped: a later one", failure=RetrainingFailed
    )
    assert (state.name, state.type) == ("Skipped", StateType.CANCELLED)
    assert state.data.result == {"status": "skipped"}


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
    runs = RetrainingRuns(database, clock=clock)
    night = RetrainingEntry(starts="02:00", deadline=deadline)
    production = replace(production, entry=ProductionEntry(name="shop", night=night))
    started_by(monkeypatch, auto_scheduled=auto_scheduled)
    if content is not None:
        runs.save(replace(runs.begin("shop", "2026-11-21"), content=content))
    answered = retraining_run._answered(runs, production, "2026-11-21", is_forced=False)
    if deadline == "02:30" and not auto_scheduled and content is None:
        assert answered.status == RetrainingStatus.LATE
        said = retrain_daily._known(answered, print)
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
    with retraining_run.open_run(production, run_date="2026-11-20", force=(), caller=Caller()) as answered:
        assert (answered.run_date, answered.status) == ("2026-11-20", status)
    database.close()
