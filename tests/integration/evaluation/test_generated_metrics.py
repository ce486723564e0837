"""Metrics of what models write, and tasks of lm-eval: over ranks, by row, and planned."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from ringmaster.techniques import DataSpec, EvaluationSpec, ModelSpec
from ringmaster.techniques.estimates.job_preflight import preflight_job
from ringmaster.techniques.metric import metric_named
from ringmaster.techniques.preflight_result import PreflightOrder
from ringmaster.techniques.scoring import score_together
from ringmaster.techniques.technique import GangShape
from tests.integration.evaluation.test_commands import ringmaster
from tests.integration.workbench import LLAMA, SINGLE, Layout

METRICS = ("loss", "generated_exact_match", "generated_rouge_1", "generated_rouge_l")
T5 = ModelSpec(
    architecture="T5ForConditionalGeneration",
    config={"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
)
TASK = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: colours.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture
def answers(tmp_path):
    """Questions that are all answered alike, which a model soon learns."""
    file = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"what is item {i} ?", "completion": " it is red"} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSpec(path=str(file), kind="completion", seq_len=32, vocab_size=300, held_out=0.25)


def metrics_of(trained):
    assert trained.outcome.status == "done", trained.outcome
    return trained.outcome.result.metrics


def test_a_model_that_has_learnt_its_answers_writes_them(bench, tmp_path, answers):
    evaluation = EvaluationSpec(metrics=METRICS, max_batches=2, max_new_tokens=12)
    job = bench.job(LLAMA, data=answers, evaluation=evaluation, num_steps=60)
    job = replace(job, optimizer=replace(job.optimizer, name="adamw", lr=5e-3))
    trained = bench.train(job, SINGLE, tmp_path / "one")
    one = metrics_of(trained)
    assert one["generated_exact_match"] == one["generated_rouge_1"] == one["generated_rouge_l"] == 1.0
    two = metrics_of(bench.train(job, Layout("ddp", 2, {"micro_batch": 2}), tmp_path / "two"))
    assert two == pytest.approx(one, rel=1e-3)

    # The scoring of rows writes too, and a model that has learnt nothing writes something else.
    untrained = replace(job, num_steps=1, optimizer=replace(job.optimizer, lr=0.0))
    fresh = bench.train(untrained, SINGLE, tmp_path / "fresh")
    assert metrics_of(fresh)["generated_exact_match"] == 0.0
    folders = {"trained": tmp_path / "one" / "model", "fresh": tmp_path / "fresh" / "model"}
    scores = score_together(folders, job=job, cache_dir=bench.cache_dir).scores
    assert scores["trained"].arrays["generated_exact"].min() == 1.0
    assert scores["fresh"].arrays["generated_exact"].max() == 0.0


@pytest.mark.full
def test_encoder_decoders_write_to_their_inputs(bench, tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [{"input": f"item {i}", "target": "it is red"} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSpec(path=str(file), kind="seq2seq", seq_len=16, vocab_size=300, held_out=0.25)
    job = bench.job(T5, data=data, evaluation=EvaluationSpec(metrics=METRICS, max_new_tokens=12), num_steps=60)
    job = replace(job, optimizer=replace(job.optimizer, name="adamw", lr=2e-2))
    assert metrics_of(bench.train(job, SINGLE, tmp_path / "one"))["generated_exact_match"] == 1.0


def test_only_techniques_with_the_whole_model_train_it(bench, answers):
    job = bench.job(LLAMA, data=answers, evaluation=EvaluationSpec(metrics=METRICS), num_steps=4)
    techniques = {name: Layout(name).path for name in ("single", "ddp", "fsdp", "tensor")}
    shapes = (GangShape(kind="cpu", num_devices=2, memory_bytes=1 << 33),)
    order = PreflightOrder(jobs=(job,), shapes=shapes, techniques=techniques, cache_dir=str(bench.cache_dir))
    assert {each.technique for each in preflight_job(job, order).candidates} == {"single", "ddp"}


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A task of the library with its data in a local file, next to a batch file on the import path."""
    pytest.importorskip("lm_eval.tasks")
    folder = tmp_path / "lm_eval_tasks"
    folder.mkdir()
    (folder / "colours.yaml").write_text(TASK)
    docs = [{"question": f"what is item {i} ?", "choices": [" it is blue", " it is red"], "label": 1} for i in range(9)]
    (folder / "colours.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return "lm-eval/colours"


@pytest.mark.full
def test_a_task_of_lm_eval_is_measured_on_one_and_on_several_ranks(bench, tmp_path, answers, task):
    metrics = ("loss", task, "lm-eval/colours/acc_norm")
    job = bench.job(LLAMA, data=answers, evaluation=EvaluationSpec(metrics=metrics, max_batches=1), num_steps=60)
    job = replace(job, optimizer=replace(job.optimizer, name="adamw", lr=5e-3))
    paths = (str(tmp_path),)
    trained = bench.train(job, SINGLE, tmp_path / "one", import_paths=paths)
    one = metrics_of(trained)
    assert list(one) == list(metrics)
    assert one[task] == 1.0  # it has learnt that items are red
    two = metrics_of(bench.train(job, Layout("ddp", 2, {"micro_batch": 2}), tmp_path / "two", import_paths=paths))
    assert two == pytest.approx(one, rel=1e-3)

    # So does `ringmaster evaluate`, alone and together with the answers of the model to rows.
    folder = str(tmp_path / "one" / "model")
    done = ringmaster(tmp_path, "evaluate", folder, "--metric", task, "--json")
    (line,) = json.loads(done.stdout)["metrics"]
    assert (line["metric"], line["value"], line["num_rows"]) == (task, one[task], 9), done.stderr
    named = [word for metric in (task, "generated_exact_match", "generated_rouge_l") for word in ("--metric", metric)]
    data = f"{{path: {answers.path}, kind: completion, seq_len: 32}}"
    done = ringmaster(tmp_path, "evaluate", folder, "--data", data, *named, "--max-rows", "8", "--json")
    lines = {line["metric"]: line for line in json.loads(done.stdout)["metrics"]}
    assert all(line["value"] == 1.0 for line in lines.values()), done.stderr
    assert lines[task]["num_rows"] == 8
    assert done.returncode == 0
    assert "10%; --all-rows scores all" in done.stderr

    # The library's own evaluation of the exported folder says the same.
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    monkeyed = metric_named(task)._loaded()  # with absolute paths of its data
    found = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer), tasks=[monkeyed], bootstrap_iters=0, limit=8,
        task_manager=TaskManager(include_defaults=False),
    )  # fmt: skip
    assert found["results"]["colours"]["acc,none"] == one[task]
    assert found["results"]["colours"]["acc_norm,none"] == pytest.approx(one["lm-eval/colours/acc_norm"])
