"""Latency as a metric: its options, its quantiles, and requests of each kind of model."""

import time

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration, ViTConfig
from transformers import ViTForImageClassification as Vit

from ringmaster.techniques.metric import metric_named
from ringmaster.techniques.metrics.latency import NUM_REQUESTS, TAIL_REQUESTS, WARM_UP_REQUESTS

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=50, max_position_embeddings=32)).eval()
SMALL_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
T5 = T5ForConditionalGeneration(T5Config(**SMALL_T5, decoder_start_token_id=0)).eval()
VIT = Vit(ViTConfig(**TINY, image_size=8, patch_size=4)).eval()


def measure(name, model, rows):
    return metric_named(name).measure(model, rows, tokenizer_dir=None, batch_size=1)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("latency/p99_s", LLAMA),
        ("latency/p50_s/batch=2,tokens=8", LLAMA),
        ("latency/tokens_per_s/tokens=8,new_tokens=3", LLAMA),
        ("latency/p99_s", T5),
        ("latency/p99_s/new_tokens=2", T5),
        ("latency/requests_per_s/batch=4", VIT),
    ],
)
def test_requests_of_each_kind_are_timed(name, model):
    assert (measure(name, model, [0, 1]) > 0).all()


def test_a_request_has_what_its_options_say(monkeypatch):
    seen = []
    monkeypatch.setattr(LLAMA, "forward", lambda input_ids, attention_mask: seen.append(tuple(input_ids.shape)))
    measure("latency/p50_s/batch=3,tokens=1000", LLAMA, [7])
    assert seen == [(3, 32)] * (WARM_UP_REQUESTS + 1)  # no longer than the model reads


def test_it_measures_what_a_client_waits(monkeypatch):
    waits = iter([0.0] * WARM_UP_REQUESTS + [0.02, 0.05])
    monkeypatch.setattr(VIT, "forward", lambda **_: time.sleep(next(waits)))
    first, second = measure("latency/p50_s", VIT, [0, 1])
    assert first >= 0.02 and second >= 0.05


def test_quantiles_and_rates_of_samples():
    seconds = np.linspace(0.01, 1.0, 100)
    counts = np.stack([np.ones(100), np.eye(100)[99] * 100])  # each once; the slowest a hundred times

    def value(name):
        metric = metric_named(name)
        return metric.value_of_rows({metric.name: seconds}, counts)

    assert value("latency/p99_s") == pytest.approx([np.quantile(seconds, 0.99), 1.0])
    assert value("latency/requests_per_s") == pytest.approx([100 / seconds.sum(), 1.0])
    assert value("latency/tokens_per_s/batch=2,tokens=16") == pytest.approx([3200 / seconds.sum(), 32.0])
    assert value("latency/tokens_per_s/batch=2,new_tokens=4") == pytest.approx([800 / seconds.sum(), 8.0])


def test_directions_and_rows():
    assert not metric_named("latency/p99_s").higher_is_better
    assert metric_named("latency/tokens_per_s").higher_is_better
    assert metric_named("latency/p50_s").num_rows() == NUM_REQUESTS
    assert metric_named("latency/p99_s").num_rows() == 100 * TAIL_REQUESTS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("latency/p98_s", "there is no 'p98_s'. To fix: name one of p50_s, p90_s, p99_s, tokens_per_s"),
        ("latency/p99_s/batch=0", "'batch=0' is not an option. To fix: write batch=1,tokens=128,new_tokens=0"),
        ("latency/p99_s/rows=2", "'rows=2' is not an option"),
        ("latency/p99_s/batch", "'batch' is not an option"),
    ],
)
def test_what_it_does_not_know_is_refused_with_what_it_knows(name, message):
    with pytest.raises(ValueError, match=r"metric latency/") as error:
        metric_named(name)
    assert message in str(error.value)


def test_a_model_that_writes_nothing_is_refused():
    with pytest.raises(ValueError, match="ViTForImageClassification writes nothing"):
        measure("latency/p99_s/new_tokens=2", VIT, [0])


def test_inputs_are_equal_in_every_measurement():
    metric = metric_named("latency/p99_s")
    one, other = (metric._inputs(LLAMA, seed=3)["input_ids"] for _ in range(2))
    assert torch.equal(one, other)
