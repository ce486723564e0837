"""Mutated files of every kind: their readers return a value or report faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ringmaster.errors import BatchFileError, InputError
from ringmaster.flows.commands.planning import read_plan, read_problem
from ringmaster.flows.retraining.examine import data_spec
from ringmaster.flows.sweep_form import load_sweep, spec_of
from ringmaster.tasks.batch import Batch, load_batch
from ringmaster.tasks.evaluation.suite import load_suite
from ringmaster.tasks.planning import Problem, certified_bound, solve, verify
from ringmaster.tasks.retraining.policy import load_policy
from ringmaster.tasks.retraining.production import load_production
from tests.mutations import assert_answered

NUM_IN_ALL = 10_000

MODEL = {"from_pretrained": "gpt2", "config": {"hidden_size": 8}}
JOB = {
    "model": MODEL,
    "data": {"source": "python-stdlib", "seq_len": 64},
    "optimizer": {"name": "sgd", "lr": 0.1, "options": {"momentum": 0.9}},
    "schedule": {"name": "cosine", "warmup_steps": 3},
    "evaluation": {"every_steps": 3, "metrics": ["loss"]},
    "num_steps": 16,
}
BATCH = {
    "name": "n",
    "objective": "weighted",
    "price_per_device_hour": 0.5,
    "devices": {"cpu": 2},
    "datasets": {
        "verses": {
            "versions": {"1": {"path": "words.jsonl"}, "2": {"splits": {"train": "words.jsonl", "test": "more.jsonl"}}},
            "columns": {"text": "text"},
            "held_out_split": "test",
        }
    },
    "jobs": [
        {"name": "a", "base": "b", **JOB, "techniques": ["single"], "num_devices": [1], "deadline_s": 60, "weight": 2},
        {"name": "b", "model": MODEL, "data": {"source": "digits"}, "num_steps": 9, "adapter": None},
        {"name": "c", "model": MODEL, "data": {"name": "verses", "version": 2, "seq_len": 8}, "num_steps": 2},
        {
            "name": "d",
            "model": MODEL,
            "data": {"path": "*.jsonl", "window": {"last_rows": 10}, "tokenizer": "gpt2", "seq_len": 8},
            "adapter": {"kind": "lora", "rank": 4, "targets": ["c_attn"]},
            "num_steps": 2,
            "components": {"tower": "h.0"},
        },
        {
            "name": "e",
            "model": MODEL,
            "data": {"source": "digits"},
            "adaptation": {"kind": "merged", "method": "average", "parents": ["b", "models:/x@y"], "weights": [1, 2]},
        },
        {"name": "f", "model": {"command": ["true"], "configs": [{}]}, "data": {"source": "command"}, "num_steps": 2},
    ],
    "grid": [
        {
            "template": {"name": "g", "model": MODEL, "data": {"source": "digits"}, "num_steps": 1},
            "over": {"optimizer.lr": [0.1, 0.2], "seed": [0, 1]},
        }
    ],
}  # fmt: skip
SWEEP = {
    "name": "rates",
    "template": {"job": JOB},
    "space": {
        "optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True},
        "schedule.warmup_steps": {"low": 1, "high": 5, "step": 2, "integer": True},
        "optimizer.options.weight_decay": [0.0, 0.1],
        "clip_grad_norm": "0.5, 1.0",
    },
    "sampler": "random",
    "num_trials": 4,
    "early_stopping": {"policy": "asha", "min_steps": 4, "reduction_factor": 4},
    "objective": "loss",
    "data": {"source": "python-stdlib", "seq_len": 32},
    "devices": {"cpu": 2},
    "deadline_s": 3600,
    "challenger_of": "production.model",
    "num_parallel": 2,
    "seed": 1,
}
SWEEP_OF_FILE = {
    "template": {"path": "batch.json", "job": "b"},
    "over": {"optimizer.lr": [0.1, 0.2]},
    "objective": None,
}
SUITE = {
    "name": "reviews",
    "encode": "os:getcwd",
    "slices": [{"name": "class", "column": "labels"}, {"name": "length", "tokens": [64, 128]}],
    "tests": [
        {
            "name": "negation",
            "kind": "minimum",
            "template": "I do not {verb} it.",
            "lexicons": {"verb": ["like", "love"]},
            "label": 0,
            "max_failures": 0.1,
        },
        {"name": "typos", "kind": "invariance", "texts": ["good food"], "change": {"typo": 1, "replace": {"a": "b"}}},
        {
            "name": "louder",
            "kind": "direction",
            "texts": ["good"],
            "change": {"case": "upper"},
            "direction": {"label": 1, "moves": "not_down", "by": 0.1},
        },
        {"name": "moved", "kind": "invariance", "held_out": 50, "change": {"shift": [1, 0], "rotate": 90}},
    ],
    "assertions": [
        {"name": "sane", "finite": ["probabilities"]},
        {"name": "sure", "range": {"field": "confidence", "min": 0.5}, "where": {"country": "NZ"}},
        {"name": "some", "share": {"value": 3, "min": 0.05}},
        {"name": "calm", "steady": {"by": "camera", "max_change": 0.5}},
    ],
}
DATA = {"data": {"path": "*.jsonl", "seq_len": 16, "held_out": 0.2, "window": {"last_days": 3}, "time_column": "at"}}
POLICY = {
    "name": "careful",
    "metric": "accuracy",
    "min_gain": 0.0,
    "significance": 0.05,
    "max_loss": 0.1,
    "min_slice_rows": 10,
    "suites": ["suite.json"],
    "max_rows": 100,
    "approval": {"timeout_s": 60},
}
RETRAINING = {
    "name": "production",
    "devices": {"cpu": 1},
    "policy": "policy.json",
    "night": {
        "starts": "02:00",
        "deadline": "06:00",
        "timezone": "Europe/Berlin",
        "budget": 2.5,
        "webhook": "https://example.org/x",
    },
    "models": [
        {
            "name": "digits",
            "job": {key: value for key, value in JOB.items() if key != "data"},
            "data": {"path": "*.jsonl", "seq_len": 16},
            "compare_on": {"path": "more.jsonl", "seq_len": 16},
            "sweep": {"optimizer.lr": [0.1, 0.2], "seed": [1, 2]},
            "window_days": 14,
            "priority": 1,
            "due": {
                "max_age_days": 30,
                "drift": {"psi": 0.2, "inputs": {"path": "words.jsonl", "seq_len": 16}},
                "assertions": {"suite": "suite.json", "predictions": "words.jsonl"},
            },
        },
        {"name": "other", "job": {"model": MODEL, "num_epochs": 2}, "data": {"source": "digits"}, "min_gain": 0.01},
    ],
}
OPTION = {"technique": "ddp", "gpus": 2, "runtime": 10.0, "startup": 1.0, "save": 0.5, "config": {"micro_batch": 4}}
PROBLEM = {
    "name": "p",
    "switch_cost": 2.0,
    "nodes": [
        {"id": "n0", "gpus": 4, "type": "a100", "price": 2.0, "host_memory": 1000},
        {"id": "n1", "gpus": 4, "until": 5000.0},
    ],
    "jobs": [
        {"id": "a", "options": [OPTION, {**OPTION, "gpus": 8, "nodes": 2}], "after": ["b"], "deadline": 900.0},
        {"id": "b", "options": [{**OPTION, "host_memory": 10}, {**OPTION, "jobs": ["c"]}], "weight": 2.0},
        {"id": "c", "options": [OPTION], "started": True, "running": {"option": 0, "gpus": [["n0", [0, 1]]]}},
        {"id": "d", "options": [{**OPTION, "type": "a100"}], "release": 5.0},
    ],
}


def _read_batch(file: Path) -> None:
    batch = load_batch(file)
    assert Batch.from_json(json.loads(json.dumps(batch.to_json()))) == batch


def _read_sweep(file: Path) -> None:
    spec_of(load_sweep(file)).batch()


def _read_plan(file: Path) -> None:
    problem, plan = Problem.from_json(PROBLEM), read_plan(file)
    verify(plan, problem)
    try:
        certified_bound(plan.certificate, problem) if plan.certificate else None
    except ValueError as error:  # reported like this by `ringmaster check`
        raise InputError([str(error)]) from error


def _read_data(file: Path) -> None:
    data_spec(str(file))


def _read_problem(file: Path) -> None:
    problem = read_problem(file)
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


@dataclass(frozen=True)
class Kind:
    """A kind of file: a valid one, its reader, and the error for an invalid one."""

    right: Any
    read: Callable[[Path], object]
    faults: type[ValueError] = BatchFileError
    share: float = 1.0
    is_json: bool = False


EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = {
    "example": Kind((EXAMPLES / "tiny_batch.yaml").read_text(), _read_batch, share=0.5),
    "batch": Kind(BATCH, _read_batch),
    "sweep": Kind(SWEEP, _read_sweep),
    "sweep_of_file": Kind(SWEEP_OF_FILE, _read_sweep, share=0.5),
    "suite": Kind(SUITE, load_suite),
    "policy": Kind(POLICY, load_policy, share=0.5),
    "retraining": Kind(RETRAINING, load_production),
    "data": Kind(DATA, _read_data, InputError, share=0.5),
    "problem": Kind(PROBLEM, _read_problem, InputError, is_json=True),
    "plan": Kind(None, _read_plan, InputError, is_json=True),
}


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return solve(Problem.from_json(PROBLEM), work_s=1.0).to_json()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A folder with valid files, to which the mutated file refers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.jsonl").write_text('{"text": "a b"}\n{"text": "c d"}\n')
    (tmp_path / "more.jsonl").write_text('{"text": "e f"}\n')
    for name, right in (("batch", BATCH), ("suite", SUITE), ("policy", POLICY)):
        (tmp_path / f"{name}.json").write_text(json.dumps(right))
    return tmp_path


def _kind(name: str, plan: dict[str, Any]) -> Kind:
    return replace(KINDS[name], right=KINDS[name].right or plan)


def _mutated(name: str, plan: dict[str, Any], folder: Path, *, count: int, seed: int) -> None:
    kind = _kind(name, plan)
    answers = assert_answered(
        kind.read,
        right=kind.right,
        file=folder / f"mutant.{'json' if kind.is_json else 'yaml'}",
        faults=kind.faults,
        count=count,
        seed=seed,
        is_json=kind.is_json,
    )
    assert answers.num_refused > answers.num_taken / 4, "what was changed is hardly ever noticed"
    assert answers.num_taken > 0, "no change is harmless: is the file right at all?"


@pytest.mark.parametrize("name", KINDS)
def test_a_right_file_is_taken(name: str, plan, folder: Path):
    file = folder / "right.yaml"
    right = _kind(name, plan).right
    file.write_text(right if isinstance(right, str) else json.dumps(right))
    KINDS[name].read(file)


@pytest.mark.parametrize("name", KINDS)
def test_some_mutants_of_a_file_are_answered(name: str, plan, folder: Path):
    _mutated(name, plan, folder, count=40, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_ten_thousand_mutants_are_answered(name: str, plan, folder: Path):
    count = round(NUM_IN_ALL * KINDS[name].share / sum(kind.share for kind in KINDS.values()))
    _mutated(name, plan, folder, count=count, seed=0)
