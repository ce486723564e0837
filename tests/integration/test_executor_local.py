"""The local runner: gangs of this machine, stopped and killed from other threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks.execution.local import LocalRunner
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
