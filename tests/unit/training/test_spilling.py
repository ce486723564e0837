"""Spilled slices: at most two on the device, whatever autograd saves, with the same gradients as without spilling."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from ringmaster.techniques import DataSpec, GangShape, Job, ModelSpec
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.offload import Offload
from ringmaster.techniques.sharding.spilling import MAX_RESIDENT, HostOffload, slices_of
from ringmaster.techniques.single import Single

NUM_LAYERS = 6
CPU = torch.device("cpu")


class Stack(nn.Module):
    """A model with computation between its layers, and a weight outside of them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.entry = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(NUM_LAYERS))
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, points):
        hidden = torch.relu(self.entry(points)) * self.scale
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return self.head(hidden)


def stack():
    return Stack(), (torch.randn(5, 4),)


def gpt2():
    config = GPT2Config(n_embd=16, n_layer=NUM_LAYERS, n_head=2, vocab_size=50, n_positions=16, use_cache=False)
    return GPT2LMHeadModel(config).train(), (torch.randint(0, 50, (2, 12)),)


def vit():
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2, intermediate_size=24, num_labels=3,
    )  # fmt: skip
    return ViTForImageClassification(config).train(), (torch.randn(2, 1, 8, 8),)


MODELS = pytest.mark.parametrize("build", [stack, gpt2, vit])
OPTIONS = pytest.mark.parametrize(
    ("recompute", "host_activations"), [(False, False), (True, False), (True, True)], ids=["kept", "full", "on-host"]
)


class RecordedOffload(HostOffload):
    """Records the number of slices with live memory on the device whenever one is fetched."""

    def __init__(self, *arguments, **options):
        self.alive, self.most, self.num_fetched = {}, 0, 0
        super().__init__(*arguments, **options)

    def _fetch(self, part):
        super()._fetch(part)
        self.num_fetched += 1
        refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in part.copies]
        self.alive.setdefault(part.index, []).extend(refs)
        self.most = max(self.most, self.num_alive())

    def num_alive(self):
        return sum(any(not ref.expired() for ref in refs) for refs in self.alive.values())


def backward(model, inputs):
    output = model(*inputs)
    (output if isinstance(output, torch.Tensor) else output.logits).square().sum().backward()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@MODELS
@OPTIONS
@pytest.mark.parametrize("num_slices", [2, NUM_LAYERS])
def test_two_slices_at_most_and_the_very_gradients(build, recompute, host_activations, num_slices):
    torch.manual_seed(0)
    model, inputs = build()
    plain = copy.deepcopy(model)
    spilled = RecordedOffload(model, num_slices=num_slices, recompute=recompute, host_activations=host_activations)
    spilled.bind(CPU)
    for seed in range(2):  # two micro-batches, to accumulate gradients
        torch.manual_seed(seed)
        backward(plain, inputs)
        torch.manual_seed(seed)
        backward(model, inputs)
        spilled.settle()
    expected, found = gradients(plain), gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    # The model's own weight stays while the model computes.
    assert spilled.most <= MAX_RESIDENT + (build is stack)
    spilled.forget()
    assert spilled.num_alive() == 0


def test_without_tickets_autograd_would_keep_every_slice(monkeypatch):
    """Shows that the count of the test above can fail."""
    monkeypatch.setattr(HostOffload, "_ticket", lambda self, saved: saved)
    monkeypatch.setattr(HostOffload, "_redeem", lambda self, saved: saved)
    model, inputs = gpt2()
    spilled = RecordedOffload(model, num_slices=NUM_LAYERS, recompute=False, host_activations=False)
    spilled.bind(CPU)
    backward(model, inputs)
    assert spilled.most > NUM_LAYERS


def test_a_slice_comes_once_each_way():
    model, inputs = stack()
    spilled = RecordedOffload(model, num_slices=3, recompute=False, host_activations=False)
    spilled.bind(CPU)
    backward(model, inputs)
    num_slices = len(spilled.alive)
    assert spilled.num_fetched <= 2 * num_slices + 1


