"""Control of a batch that a command line has started, from the pages of its flow run."""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed. To fix: pip install -e '.[dev]'")

from playwright.sync_api import expect

from tests.browser.mlflow_pages import expect_text, follow
from tests.browser.prefect_pages import Form, open_answer, open_artifact, wait_for_state
from tests.browser.test_train_batch import MODEL
from tests.cluster.machines import end
from tests.cluster.waiting import until
from tests.pool_home import END_TIMEOUT_S, UP_TIMEOUT_S


@pytest.fixture
def command(home, tmp_path):
    """A `ringmaster run` that trains until it is cancelled."""
    file = tmp_path / "live.yaml"
    file.write_text(f"name: live\njobs:\n  - name: digits\n{MODEL}")
    words = [sys.executable, "-m", "ringmaster.flows.entry", "run", str(file), "--json"]
    with (tmp_path / "run.log").open("wb") as log:
        process = subprocess.Popen(words, cwd=home.folder, env=home.environment, stdout=subprocess.PIPE, stderr=log)
    yield process
    if process.poll() is None:
        end(process)


def run_of(home, url, name):
    """Waits for a flow run whose name begins so; returns it."""

    def poll():
        _, runs = home.ask(f"{url}/api/flow_runs/filter", body={"flow_runs": {"name": {"like_": name}}})
        return next((run for run in runs if run["name"].startswith(name)), None)

    return until(f"{name} has a flow run", poll, seconds=UP_TIMEOUT_S)


@pytest.mark.full
def test_a_clone_is_priced_agreed_to_and_trained_and_then_the_batch_is_cancelled(page, prefect_url, home, command):
    run_of(home, prefect_url, "digits ")  # its first segment
    page.goto(f"{prefect_url}/runs/flow-run/{run_of(home, prefect_url, 'train live')['id']}")
    forms = open_artifact(page, "control")

    form = Form(follow(forms, "clone"))
    form.fill("What differs", json.dumps({"optimizer.lr": 0.01, "num_steps": 100}))
    run = form.start()
    question = open_answer(run, prefect_url, state="Paused")
    expect_text(run, "Start this clone?", "a clone of digits from its first step", "it ends in")
    question.switch_on("Start the clone")
    question.send()
    wait_for_state(run, prefect_url, "Completed")
    run_of(home, prefect_url, "digits-clone1 ")
    open_artifact(run, "answer")
    expect(follow(run, re.compile("the page of")).get_by_text("train live").first).to_be_visible()

    cancel = Form(follow(forms, "cancel")).start()
    wait_for_state(cancel, prefect_url, "Completed")
    output, _ = command.communicate(timeout=END_TIMEOUT_S)
    assert command.returncode == 1
    statuses = {job["name"]: job["status"] for job in json.loads(output)["jobs"]}
    assert statuses.keys() == {"digits", "digits-clone1"}
    assert statuses["digits"] == "cancelled"
