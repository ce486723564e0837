"""Tasks of lm-evaluation-harness as metrics: local files, measures, divided documents, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import parse_batch
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.metric import metric_named, why_generating
from ringmaster.techniques.training.metric_totals import MetricTotals
from tests.unit.evaluation.measuring import LOSS

COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: colours.jsonl}}}}
test_split: test
doc_to_target: "{target}"
output_type: {kind}
"""
CHOICES = """
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
FLUENT = """
doc_to_text: ""
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""
LM_EVAL = {"name": "batch", "model": {"architecture": "LlamaForCausalLM"}, "data": {"source": "digits"}, "num_steps": 1}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Task files next to a batch file on the import path, and their data."""
    pytest.importorskip("lm_eval.tasks")
    tasks = tmp_path / "lm_eval_tasks"
    tasks.mkdir()
    (tasks / "colours.yaml").write_text(
        COMMON.format(name="colours", target="{{label}}", kind="multiple_choice") + CHOICES
    )
    (tasks / "fluent.yaml").write_text(
        COMMON.format(name="fluent", target="{{question}}", kind="loglikelihood_rolling") + FLUENT
    )
    docs = [{"question": f"w{i} w{i + 1}", "choices": [f"w{i}", f"w{i + 2}"], "label": i % 2} for i in range(7)]
    (tasks / "colours.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    words = Tokenizer(
        models.WordLevel({"[UNK]": 0, "</s>": 1, **{f"w{i}": i + 2 for i in range(20)}}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="</s>", pad_token="</s>")
    tokenizer.save_pretrained(tmp_path / "data" / "tokenizer")
    yield tmp_path
    from ringmaster.features.lm_eval import lm_eval_tasks

    lm_eval_tasks.task_file.cache_clear()
    lm_eval_tasks.lm_eval_metric.cache_clear()


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=22, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.full
def test_documents_are_divided_over_ranks_and_the_value_is_the_librarys(folder):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    names = ("lm-eval/colours", "lm-eval/colours/acc_norm", "lm-eval/fluent", "loss")
    data = PreparedData(
        name="", digest="", num_samples=1, num_held_out=1, kind="tokens", source="", folder=str(folder / "data")
    )
    own = model()
    found = []
    for num_ranks in (1, 3):
        ranks = [MetricTotals(names, loss=LOSS) for _ in range(num_ranks)]
        for rank, metrics in enumerate(ranks):
            metrics.measure_model(own, data, 7, ranks=(rank, num_ranks), batch_size=2)
        found.append(ranks[0].result(list(zip(*(each.parts() for each in ranks), strict=True))))
    assert list(found[0]) == list(names[:-1]), "without the loss of no held-out rows"
    assert found[1] == pytest.approx(found[0])

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "data" / "tokenizer")
    tasks = [metric_named(name)._loaded() for name in ("lm-eval/colours", "lm-eval/fluent")]
    theirs = simple_evaluate(HFLM(pretrained=own, tokenizer=tokenizer), tasks=tasks, bootstrap_iters=0)["results"]
    assert found[0]["lm-eval/colours"] == theirs["colours"]["acc,none"]
    assert found[0]["lm-eval/colours/acc_norm"] == theirs["colours"]["acc_norm,none"]
    assert found[0]["lm-eval/fluent"] == pytest.approx(theirs["fluent"]["word_perplexity,none"])


def test_a_task_says_in_which_direction_it_is_better(folder):
    assert metric_named("lm-eval/colours").higher_is_better
    assert not metric_named("lm-eval/fluent").higher_is_better
    assert metric_named("lm-eval/arc_easy").higher_is_better  # of the library itself, whose documents are not here
    assert why_generating(["lm-eval/colours"]) == "the metric lm-eval/colours"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("lm-eval/color", "there is no task 'color'. To fix: name a task of lm-eval .*lm_eval_tasks next to the batch"),
        ("lm-eval/colours/f1", "the task has no f1. To fix: name one of acc, acc_norm"),
    ],
)
def test_what_is_not_there_is_refused(folder, name, fault):
    with pytest.raises(ValueError, match=fault):
        metric_named(name)


def test_documents_that_cannot_be_read_are_refused(folder):
    (folder / "lm_eval_tasks" / "colours.jsonl").unlink()
    with pytest.raises(ValueError, match=r"its documents cannot be read: .* To fix: correct .*colours.y"):
        metric_named("lm-eval/colours").num_rows()


def test_a_batch_file_names_a_task_where_the_extra_is_installed(monkeypatch):
    job = {**LM_EVAL, "name": "a", "evaluation": {"metrics": ["lm-eval/colours", "loss"]}}
    text = json.dumps({"jobs": [job]})
    monkeypatch.setattr("ringmaster.extras.find_spec", lambda package: None)
    with pytest.raises(BatchFileError, match=r"lm-eval/colours needs lm_eval, not installed. To fix: pip install 'ri"):
        parse_batch(text, folder=Path(), name="batch.yaml")
    monkeypatch.setattr("ringmaster.extras.find_spec", lambda package: package)
    assert parse_batch(text, folder=Path(), name="batch.yaml").jobs[0].evaluation.metrics == ("lm-eval/colours", "loss")