def test_updated_weights_are_fetched_anew():
    model, inputs = stack()
    spilled = HostOffload(model, num_slices=2, recompute=False, host_activations=False)
    spilled.bind(CPU)
    with torch.no_grad():
        before = model(*inputs)
        for parameter in model.parameters():
            parameter.mul_(2.0)
        spilled.forget()
        after = model(*inputs)
    plain = Stack()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(after, plain(*inputs).detach())
    assert not torch.allclose(before, after)


def test_frozen_weights_get_no_gradient():
    model, inputs = stack()
    model.layers[1].weight.requires_grad_(False)
    spilled = HostOffload(model, num_slices=2, recompute=False, host_activations=False)
    spilled.bind(CPU)
    backward(model, inputs)
    spilled.settle()
    assert model.layers[1].weight.grad is None
    assert model.layers[1].bias.grad is not None
    assert model.layers[0].weight.grad is not None


def test_slices_are_runs_of_layers_and_the_modules_around_them():
    model, _ = gpt2()
    parts = slices_of(model, 3)
    assert [len(part.units) for part in parts] == [1, 1, 2, 2, 2, 1, 1]  # wte, wpe, layers, ln_f, lm_head
    assert parts[0].parameters == parts[-1].parameters  # tied
    assert {p for part in parts for p in part.parameters} == set(model.parameters())


FACTS = ModelFacts(
    num_parameters=100_000_000, parameter_bytes=400_000_000, largest_layer_bytes=8_000_000, num_layers=48,
    has_dropout=False,
)  # fmt: skip
GPU = GangShape(kind="gpu", num_devices=1, memory_bytes=1 << 30)


def job(**changes):
    model, data = ModelSpec(architecture="LlamaForCausalLM"), DataSpec(source="python-stdlib", seq_len=8)
    return Job(name="tiny", model=model, data=data, num_steps=1, **changes)


@pytest.mark.parametrize(
    ("changes", "shape", "facts", "reason"),
    [
        ({}, GPU, FACTS, None),
        ({"techniques": ("offload",)}, replace(GPU, kind="cpu"), FACTS, None),
        ({}, replace(GPU, kind="cpu"), FACTS, "nothing is saved"),
        ({}, replace(GPU, num_devices=2), FACTS, "one device"),
        ({}, GPU, replace(FACTS, num_layers=0), "no repeated layers"),
        ({"compile": True}, GPU, FACTS, "compile: true"),
        ({}, GPU, replace(FACTS, num_parameters=10**15), "of host memory"),
    ],
)
def test_it_says_why_not(changes, shape, facts, reason):
    said = Offload().supports(job(**changes), shape, facts)
    assert said is None if reason is None else reason in said


def test_memory_is_two_slices_on_the_device_and_the_rest_on_the_host():
    """Expected bytes are computed by hand: 48 layers of 8 MB and 16 MB outside, in slices of 12 layers and of one."""
    technique = Offload()
    config = {"micro_batch": 1, "recompute": "full", "host_activations": False}
    few, many = ({**config, "num_slices": number} for number in (4, 48))
    assert technique.estimate_memory(job(), GPU, few, FACTS) == 2 * 12 * 8_000_000 + 16_000_000
    assert technique.estimate_memory(job(), GPU, many, FACTS) == 2 * 16_000_000 + 16_000_000
    assert technique.estimate_host_memory(job(), FACTS) == (16 + 4) * FACTS.num_parameters
    on_cpu = technique.estimate_memory(job(), replace(GPU, kind="cpu"), few, FACTS)
    assert on_cpu > Single().estimate_memory(job(), replace(GPU, kind="cpu"), few, FACTS)


def test_configs_try_large_micro_batches_first_and_leave_batch_statistics_whole():
    configs = list(Offload().configs(job(global_batch_size=8), GPU, FACTS))
    assert configs[0] == {"micro_batch": 8, "recompute": "none", "num_slices": 4, "host_activations": False}
    assert {config["num_slices"] for config in configs} == {4, 48}
    undivided = Offload().configs(job(global_batch_size=8), GPU, replace(FACTS, whole_batch="looks across samples"))
    assert {(config["micro_batch"], config["recompute"]) for config in undivided} == {(8, "none")}
