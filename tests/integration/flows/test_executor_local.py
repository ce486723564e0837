"""The local runner: gangs on this machine that other threads stop and kill."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from ringmaster.tasks.execution.local.runner import LocalRunner
from ringmaster.techniques.runtime.processes.reporter import STOP, until
from tests.integration.workbench import SINGLE, Layout

ENDLESS = 1_000_000


@pytest.mark.parametrize("layout", [SINGLE, Layout("ddp", 2)], ids=str)
def test_stopping_all_checkpoints_what_runs_and_what_is_still_to_come(bench, tmp_path, layout):
    runner, job = LocalRunner(bench.server), bench.job(num_steps=ENDLESS)

    def run(name, on_event):
        order = bench.order(job, layout, tmp_path / name)
        return runner.run(order, num_ranks=layout.num_devices, on_event=on_event)

    running = run("running", lambda event: runner.stop_all() if event["event"] == "steps" else None)
    late = run("late", lambda _: None)
    for outcome in (running, late):
        assert outcome.status == "preempted"
        assert 0 < outcome.result["step"] < ENDLESS
    assert late.result["step"] == 1


@pytest.mark.parametrize("layout", [SINGLE, Layout("ddp", 2)], ids=str)
def test_a_gang_goes_on_as_far_as_it_is_told_and_stops_when_it_is_told(bench, tmp_path, layout):
    runner, job = LocalRunner(bench.server), bench.job(num_steps=ENDLESS)
    order = bench.order(job, layout, tmp_path / "gang", last_step=5)
    last_steps = []

    def on_event(event):
        if event["event"] == "steps":
            last_steps.append(event["first_step"] + len(event["losses"]))
            if last_steps[-1] > 20:
                runner.steer(order.folder, STOP)

    runner.steer(order.folder, until(7))  # before the gang is started
    runner.steer(order.folder, until(ENDLESS))
    outcome = runner.run(order, num_ranks=layout.num_devices, on_event=on_event)
    assert outcome.status == "preempted"
    assert 20 < outcome.result["step"] < ENDLESS
    assert last_steps[-1] == outcome.result["step"]


def test_killing_all_ends_gangs_side_by_side(bench, tmp_path):
    runner, job = LocalRunner(bench.server), bench.job(num_steps=ENDLESS)

    def run(name):
        def on_event(event):
            if event["event"] == "steps" and name == "second":
                runner.kill_all()

        return runner.run(bench.order(job, SINGLE, tmp_path / name), num_ranks=1, on_event=on_event)

    with ThreadPoolExecutor() as pool:
        outcomes = list(pool.map(run, ["first", "second"]))
    assert [outcome.status for outcome in outcomes] == ["crashed", "crashed"]
    assert all("was killed by SIGKILL" in outcome.message for outcome in outcomes)
