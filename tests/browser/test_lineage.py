"""Navigation from a production model to all its ancestors in MLflow's own pages, by clicks alone."""

import json

import pytest

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed. To fix: pip install -e '.[dev]'")

from playwright.sync_api import expect

from tests.browser.mlflow_pages import (
    expect_text,
    expect_version,
    follow,
    open_production_model,
    open_registry,
    picture,
)

SIZES = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 16}
MODEL = {
    "architecture": "ViTForImageClassification",
    "config": {**SIZES, "num_hidden_layers": 1, "num_attention_heads": 1},
}
COMMON = {
    "model": MODEL,
    "data": {"source": "digits"},
    "global_batch_size": 8,
    "num_steps": 5,
    "techniques": ["single"],
    "num_devices": [1],
}
JOBS = [
    {"name": "base", **COMMON},
    {"name": "reviews", "base": "base", **COMMON},
    {"name": "letters", "base": "base", **COMMON},
]


@pytest.fixture(scope="module")
def family(home, tmp_path_factory):
    """A base and two fine-tunes of it, trained and registered; one of them is in production."""
    file = tmp_path_factory.mktemp("family") / "family.json"
    file.write_text(json.dumps({"name": "family", "jobs": JOBS}))
    done = home.ringmaster("run", str(file), "--json")
    assert done.returncode == 0, done.stderr
    url = home.address().mlflow_uri
    alias = {"name": "family.reviews", "alias": "champion", "version": "1"}
    status, _ = home.ask(f"{url}/api/2.0/mlflow/registered-models/alias", body=alias)
    assert status == 200
    return url


@pytest.fixture
def production(page, family):
    """The page of the production model, reached from the list of models."""
    return open_production_model(open_registry(page, family), "family.reviews")


def test_a_production_model_leads_to_its_base_and_from_there_to_its_siblings(production):
    expect_text(production, "fine-tuned from")
    base = follow(production, "family.base version 1")
    expect_version(base, "family.base")
    expect_text(base, "trained from scratch", "Adapted further into")
    sibling = follow(base, "family.letters version 1")
    expect_version(sibling, "family.letters")
    back = follow(follow(sibling, "family.base version 1"), "family.reviews version 1")
    expect_version(back, "family.reviews")
    expect_text(back, "@ champion")


def test_a_production_model_leads_to_its_data(production):
    expect_text(production, "data for training", "data for evaluation")
    data = follow(production, "digits")
    expect(data.get_by_role("heading", name="reviews")).to_be_visible()
    expect_text(data, "data.json", "digest", "digits")


def test_a_production_model_leads_to_its_run_its_batch_and_its_files(production):
    run = follow(production, "reviews", number=-1)
    expect(run.get_by_role("heading", name="reviews")).to_be_visible()
    expect_text(run, "Made", "Held-out")
    batch = follow(production, "family")
    expect(batch.get_by_role("heading", name="family")).to_be_visible()
    expect_text(batch, "Child runs", "letters")


@pytest.mark.parametrize("name", ["family.reviews", "family.base"])
def test_a_models_page_shows_its_family(production, name):
    page = production if name == "family.reviews" else follow(production, f"{name} version 1")
    drawn = picture(page, "lineage/")
    assert all(relative in drawn for relative in ("family.base v1", "family.reviews v1", "family.letters v1"))
