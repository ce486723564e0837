"""Quantization-aware training: torchao's layers, their numbers, and files that are refused."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from ringmaster.features.quantization_aware.trainer import prepare
from ringmaster.tasks.batch import parse_batch
from ringmaster.techniques import AdaptationSpec, registry
from ringmaster.techniques.estimates.job_preflight import why_no_adaptation
from ringmaster.techniques.job import ADAPTATIONS, QUANTIZATION_AWARE
from ringmaster.techniques.models.quantization import torchao_config

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra torchao is not installed")
METHODS = ADAPTATIONS[QUANTIZATION_AWARE]


def adaptation(method, **changes):
    return AdaptationSpec(kind=QUANTIZATION_AWARE, method=method, **changes)


class Layers(nn.Module):
    """Two repeated layers with a bias and without, one that groups of 32 do not divide, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(64, 40), nn.Linear(40, 64, bias=False), nn.Linear(64, 64)])
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def trained(model, *, num_steps=20):
    """The losses of steps on drawn samples."""
    draw, optimizer, losses = torch.Generator().manual_seed(1), torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(num_steps):
        x = torch.randn(16, 64, generator=draw)
        loss = nn.functional.mse_loss(model(x), x[:, :8].relu())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@needs_torchao
@pytest.mark.parametrize("method", METHODS)
def test_twenty_steps_and_the_conversion_are_torchaos(method):
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    plain, spec = Layers(), adaptation(method)
    model, by_hand = prepare(copy.deepcopy(plain), spec), copy.deepcopy(plain)
    quantize_(
        by_hand,
        QATConfig(torchao_config(method, group_size=32), step="prepare"),
        lambda m, name: name in ("layers.0", "layers.2"),
    )
    losses = trained(model)
    assert losses == trained(by_hand)
    assert losses[-1] < losses[0] and losses != trained(plain)
    x = torch.randn(5, 64)
    rounded = model(x)
    assert torch.equal(rounded, by_hand(x))
    quantize_(by_hand, QATConfig(torchao_config(method, group_size=32), step="convert"))
    assert torch.allclose(by_hand(x), rounded, atol=1e-6)


@needs_torchao
@pytest.mark.parametrize("method", METHODS)
def test_rows_and_tokens_are_rounded_alone(method):
    """So what a step computes does not depend on how its batch is divided."""
    model, x = prepare(Layers(), adaptation(method)), torch.randn(6, 3, 64) * torch.logspace(-2, 2, 6)[:, None, None]
    assert torch.allclose(model(x), torch.cat([model(x[:2]), model(x[2:])]), rtol=1e-5, atol=1e-5)


@needs_torchao
def test_parameters_stay_and_the_head_and_other_widths_are_not_rounded():
    model = Layers()
    parameters, keys = dict(model.named_parameters()), [*model.state_dict()]
    prepare(model, adaptation("weight-only-int4"))
    kinds = [type(layer).__name__ for layer in (*model.layers, model.head)]
    assert kinds == ["FakeQuantizedLinear", "Linear", "FakeQuantizedLinear", "Linear"]
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert [*model.state_dict()] == keys


@needs_torchao
def test_groups_that_divide_no_layer_are_refused():
    with pytest.raises(ValueError, match=r"no linear layers .* multiple of 48. To fix: set adaptation.group_size"):
        prepare(Layers(), adaptation("weight-only-int4", group_size=48))


def test_techniques_that_divide_rows_are_refused(tmp_path):
    job = parsed(tmp_path, "").jobs[0] if find_spec("torchao") else None
    for name in ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp_static", "offload", "pipeline", "tensor", "mesh"):
        technique = registry.load(registry.dotted_path(name))
        reason = adaptation(METHODS[0]).why_not(technique)
        assert (reason is None) == (name not in ("tensor", "mesh"))
        assert job is None or why_no_adaptation(technique, job) == reason


JOB = """
  - {name: a, model: {architecture: GPT2LMHeadModel}, data: {path: a.txt, seq_len: 8, vocab_size: 300}, num_steps: 1,
     adaptation: {%s}%s}
"""


def parsed(tmp_path, more, how="method: weight-only-int4"):
    (tmp_path / "a.txt").write_text("text " * 99)
    how = how if how.startswith("kind") else f"kind: quantization-aware, {how}"
    return parse_batch(f"jobs: {JOB % (how, more)}", folder=tmp_path, name="batch.yaml")


@needs_torchao
@pytest.mark.parametrize(
    ("how", "more", "fault"),
    [
        ("method: int3", "", r"adaptation.method: 'int3' is unknown"),
        ("method: average", "", r"adaptation.method: 'average' is no way to get a quantization-aware model"),
        ("group_size: 32", "", r"adaptation.method: is missing"),
        ("method: weight-only-int4, group_size: 12", "", r"group_size: must be a multiple of 8, got 12. To fix: give"),
        ("kind: quantized, method: weight-only-int8, group_size: 64", "", r"group_size: is for weights in 4 bits"),
        ("method: weight-only-int4", ", precision: fp8", r"precision: fp8 has layers of its own"),
        ("method: weight-only-int4", ", compile: true", r"compile: does not go with a quantization-aware job"),
        ("method: weight-only-int4", ", exact: true", r"exact: does not go with rounded weights"),
        ("method: weight-only-int4", ", adapter: {}", r"adapter: does not go with a quantization-aware model"),
    ],
)
def test_jobs_that_cannot_be_trained_so_are_refused(tmp_path, how, more, fault):
    with pytest.raises(ValueError, match=fault):
        parsed(tmp_path, more, how)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("ringmaster.extras.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"adaptation.kind: quantization-aware needs torchao, not installed. To fix"):
        parsed(tmp_path, "")
    with pytest.raises(ValueError, match=r"quantization-aware needs torchao, not installed. To fix"):
        prepare(Layers(), adaptation(METHODS[0]))  # on a node that lacks it
