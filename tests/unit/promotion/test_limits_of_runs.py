"""Retraining runs measure what their policy limits: without that, every candidate would be refused as unknown."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from ringmaster.flows.retraining import compare_models
from ringmaster.flows.retraining.compare_models import ComparedCandidate, judge
from ringmaster.tasks.evaluation.examination import ExaminationResult, SliceMetric
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment
from ringmaster.tasks.retraining.policy import PromotionPolicy
from ringmaster.tasks.retraining.production import ProductionModel
from ringmaster.techniques import DataSpec, EvaluationSpec, Job, ModelSpec
from tests.unit.promotion.fakes import version

P99 = "latency/p99_s"
POLICY = PromotionPolicy(name="quick", significance=None, limits={P99: (0.0, 0.02)})
LOSS = EvaluationSpec(metrics=("loss",))
JOB = Job(name="prices", model=ModelSpec(), data=DataSpec(source="digits"), num_steps=1, evaluation=LOSS)


def test_a_run_measures_the_metrics_that_its_policy_limits(monkeypatch):
    def examine_task(name, folder, request):
        lines = [
            SliceMetric(metric=each, slice="all", num_rows=9, value=0.01, low=0.0, high=0.02, level=0.95)
            for each in request.metrics
        ]
        return ExaminationResult(num_rows=9, measured=tuple(lines))

    monkeypatch.setattr(compare_models, "examine_task", examine_task)
    monkeypatch.setattr(ExaminationResult, "record", lambda *_, **__: None)
    candidate = ComparedCandidate(
        model=ProductionModel(registered_name="shop.prices", job=JOB),
        job=JOB,
        data={"num_samples": 9, "num_held_out": 9},
        candidate=version(1),
        candidate_dir=Path(),
        champion_dir=None,
    )
    node_context = SimpleNamespace(environment=GangEnvironment(server=None, devices=(), cache_dir=Path()))

    caller = SimpleNamespace(view=SimpleNamespace(notice=lambda _: None))

    def decide(policy):
        run = SimpleNamespace(
            production=SimpleNamespace(policy=policy), node_context=node_context, ledger=None, caller=caller
        )
        return judge(run, [candidate], device=None)["prices"].decision

    decision = decide(POLICY)
    assert decision.promote and decision.figures == {P99: 0.02}
    assert not decide(replace(POLICY, limits={P99: (0.0, 0.019)})).promote
