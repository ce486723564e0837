"""Grid entries of a batch file: one job for each combination of values."""

from pathlib import Path

import pytest

from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import parse_batch
from ringmaster.tasks.batch.grid import combinations, number_text
from ringmaster.techniques import Job

TEMPLATE = {"name": "g", "model": {"architecture": "LlamaForCausalLM"}, "data": {"source": "digits"}, "num_steps": 10}


def expand(over: dict[str, list[object]]) -> list[str]:
    jobs, found = combinations({"template": TEMPLATE, "over": over}, at=("grid", 0))
    assert not found
    return [job.raw["name"] for job in jobs]


@pytest.mark.parametrize(
    ("over", "names"),
    [
        ({"optimizer.lr": [3e-4, 0.1]}, ["g-lr3e-4", "g-lr0.1"]),
        ({"seed": [0, 1], "exact": [True]}, ["g-seed0-exact-true", "g-seed1-exact-true"]),
        ({"optimizer.name": ["adamw", "sgd"]}, ["g-adamw", "g-sgd"]),
        ({"model.from_pretrained": ["org/one", "org/two"]}, ["g-org-one", "g-org-two"]),
        ({"optimizer": [{"lr": 1e-3}, {"lr": 1e-4}]}, ["g-optimizer0", "g-optimizer1"]),
        ({"clip_grad_norm": [None, 1.0]}, ["g-clip_grad_norm0", "g-clip_grad_norm1.0"]),
        ({"a.x": [1], "b.x": [2]}, ["g-a-x1-b-x2"]),
        ({"loss": ["m:f", "m/f"]}, ["g-m-f", "g-m-f-1"]),
    ],
)
def test_names_are_readable_and_unique(over, names):
    assert expand(over) == names


@pytest.mark.parametrize(
    ("value", "text"),
    {
        3e-4: "3e-4",
        1.5e-4: "1.5e-4",
        0.1: "0.1",
        0.01: "0.01",
        1.0: "1.0",
        1e-5: "1e-5",
        128: "128",
        1e22: "1e+22",
        -2e-7: "-2e-7",
        0.30000000000000004: "0.30000000000000004",
    }.items(),
)
def test_numbers_in_names_are_short_and_exact(value: float, text: str):
    assert number_text(value) == text
    assert float(text) == value


def jobs_of(text: str) -> tuple[Job, ...]:
    return parse_batch(text, folder=Path(), name="grid.yaml").jobs


def test_values_arrive_in_their_jobs_and_leave_the_template_as_it_is():
    jobs = jobs_of("""
        grid:
          - template:
              name: g
              model: {architecture: LlamaForCausalLM, config: {hidden_size: 1, num_hidden_layers: 2}}
              data: {source: digits}
              num_steps: 10
            over:
              model.config.hidden_size: [64, 128]
              schedule.warmup_steps: [0, 5]
        """)
    said = [(j.name, j.model.config["hidden_size"], j.schedule.warmup_steps) for j in jobs]
    assert said == [
        ("g-hidden_size64-warmup_steps0", 64, 0),
        ("g-hidden_size64-warmup_steps5", 64, 5),
        ("g-hidden_size128-warmup_steps0", 128, 0),
        ("g-hidden_size128-warmup_steps5", 128, 5),
    ]
    assert {job.model.config["num_hidden_layers"] for job in jobs} == {2}


EVALUATED = "model: {architecture: LlamaForCausalLM}, data: {source: digits}, num_steps: 10"


@pytest.mark.parametrize(
    ("jobs", "max_rows"),
    [
        (f"jobs: [{{name: a, {EVALUATED}, evaluation: {{max_rows: 48}}}}]", [48]),
        (f"jobs: [{{name: a, {EVALUATED}, global_batch_size: 4}}]", [1024]),
        (f"jobs: [{{name: a, {EVALUATED}, global_batch_size: 4, evaluation: {{max_batches: 3}}}}]", [12]),
        (
            f"grid: [{{template: {{name: a, {EVALUATED}, global_batch_size: 8, evaluation: {{max_batches: 3}}}}, "
            "over: {global_batch_size: [4, 16]}}]",
            [24, 24],
        ),
        (f"grid: [{{template: {{name: a, {EVALUATED}}}, over: {{global_batch_size: [4, 32]}}}}]", [1024, 1024]),
        (
            f"grid: [{{template: {{name: a, {EVALUATED}, evaluation: {{max_batches: 2}}}}, "
            "over: {global_batch_size: [4, 32]}}]",
            [32, 32],
        ),
        (
            f"grid: [{{template: {{name: a, {EVALUATED}}}, over: {{evaluation.max_batches: [1, 2]}}}}]",
            [16, 32],
        ),
    ],
)
def test_the_rows_of_an_evaluation_do_not_depend_on_the_batch_size_of_a_combination(jobs, max_rows):
    found = jobs_of(jobs)
    assert [job.max_evaluated_rows for job in found] == max_rows
    assert {job.evaluation.max_batches for job in found} == {None}


def test_two_limits_of_an_evaluation_are_refused():
    with pytest.raises(BatchFileError, match=r"evaluation\.max_batches: cannot be used with max_rows\. To fix: give"):
        jobs_of(f"jobs: [{{name: a, {EVALUATED}, evaluation: {{max_batches: 3, max_rows: 48}}}}]")


def test_options_of_a_loss_may_be_varied_where_it_is_given_by_name():
    template = {**TEMPLATE, "loss": "dpo"}
    jobs, _ = combinations({"template": template, "over": {"loss.beta": [0.1, 0.9]}}, at=("grid", 0))
    assert [job.raw["loss"] for job in jobs] == [{"name": "dpo", "beta": 0.1}, {"name": "dpo", "beta": 0.9}]


def test_jobs_of_a_grid_may_adapt_one_another():
    jobs = jobs_of("""
        jobs:
          - {name: on-top, base: g-seed1, model: {architecture: LlamaForCausalLM}, data: {source: digits}, num_steps: 1}
        grid:
          - template: {name: g, model: {architecture: LlamaForCausalLM}, data: {source: digits}, num_steps: 10}
            over: {seed: [0, 1]}
        """)
    assert [(job.name, job.base) for job in jobs] == [("on-top", "g-seed1"), ("g-seed0", None), ("g-seed1", None)]
