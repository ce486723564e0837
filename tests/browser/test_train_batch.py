"""A batch from Prefect's pages: planned only, started after approval, and with its results in MLflow."""

import re

import pytest

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed. To fix: pip install -e '.[dev]'")

from playwright.sync_api import expect

from tests.browser.mlflow_pages import expect_text, expect_version, follow
from tests.browser.prefect_pages import (
    expect_drawing,
    expect_tasks,
    open_answer,
    open_artifact,
    open_form,
    wait_for_state,
)

BATCH = """
name: pages
devices: {cpu: 1}
jobs:
  - name: digits
    model:
      architecture: ViTForImageClassification
      config: {image_size: 8, patch_size: 4, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
               num_attention_heads: 1}
    data: {source: digits}
    global_batch_size: 32
    num_steps: 5
    techniques: [single]
"""


MODEL = BATCH[BATCH.index("    model:") :].replace("num_steps: 5", "num_steps: 1000000")
LONG = "name: long\njobs:\n" + "".join(f"  - name: digits-{letter}\n{MODEL}" for letter in "abc")


@pytest.fixture
def form(page, prefect_url):
    """The form of train-batch, with a batch pasted into it."""
    form = open_form(page, prefect_url, "train-batch")
    form.say("Batch", "Pasted text")
    form.fill("Text", BATCH)
    return form


def test_a_wrong_value_shows_its_message_in_the_form(form):
    form.fill("Time to answer (seconds)", 0.5)
    form.submit()
    form.expect_fault(
        "Validation failed for field 'answer_within_s'. Failure reason: 0.5 is less than the minimum of 1"
    )


def test_a_dry_run_shows_a_gantt_chart_its_cost_and_when_it_would_end(form, prefect_url):
    form.choose("Mode", "dry-run")
    run = form.start()
    wait_for_state(run, prefect_url, "Completed")
    open_artifact(run, "dry-run")
    expect_drawing(run)
    expect_text(
        run, "Plan of pages", re.compile(r"Started now it ends at .* UTC"), "device-hours", "nothing was trained"
    )


# tests/unit/flows/test_dry_run.py holds what the page says, and the test above that it is shown.
@pytest.mark.full
def test_a_dry_run_of_a_long_batch_says_what_more_devices_would_gain(form, prefect_url):
    form.choose("Mode", "dry-run")
    form.choose("Profiles", "predict")
    form.fill("Text", LONG)
    run = form.start()
    wait_for_state(run, prefect_url, "Completed")
    open_artifact(run, "dry-run")
    expect_text(run, "What more devices would gain", re.compile("With one more device .* the last job would end"))


def test_a_person_sees_the_plan_agrees_and_finds_the_model_in_mlflow(form, prefect_url):
    form.choose("Mode", "ask")
    run = form.start()
    question = open_answer(run, prefect_url)
    expect_text(run, "Train pages?", "device-hours")
    question.switch_on("Train it")
    question.fill("Your name", "Ann")
    question.fill("Why", "it fits the evening")
    question.send()
    wait_for_state(run, prefect_url, "Completed")
    expect_tasks(run, "profile", "make plan", "execute", "evaluate", "record")
    page_of_run = run.url
    open_artifact(run, "plan")
    expect_drawing(run)
    run.goto(page_of_run)
    open_artifact(run, "mlflow")
    model = follow(run, "pages.digits version 1")
    expect_version(model, "pages.digits")


def test_a_person_who_does_not_agree_has_nothing_trained(form, prefect_url):
    form.choose("Mode", "ask")
    run = form.start()
    refusal = open_answer(run, prefect_url)
    refusal.fill("Your name", "Ann")
    refusal.send()
    wait_for_state(run, prefect_url, "Cancelled")
    expect(run.get_by_text("Ann did not agree").first).to_be_visible()
