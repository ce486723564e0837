"""The engine of this machine: gangs that other threads stop and kill."""

import threading

import pytest

from ringmaster.tasks.execution.engine import EngineContext, LocalEngine, SegmentCall
from ringmaster.techniques.processes.gang_events import Steps
from ringmaster.techniques.processes.reporter import STOP, until_command
from tests.integration.workbench import SINGLE, Layout

ENDLESS = 1_000_000


def segment(number, order, layout, on_event=lambda event: None):
    return SegmentCall(
        label="a segment",
        order=order,
        num_ranks=layout.num_devices,
        on_event=on_event,
        number=number,
        job="a",
        batch="",
        devices=(),
    )


@pytest.mark.parametrize("layout", [SINGLE, Layout("ddp", 2)], ids=str)
def test_a_gang_that_is_stopped_before_it_starts_checkpoints_its_first_step(bench, tmp_path, layout):
    engine, job = LocalEngine(EngineContext(folder=tmp_path, launcher=bench.server)), bench.job(num_steps=ENDLESS)
    engine.send(1, STOP)
    outcome = engine.start(segment(1, bench.order(job, layout, tmp_path / "gang"), layout)).result()
    assert (outcome.status, outcome.result.step) == ("preempted", 1)


@pytest.mark.parametrize("layout", [SINGLE, Layout("ddp", 2)], ids=str)
def test_a_gang_goes_on_as_far_as_it_is_told_and_stops_when_it_is_told(bench, tmp_path, layout):
    engine, job = LocalEngine(EngineContext(folder=tmp_path, launcher=bench.server)), bench.job(num_steps=ENDLESS)
    order = bench.order(job, layout, tmp_path / "gang", last_step=5)
    last_steps = []

    def on_event(event):
        if isinstance(event, Steps):
            last_steps.append(event.first_step + len(event.losses))
            if last_steps[-1] > 20:
                engine.send(1, STOP)

    engine.send(1, until_command(7))  # before the gang is started
    engine.send(1, until_command(ENDLESS))
    outcome = engine.start(segment(1, order, layout, on_event)).result()
    assert outcome.status == "preempted"
    assert 20 < outcome.result.step < ENDLESS
    assert last_steps[-1] == outcome.result.step


def test_closing_ends_gangs_side_by_side(bench, tmp_path):
    engine, job = LocalEngine(EngineContext(folder=tmp_path, launcher=bench.server)), bench.job(num_steps=ENDLESS)
    trains = threading.Event()

    def on_event(event):
        if isinstance(event, Steps):
            trains.set()

    orders = [bench.order(job, SINGLE, tmp_path / name) for name in ("first", "second")]
    calls = [segment(1, orders[0], SINGLE), segment(2, orders[1], SINGLE, on_event)]
    futures = [engine.start(call) for call in calls]
    assert trains.wait(120)
    engine.close()
    outcomes = [future.result() for future in futures]
    assert [outcome.status for outcome in outcomes] == ["crashed", "crashed"]
    assert all("was killed by SIGKILL" in outcome.message for outcome in outcomes)


def test_what_cannot_be_started_is_reported_to_the_caller(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("ringmaster.tasks.execution.engine.Gang", lambda *_, **__: 1 / 0)
    order = bench.order(bench.job(num_steps=1), SINGLE, tmp_path / "gang")
    with pytest.raises(ZeroDivisionError):
        LocalEngine(EngineContext(folder=tmp_path, launcher=bench.server)).start(segment(1, order, SINGLE)).result()
