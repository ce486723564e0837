"""The live page of a run on this machine: what is on the screen equals what `ringmaster watch --json` says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed. To fix: pip install -e '.[dev]'")

from playwright.sync_api import expect

from tests.cluster.machines import end
from tests.cluster.waiting import until
from tests.pool_home import FOREIGN, UP_TIMEOUT_S

JOB = """
  - name: digits-{name}
    model:
      architecture: ViTForImageClassification
      config: {{patch_size: 2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}}
    data: {{source: digits}}
    global_batch_size: 8
    num_steps: {num_steps}
    num_devices: [1]
    evaluation: {{metrics: [accuracy]}}
"""
COMMAND = (sys.executable, "-m", "ringmaster.flows.entry")


@pytest.fixture
def run(tmp_path):
    """A run with a page, of a job that ends soon and one that has to be cancelled: (process, environment, log)."""
    jobs = JOB.format(name="short", num_steps=30), JOB.format(name="endless", num_steps=1_000_000)
    file = tmp_path / "pages.yaml"
    file.write_text(f"name: pages\njobs:{''.join(jobs)}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environment["RINGMASTER_HOME"] = str(tmp_path / "home")
    log = tmp_path / "run.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*COMMAND, "run", str(file), "--page", "--json"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=stream,
        )
    yield process, environment, log
    end(process)


def watched(environment):
    """What `ringmaster watch` prints of the batch, as JSON."""
    command = [*COMMAND, "watch", "pages", "--once", "--json"]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


def table(page):
    """The cells of the table of jobs: by job, by column."""
    columns = page.locator("#table thead tr > *").all_inner_texts()
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#table tbody tr").all()]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}


def test_the_page_shows_a_run_clones_a_job_and_cancels_the_rest(chromium, run, request, tmp_path):
    process, environment, log = run
    told = until("the page has an address", lambda: re.search(r"(http\S+), user (\w+), .*`cat (.+)`", log.read_text()))
    url, username, password = told[1], told[2], Path(told[3]).read_text()
    faults = []
    with chromium.context(http_credentials={"username": username, "password": password}) as context:
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        until("the page is served", lambda: _opened(page, url), seconds=UP_TIMEOUT_S)
        expect(page.get_by_role("row", name="digits-short")).to_contain_text("done")
        expect(page.get_by_role("row", name="digits-endless")).to_contain_text("running")

        # sorted by the keyboard, and filtered
        page.get_by_role("button", name="job", exact=True).focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("columnheader", name="job")).to_have_attribute("aria-sort", "ascending")
        assert [*table(page)] == ["digits-endless", "digits-short"]
        page.keyboard.press("Enter")
        assert [*table(page)] == ["digits-short", "digits-endless"]
        page.get_by_role("searchbox", name="filter").fill("endless")
        expect(page.locator("#shown")).to_have_text("1 of 2")
        page.get_by_role("searchbox", name="filter").fill("")

        # a clone, whose price is shown first
        page.get_by_role("button", name="change digits-endless").click()
        page.get_by_role("button", name="clone").click()
        page.get_by_label("What differs").fill("optimizer.lr=1e-4\nnum_steps=20")
        page.get_by_role("button", name="show what it costs").click()
        expect(page.get_by_role("status").filter(has_text="digits-endless-clone1: a clone of")).to_be_visible()
        page.get_by_role("button", name="start it").click()
        page.keyboard.press("Escape")
        expect(page.get_by_role("row", name="digits-endless-clone1")).to_be_visible()
        expect(page.get_by_role("log")).to_contain_text("digits-endless-clone1: a clone of digits-endless")

        page.get_by_role("button", name="change these jobs").click()
        page.get_by_role("button", name="cancel").click()
        page.locator("form").get_by_role("button", name="cancel").click()
        expect(page.get_by_role("status").filter(has_text="cancelled: digits-endless")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator('tr[data-job="digits-endless"]')).to_contain_text("cancelled")
        process.wait(timeout=UP_TIMEOUT_S)
        expect(page.locator("#connection")).to_have_text("ended")  # after what has happened last was sent

        said, shown = watched(environment), page.evaluate("page.state.timeline")
        assert {**said, "now_s": 0} == {**shown, "now_s": 0}
        rows = table(page)
        assert rows.keys() == {job["name"] for job in said["jobs"]}
        for job in said["jobs"]:
            row = rows[job["name"]]
            assert (row["status"], row["progress"]) == (job["status"], f"{job['step']}/{job['num_steps']}")
        curve = page.evaluate("page.curves.curves['train/loss']['digits-short']")
        assert curve["step"] == [*range(1, 31)]
        assert float(rows["digits-short"]["loss"]) == pytest.approx(curve["value"][-1], rel=1e-3)
        assert page.locator("#plan svg rect.past").count() == len(said["past"])
        assert page.locator("#curves canvas").count() == 1
        (tmp_path / "page.png").write_bytes(page.screenshot(full_page=True))
    assert faults == []


def _opened(page, url):
    from playwright.sync_api import Error

    try:
        return page.goto(url).status == 200
    except Error:  # it does not listen yet
        return False
