"""Outcomes of candidate models: each is compared alone, whatever the result of another."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ringmaster.flows.retraining import compare_models
from ringmaster.flows.retraining.compare_models import CandidateVerdict
from ringmaster.flows.retraining.select_models import InspectedModel, SelectedModels
from ringmaster.tasks.evaluation.scores import CLASSIFIER, Scores
from ringmaster.tasks.retraining.drift import DriftEntry, TrainingRecord
from ringmaster.tasks.retraining.production import ProductionModel
from ringmaster.tasks.retraining.promotion import ServingVersions
from ringmaster.tasks.retraining.selection import DueDecision, DueEntry
from ringmaster.techniques import DataSpec, Job, ModelSpec
from ringmaster.techniques.scoring.scored_rows import TrainingData
from tests.unit.promotion.fakes import version
from tests.unit.promotion.test_policy import decide, measured

ACCURACIES = {"broken": np.nan, "good": 0.9}


def check(name):
    model = ModelSpec(architecture="ViTForImageClassification")
    own = Job(name=name, model=model, data=DataSpec(source="digits"), num_steps=4)
    rules = DueEntry(drift=DriftEntry(predictions="log.jsonl"))
    standing = ServingVersions(name=f"shop.{name}", champion=version(1, name=f"shop.{name}"))
    production = ProductionModel(registered_name=standing.name, job=own, rules=rules)
    return InspectedModel(model=production, serving=standing, data={}, due=DueDecision(is_due=False, why="it waits"))


@pytest.fixture
def run(monkeypatch):
    checks = {name: check(name) for name in ACCURACIES}
    content, kept = {}, {}

    def standings():
        return {
            f"shop.{name}": ServingVersions(name=f"shop.{name}", candidate=version(2, name=f"shop.{name}"))
            for name in checks
        }

    def judge(*_, **__):
        return {name: CandidateVerdict(decision=decide(measured(value, 0.8))) for name, value in ACCURACIES.items()}

    def score(folders, *, job, **_):
        probabilities = np.full((5, 2), 0.5 if job.name == "good" else np.nan)
        scores = Scores(kind=CLASSIFIER, num_rows=5, predictions=np.zeros(5, int), probabilities=probabilities)
        return SimpleNamespace(scores={"candidate": scores})

    def rivals(run, checks, candidates):
        return {name: SimpleNamespace(candidate=candidate) for name, candidate in candidates.items()}

    monkeypatch.setattr(compare_models, "_rivals", rivals)
    monkeypatch.setattr(compare_models, "judge", judge)
    monkeypatch.setattr(compare_models, "score_models", score)
    monkeypatch.setattr(compare_models, "promote_task", lambda *_, **__: None)
    trained = TrainingRecord(run_date="2026-11-20", at_s=0.0, digest="d", num_samples=5)
    monkeypatch.setattr(compare_models, "trained_of", lambda *_: trained)
    monkeypatch.setattr(compare_models, "keep_trained", lambda _, record, kept_of: kept.update({record.uri: kept_of}))
    return SimpleNamespace(
        checks=checks,
        kept=kept,
        content=content,
        save=lambda **said: content.update(said),
        standings=standings,
        device=lambda: nullcontext(None),
        download=lambda record: Path("/model"),
        production=SimpleNamespace(policy=None, broken={}),
        ledger=None,
        moves=None,
        node_context=SimpleNamespace(environment=None),
    )


def test_a_candidate_that_says_nothing_but_nan_is_kept_off_and_the_others_are_decided(run):
    verdicts = compare_models.compare_models(run, run.checks, SelectedModels(), None)
    assert [(v.model, v.outcome) for v in verdicts] == [("broken", "kept"), ("good", "promoted")]
    assert verdicts[0].why == "its accuracy is nan on 200 rows"
    assert {uri: list(kept.predictions) for uri, kept in run.kept.items()} == {
        "models:/shop.broken/2": ["prediction"],
        "models:/shop.good/2": ["prediction", "confidence"],
    }
    assert list(run.content["verdicts"]) == ["broken", "good"]


@pytest.mark.parametrize(
    ("is_whole", "has_own", "num_rows", "max_rows", "told"),
    [
        (True, True, 100, None, ""),
        (True, True, 93, None, "7 of the 100 rows"),
        (True, True, 50, 50, ""),
        (False, True, 20, None, ""),
        (False, True, 13, None, "7 of the 20 rows"),
        (False, True, 13, 13, ""),
        (False, False, 13, None, ""),
    ],
)
def test_rows_that_are_left_out_of_a_comparison_are_told(is_whole, has_own, num_rows, max_rows, told):
    data = {"num_samples": 80, "num_held_out": 20}
    trained_on = TrainingData(spec=DataSpec(source="digits"), prepared={}) if has_own else None
    job = Job(name="a", model=ModelSpec(architecture="X"), data=DataSpec(source="digits"), num_steps=1)
    model = SimpleNamespace(compares_on_all=is_whole)
    rival = SimpleNamespace(model=model, trained_on=trained_on, job=job)
    assert told in "".join(compare_models._left_out(rival, data, num_rows, max_rows=max_rows))
    assert bool(told) == bool(compare_models._left_out(rival, data, num_rows, max_rows=max_rows))


@pytest.mark.parametrize("error", [ValueError("its metric is unknown"), OSError("its file is gone")])
def test_a_candidate_that_cannot_be_evaluated_fails_alone(monkeypatch, error):
    def judged(run, rival, data, *, device):
        if rival.model.name == "broken":
            raise error
        return CandidateVerdict(notes=("judged",))

    monkeypatch.setattr(compare_models, "_verdict_of", judged)
    rivals = [SimpleNamespace(model=SimpleNamespace(name=name), data={}, fault="") for name in ("broken", "good")]
    verdicts = compare_models.judge(None, rivals, None)
    assert verdicts["broken"].fault == f"the candidate cannot be evaluated: {error}"
    assert verdicts["good"].notes == ("judged",)


@pytest.mark.parametrize("failing", ["_child_in_place_of", "_apply_verdict"])
def test_what_fails_about_one_candidate_ends_no_other(run, monkeypatch, failing):
    plain = getattr(compare_models, failing)

    def fails(run, subject, *given, **more):
        if "broken" in repr(subject):
            raise ValueError("its run is lost")
        return plain(run, subject, *given, **more)

    monkeypatch.setattr(compare_models, failing, fails)
    results = {r.model: r for r in compare_models.compare_models(run, run.checks, SelectedModels(), None)}
    assert (results["broken"].outcome, results["broken"].why) == ("failed", "its run is lost")
    assert results["good"].outcome == "promoted"
