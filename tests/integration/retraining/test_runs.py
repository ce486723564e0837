"""Retraining runs that are late, repeated, interrupted, or affected by deletions and limits, as in `run_cases`."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ringmaster.flows.commands.running import exit_code

ROOT = Path(__file__).parents[3]
# About twenty retraining runs in one process that imports torch once: two minutes alone, longer on busy cores.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    environment = {**os.environ, "RINGMASTER_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "tests.integration.retraining.run_cases", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1780, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answers.json").read_text())


def row(answer, name="a"):
    return next(model for model in answer["models"] if model["model"] == name)


def test_a_night_that_is_over_trains_nothing_again(cases):
    first, again = cases["twice"]["first"], cases["twice"]["again"]
    assert again["was_over"]
    assert (again["models"], again["versions"]) == (first["models"], first["versions"])


def test_who_is_asked_for_is_trained_in_a_further_round(cases):
    forced = cases["twice"]["forced"]
    assert (forced["night"], row(forced)["why_due"]) == ("2026-11-01.02", "it was requested (forced)")
    assert list(forced["versions"]) == ["twice.a/1", "twice.a/2"]
    assert "there is no model 'b' to force. To fix: use one of a" in cases["twice"]["unknown"]
    assert "'yesterday' is not a date of a run" in cases["twice"]["no date"]


def test_a_night_that_a_later_one_has_overtaken_is_passed_over(cases):
    later, overtaken = cases["twice"]["later"], cases["twice"]["overtaken"]
    assert later["missed"] == 1
    assert (overtaken["models"], overtaken["versions"]) == ([], later["versions"])
    assert "2026-11-03 was begun already" in overtaken["report"]


def test_a_night_that_was_cut_short_goes_on_with_what_it_saw(cases):
    on = cases["cut_short"]["on"]
    assert row(on)["outcome"] == "promoted"
    assert list(on["versions"]) == ["cut.a/1"]


def test_what_was_trained_and_not_saved_is_not_trained_again(cases):
    again = cases["cut_short"]["on again"]
    assert row(again)["why_due"].startswith("new data")
    assert row(again)["outcome"] in ("promoted", "kept")
    assert list(again["versions"]) == ["cut.a/1", "cut.a/2"]
    assert again["batch"] is None
    assert "The run was interrupted after its training, which is not in this cost." in again["report"]


def test_the_best_of_a_sweep_is_found_by_whoever_goes_on(cases):
    cut, whole = cases["cut_sweep"], cases["swept"]
    assert cut["batch"] is None
    assert cut["champion"] == whole["champion"]
    assert (row(cut)["outcome"], row(cut)["candidate_version"]) == ("promoted", cut["champion"][0])


def test_data_that_comes_half_way_is_tomorrows(cases):
    first, following = cases["half_way"]["first"], cases["half_way"]["next"]
    assert row(first)["outcome"] == "promoted"
    assert row(following)["why_due"].startswith("new data")
    assert following["num_trials"] == 0


def test_what_was_deleted_is_not_brought_back_unasked(cases):
    second, third, forced = (cases["deleted"][name] for name in ("second", "third", "forced"))
    for answer in (second, third):
        assert not row(answer)["is_due"]
        assert "was deleted from the registry" in row(answer)["why_due"]
    assert row(forced)["outcome"] == "promoted"
    assert not row(forced, "b")["is_due"]
    assert [model["model"] for model in cases["deleted"]["out of the file"]["models"]] == ["a"]


def test_what_is_deleted_while_the_night_runs_fails_alone(cases):
    second = cases["deleted"]["second"]
    assert (row(second, "b")["outcome"], second["status"]) == ("failed", "failed")
    assert "was deleted from the registry during the retraining run" in row(second, "b")["why"]


def test_a_night_that_begins_after_its_deadline_leaves_all_for_tomorrow(cases):
    late, early = cases["short"]["late"], cases["short"]["early"]
    assert (late["night"], late["num_trials"], late["batch"]) == ("2026-11-01", 0, None)
    assert row(late)["outcome"] == "left"
    assert "was over at 2026-11-01 06:00 UTC" in row(late)["why"]
    assert (early["night"], row(early)["outcome"], early["missed"]) == ("2026-11-03", "promoted", 1)


def test_a_run_by_hand_after_its_deadline_fails_and_says_how_to_go_on(cases):
    late = cases["short"]["by hand"]
    assert (late["status"], late["models"], late["batch"]) == ("failed", [], None)
    assert "has passed. To fix: begin the next run now, by `--night 2026-11-02`" in late["report"]


def test_what_costs_too_much_is_left_for_tomorrow(cases):
    poor = cases["short"]["poor"]
    assert row(poor)["outcome"] == "left"
    assert "of 1e-09 device-hours" in row(poor)["why"]
    assert poor["status"] == "done"
    assert "the environment has no NOWHERE" in poor["faults"][0]


def test_with_a_budget_that_is_enough_the_cheapest_plan_is_followed(cases):
    rich = cases["short"]["rich"]
    assert row(rich)["outcome"] in ("promoted", "kept")
    assert (rich["batch"]["objective"], rich["unit"]) == ("cost", "at 3 a device-hour")
    assert 0 < rich["cost"] < 1000
    assert "of 1000 at 3 a device-hour." in rich["report"]


def test_reports_are_posted_until_they_are_taken(cases):
    first, again, second = cases["short"]["got"]
    assert first == again
    assert first["text"].startswith("Retraining of short, 2026-11-01: 1 of 1 models were due; 1 left for the next run.")
    assert (second["night"], second["models"][0]["outcome"]) == ("2026-11-03", "promoted")
    assert cases["short"]["late"]["faults"] == []


def test_one_night_at_a_time(cases):
    assert "the run 2026-11-01 of held is in progress in process" in cases["held"]["refused"]


def test_the_best_of_a_sweep_is_compared_under_its_models_name(cases):
    swept = cases["swept"]
    losses = {job["name"]: job["metrics"]["loss"] for job in swept["rows"] if job["name"].startswith("a")}
    version, job = swept["champion"]
    assert len(losses) == 3
    assert job == min(losses, key=losses.get) != "a"
    assert (row(swept)["outcome"], row(swept)["candidate_version"]) == ("promoted", version)


def test_tagged_models_of_the_registry_belong_to_the_night(cases):
    swept = cases["swept"]
    assert row(swept, "tagged")["outcome"] == "promoted"
    assert row(swept, "wrong")["outcome"] == "failed"
    assert "its tag ringmaster.retraining is wrong" in row(swept, "wrong")["why"]
    assert {model["model"] for model in swept["models"]} == {"a", "tagged", "wrong"}


def test_inputs_are_compared_with_what_the_champion_was_trained_on(cases):
    steady, drifted = row(cases["watched"]["steady"]), row(cases["watched"]["drifted"])
    assert not steady["is_due"]
    assert "no drift (" in steady["why_due"]
    assert "every assertion holds" in steady["why_due"]
    assert drifted["is_due"]
    assert "token has drifted: PSI" in drifted["why_due"]
    assert "assertion sane: 1 of 1 rows fail" in drifted["why_due"]


@pytest.mark.skipif(find_spec("torchao") is None, reason="the extra torchao is not installed")
def test_a_candidate_that_is_too_slow_gives_way_to_its_quantized_child(cases):
    first, idle, second = (cases["shrunk"][name] for name in ("first", "idle", "second"))
    assert [(row(first)[key]) for key in ("outcome", "candidate_version")] == ["promoted", 2]
    assert "shrunk.a/1 breaks a limit" in row(first)["why"]
    assert row(idle)["why_due"] == "no new data since the champion was trained"
    assert row(second)["why_due"].startswith("new data")
    assert [(row(second)[key]) for key in ("outcome", "candidate_version")] == ["promoted", 4]
    assert cases["shrunk"]["started"] == [1, "pretrained"], "a quantized champion cannot be trained on"
    assert "shrink: has no limit to keep" in cases["shrunk"]["refused"]


def test_seven_nights_go_by_as_they_are_expected(tmp_path):
    environment = {**os.environ, "RINGMASTER_HOME": str(tmp_path)}
    command = [sys.executable, "examples/seven_nights/run.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1780, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "NOT as expected" not in done.stdout


def test_the_faults_of_one_model_end_no_other(cases):
    apart = cases["apart"]
    outcomes = {model["model"]: model["outcome"] for model in apart["models"]}
    assert outcomes == {"a": "promoted", "b": "failed", "lost": "failed"}
    assert "does not fit LlamaForCausalLM" in row(apart, "b")["why"]
    assert "retraining.yaml:13: models[2].data.path: 'lost/*.jsonl' matches no file" in row(apart, "lost")["why"]
    (alarm,) = apart["alarms"]
    assert alarm.startswith("retraining of apart, 2026-11-02: failed: b (")
    assert (apart["status"], exit_code(apart)) == ("failed", 1)


def test_the_models_that_failed_are_trained_when_the_date_is_run_again(cases):
    again, over = cases["apart"]["again"], cases["apart"]["over"]
    assert (again["night"], again["status"]) == ("2026-11-02.02", "done")
    assert {model["model"]: model["outcome"] for model in again["models"]} == {"b": "promoted", "lost": "promoted"}
    assert over["was_over"] and over["models"] == again["models"]


def test_a_date_that_is_far_ahead_is_refused(cases):
    assert "later than the next one, 2026-11-04, by this machine's clock" in cases["twice"]["too late a date"]


def test_what_a_batch_of_the_same_name_has_made_is_not_promoted(cases):
    alike = cases["alike"]
    assert list(alike["versions"]) == ["alike.a/1", "alike.a.b/1", "alike.a/2"]
    assert (row(alike)["outcome"], alike["champion"][0]) == ("unchanged", 1)
    assert "version 2 was made neither by retraining nor as a challenger" in row(alike)["notes"][0]
    assert "is that of job b of batch alike.a, and of job a.b of batch alike, which has made" in alike["refused"]


def test_by_value_new_rows_are_trained_on_only_where_that_pays(cases):
    first, *idle, changed = cases["by_value"]["runs"]
    assert row(first)["why_due"] == "it has no champion yet"
    assert [row(each)["outcome"] for each in idle] == ["unchanged", "unchanged"]
    assert all(row(each)["why_due"].startswith("waiting costs ") for each in idle)
    assert row(changed)["is_due"]
    assert "a day on" in row(changed)["why_due"]
    assert cases["by_value"]["champion"][0] == 2
    assert cases["by_value"]["drawing"].count("<circle") == 4  # three runs measured a champion; one is in the legend
