"""A sweep from Prefect's form to the leaderboard in MLflow."""

import pytest

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed. To fix: pip install -e '.[dev]'")

from playwright.sync_api import expect

from tests.browser.mlflow_pages import expect_text, follow, picture
from tests.browser.prefect_pages import expect_drawing, open_artifact, open_form, wait_for_state

NUM_TRIALS = 3


@pytest.fixture
def form(page, prefect_url):
    """The form of a sweep."""
    return open_form(page, prefect_url, "sweep")


def test_a_sweep_is_filled_in_started_waited_for_and_read_in_mlflow(form, prefect_url):
    form.fill("Name", "rates")
    form.fill("Job", "vit", number=1)
    form.fill("From", 0.001)
    form.fill("To", 0.01)
    form.fill("Number of trials", NUM_TRIALS)
    form.choose("Policy", "none")
    run = form.start()
    wait_for_state(run, prefect_url, "Completed")

    open_artifact(run, "sweep")
    expect_drawing(run)
    expect_text(run, "is the challenger now")
    batch = follow(run, "The sweep in MLflow")
    expect(batch.get_by_role("heading", name="rates")).to_be_visible()
    assert "optimizer.lr" in picture(batch, "parallel_coordinates")
    expect_text(batch, f"Of {NUM_TRIALS} trials {NUM_TRIALS} were trained completely")

    board = follow(batch, "leaderboard")
    expect_text(board, "leaderboard.json", "held-out accuracy", "optimizer.lr")
    for number in range(NUM_TRIALS):
        expect(board.get_by_text(f"trial-{number}", exact=True).first).to_be_visible()


@pytest.mark.parametrize(
    ("label", "value", "message"),
    [
        ("Reduction factor", 1, "Failure reason: 1 is less than the minimum of 2"),
        ("Name", "two words", "Failure reason: 'two words' does not match"),
    ],
)
def test_a_wrong_value_shows_its_message_in_the_form(form, label, value, message):
    form.fill(label, value)
    form.submit()
    form.expect_fault(message)
