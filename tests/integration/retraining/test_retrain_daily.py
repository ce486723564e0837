"""Daily retraining: which models are due, which are trained, and which version is the champion afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Four retraining runs, each in a process that imports torch: one minute alone, longer on busy cores.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nights")
    environment = {**os.environ, "RINGMASTER_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "tests.integration.retraining.runs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1480)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answers.json").read_text())


def models(answer):
    return {model["model"]: model for model in answer["models"]}


def test_the_first_night_trains_and_promotes_every_model(nights):
    answer = nights["first"]
    assert answer["status"] == "done"
    assert {m["outcome"] for m in answer["models"]} == {"promoted"}
    assert {m["why_due"] for m in answer["models"]} == {"it has no champion yet"}
    assert answer["aliases"] == {name: {"champion": 1, "challenger": 1} for name in ("writer", "guarded")}
    assert {kind for kind, _, _ in answer["versions"].values()} == {"pretrained"}


def test_the_same_data_again_trains_nothing(nights):
    answer = nights["again"]
    assert (answer["status"], answer["batch"]) == ("done", None)
    assert answer["versions"] == nights["first"]["versions"]
    writer = models(answer)["writer"]
    assert (writer["outcome"], writer["why_due"]) == ("unchanged", "no new data since the champion was trained")


def test_what_a_night_trained_before_it_was_cut_short_is_compared_in_the_next_one(nights):
    guarded = models(nights["again"])["guarded"]
    assert guarded["why_due"] == "version 1 was trained on this data, and is to be compared yet"
    assert (guarded["is_due"], guarded["outcome"]) == (False, "promoted")
    assert nights["again"]["aliases"] == nights["first"]["aliases"]


def test_an_evaluation_measures_what_training_measured_at_its_end(nights):
    answer = nights["first"]
    (trained,) = [job["metrics"]["loss"] for job in answer["batch"]["jobs"] if job["name"] == "writer"]
    assert models(answer)["writer"]["candidate_value"] == pytest.approx(trained, rel=1e-5)


def test_new_data_trains_from_the_champion_and_promotes_what_is_better(nights):
    answer = nights["new data, and poisoned data"]
    writer = models(answer)["writer"]
    assert writer["outcome"] == "promoted"
    assert writer["why_due"].startswith("new data: ")
    assert writer["candidate_value"] < writer["champion_value"]
    assert answer["aliases"]["writer"] == {"champion": 2, "previous": 1, "challenger": 2}
    kind, parents, _ = answer["versions"]["shop.writer/2"]
    assert (kind, parents) == ("fine-tuned", [answer["versions"]["shop.writer/1"][2]])


def test_a_poisoned_night_keeps_the_champion(nights):
    answer = nights["new data, and poisoned data"]
    guarded = models(answer)["guarded"]
    assert (guarded["is_due"], guarded["outcome"]) == (True, "kept")
    assert guarded["candidate_value"] > guarded["champion_value"]
    assert answer["aliases"]["guarded"] == {"champion": 1, "challenger": 2}
    assert answer["status"] == "done"


def test_a_failed_training_and_broken_data_keep_their_champions_and_say_so(nights):
    answer = nights["a failing job, and broken data"]
    assert answer["status"] == "failed"
    writer, broken = models(answer)["writer"], models(answer)["broken"]
    assert (writer["outcome"], broken["outcome"]) == ("failed", "failed")
    assert "the loss became" in writer["why"]
    assert "day1.jsonl, line 1 is not valid JSON" in broken["why"]
    assert answer["aliases"] == nights["new data, and poisoned data"]["aliases"]


def test_data_that_brought_nothing_is_not_trained_on_twice(nights):
    answer = nights["a failing job, and broken data"]
    guarded = models(answer)["guarded"]
    assert guarded["why_due"] == "no new data since version 2 was trained, which was not promoted"
    assert guarded["outcome"] == "unchanged"
    assert [job["name"] for job in answer["batch"]["jobs"]] == ["writer"]


def test_each_night_writes_a_report(nights):
    assert "**2 of 2 models were due; 2 promoted.**" in nights["first"]["report"]
    assert "**0 of 2 models were due; 1 promoted.**" in nights["again"]["report"]
    assert "**2 of 2 models were due; 1 promoted, 1 kept.**" in nights["new data, and poisoned data"]["report"]
    assert "**1 of 3 models were due; 2 failed.**" in nights["a failing job, and broken data"]["report"]
