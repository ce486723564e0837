"""Sums of exact jobs: the same bits whoever holds the summands."""

import copy
import math
from dataclasses import replace
from functools import reduce
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ringmaster.techniques import DataSpec, GangShape, Job, ModelSpec, registry
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.technique import choose_chunk, why_not_exact
from ringmaster.techniques.training.exact_sums import (
    SumTree,
    group_by_layer,
    sum_of_ranks,
    take_gradients,
    use_exact_kernels,
)
from ringmaster.techniques.training.gradients import exact_norm, whole
from ringmaster.techniques.training.metric_totals import rounded
from ringmaster.techniques.training.optimizers import AlignedAdamW

CPU = torch.device("cpu")
POWERS = st.sampled_from([1, 2, 4, 8, 16])


def chunks_of(seed, number, size=37):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=draw) * 10 ** float(torch.randn(1, generator=draw)) for _ in range(number)]


def along_tree(summands):
    if len(summands) == 1:
        return summands[0]
    half = len(summands) // 2
    return along_tree(summands[:half]) + along_tree(summands[half:])


def summed(chunks):
    tree = SumTree()
    for chunk in chunks:
        tree.add({"weight": chunk.clone()})
    return tree.pop()["weight"]


@given(seed=st.integers(0, 1 << 30), num_chunks=POWERS, num_ranks=POWERS)
def test_a_tree_within_ranks_and_over_them_is_one_tree(seed, num_chunks, num_ranks):
    chunks = chunks_of(seed, num_chunks * num_ranks)
    expected = along_tree(chunks)
    runs = [summed(chunks[rank * num_chunks : (rank + 1) * num_chunks]) for rank in range(num_ranks)]
    assert torch.equal(sum_of_ranks(torch.cat(runs), num_ranks=num_ranks), expected)
    turns = [
        sum_of_ranks(torch.cat(chunks[number * num_ranks : (number + 1) * num_ranks]), num_ranks=num_ranks)
        for number in range(num_chunks)
    ]
    assert torch.equal(summed(turns), expected)


def test_the_order_matters_to_other_sums():
    """Without this, the test above would hold for any sums."""
    chunks = chunks_of(1, 16)
    assert not torch.equal(reduce(torch.add, chunks), along_tree(chunks))
    unbalanced = SumTree(balanced=False)
    for chunk in chunks:
        unbalanced.add({"weight": chunk.clone()})
    assert torch.equal(unbalanced.pop()["weight"], reduce(torch.add, chunks))


@given(seed=st.integers(0, 1 << 30), num_chunks=POWERS)
def test_the_last_chunk_takes_the_others(seed, num_chunks):
    *first, last = chunks_of(seed, num_chunks)
    tree = SumTree()
    for chunk in first:
        tree.add({"weight": chunk.clone(), "other": chunk.clone()})
    tree.add_to(total := {"weight": last.clone()})
    assert torch.equal(total["weight"], along_tree([*first, last]))


def test_a_missing_gradient_counts_as_zeros():
    missing, there = torch.tensor([-0.0, 1.0]), SumTree()
    for gradients in ({}, {"expert": missing.clone()}, {}, {}):
        there.add(gradients)
    zeros = summed([torch.zeros(2), missing, torch.zeros(2), torch.zeros(2)])
    total = there.pop()["expert"]
    assert torch.equal(total, zeros)
    assert torch.equal(total.signbit(), zeros.signbit())
    for _ in range(2):
        there.add({})
    assert there.pop() == {}


def test_gradients_are_taken_from_their_parameters():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    weights[0].grad = torch.ones(2)
    assert list(take_gradients(weights)) == [weights[0]]
    assert weights[0].grad is None


@given(
    seed=st.integers(0, 1 << 30),
    size=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
    exponent=st.integers(-30, 15),
)
def test_a_norm_has_the_same_bits_however_it_is_divided(seed, size, cuts, exponent):
    draw = torch.Generator().manual_seed(seed)
    gradient = torch.randn(size, generator=draw) * 2.0**exponent * torch.rand(size, generator=draw) ** 8
    edges = sorted({0, size, *(min(cut, size) for cut in cuts)})
    parts = [gradient[first:last] for first, last in pairwise(edges)]
    whole = norm([gradient])
    assert torch.equal(norm(parts), whole)
    assert torch.equal(norm(parts[::-1]), whole)
    assert float(whole) == pytest.approx(float(gradient.double().norm()), rel=1e-6)


def norm(gradients):
    return exact_norm([(gradients, [])], group=None, device=CPU)


@given(
    seed=st.integers(0, 1 << 30),
    size=st.integers(1, 100),
    cuts=st.lists(st.integers(0, 100), max_size=4),
    amsgrad=st.booleans(),
)
def test_adamw_has_the_same_bits_however_a_tensor_is_divided(seed, size, cuts, amsgrad):
    draw = torch.Generator().manual_seed(seed)
    weight, *gradients = torch.randn(4, size, generator=draw)
    edges = sorted({0, size, *(min(cut, size) for cut in cuts)})

    def trained(edges, optimizer):
        parts = [nn.Parameter(weight[first:last].clone()) for first, last in pairwise(edges)]
        steps = optimizer(parts, lr=0.1, weight_decay=0.1, amsgrad=amsgrad, fused=True)
        for gradient in gradients:
            for part, (first, last) in zip(parts, pairwise(edges), strict=True):
                part.grad = gradient[first:last].clone()
            steps.step()
        return torch.cat([part.detach() for part in parts])

    whole = trained([0, size], AlignedAdamW)
    assert torch.equal(trained(edges, AlignedAdamW), whole)
    assert torch.allclose(trained([0, size], torch.optim.AdamW), whole, atol=1e-6)


def test_norms_of_nothing_and_of_no_number():
    assert float(norm([])) == 0.0
    assert float(norm([torch.zeros(3), torch.zeros(0)])) == 0.0
    assert math.isinf(norm([torch.tensor([1.0, math.inf])]))
    assert math.isnan(norm([torch.tensor([1.0, math.nan])]))


@given(st.lists(st.floats(1e-2, 1e4), min_size=1, max_size=50), st.randoms())
def test_sums_of_rounded_values_do_not_depend_on_their_order(values, shuffled):
    kept = rounded(torch.tensor(values, dtype=torch.float64)).tolist()
    assert kept == pytest.approx(values, rel=1e-7)
    expected = reduce(float.__add__, kept)
    shuffled.shuffle(kept)
    assert reduce(float.__add__, kept) == expected


def test_counts_and_what_is_not_finite_are_not_rounded():
    values = torch.tensor([0.0, 3.0, float(1 << 23), math.inf], dtype=torch.float64)
    assert torch.equal(rounded(values), values)


class SharedInput(nn.Module):
    """A model whose layers all use one input, each of them twice, as layers of decoders use the encoder's output."""

    def __init__(self):
        super().__init__()
        self.entry, self.layers = nn.Linear(8, 8), nn.ModuleList(TwoUses() for _ in range(4))

    def forward(self, rows):
        shared = hidden = self.entry(rows).tanh()
        for layer in self.layers:
            hidden = layer(hidden, shared=shared)
        return hidden


class TwoUses(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden, shared):
        return hidden + self.keys(shared).tanh() * self.values(shared)


def gradient_of_entry(model, *, is_sharded):
    if is_sharded:
        mesh = init_device_mesh("cpu", (1,))
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
    model(torch.linspace(-1.0, 1.0, 320).view(40, 8)).square().sum().backward()
    return whole(model.entry.weight.grad)


def test_layers_that_share_an_input_add_its_gradients_as_under_fsdp():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(1)
        plain, grouped = SharedInput(), []
        for is_sharded in (False, True):
            group_by_layer(model := copy.deepcopy(plain))
            grouped.append(gradient_of_entry(model, is_sharded=is_sharded))
        assert torch.equal(*grouped)
        alone = [gradient_of_entry(copy.deepcopy(plain), is_sharded=is_sharded) for is_sharded in (False, True)]
        assert not torch.equal(*alone)
    finally:
        dist.destroy_process_group()


FACTS = ModelFacts(num_parameters=1000, parameter_bytes=4000, largest_layer_bytes=400, num_layers=4, has_dropout=False)


def job(**changes):
    return Job(name="a", model=ModelSpec(), data=DataSpec(source="digits"), num_steps=1, exact=True, **changes)


def gangs(most):
    return [GangShape(kind="cpu", num_devices=n, memory_bytes=1 << 30) for n in range(1, most + 1)]


@pytest.mark.parametrize(
    ("changes", "chunk"),
    [
        ({"global_batch_size": 64}, 8),
        ({"global_batch_size": 1024}, 128),
        ({"global_batch_size": 16}, 4),  # fewer samples would cost too much
        ({"global_batch_size": 24}, 6),
        ({"global_batch_size": 28}, 7),
        ({"global_batch_size": 60}, 15),
        ({"global_batch_size": 15}, 15),
        ({"global_batch_size": 2}, 2),
        ({"global_batch_size": 64, "exact_chunk": 2}, 2),
        ({"global_batch_size": 64, "num_devices": (2,)}, 8),
        ({"global_batch_size": 64, "num_devices": (16,)}, 8),
        ({"global_batch_size": 64, "compile": True}, 8),
    ],
)
def test_the_chunk_follows_from_the_batch_alone(changes, chunk):
    assert choose_chunk(job(**changes), FACTS) == chunk


def test_a_batch_that_must_stay_whole_is_one_chunk():
    assert choose_chunk(job(global_batch_size=64), replace(FACTS, whole_batch="it normalizes over the batch")) == 64
    assert choose_chunk(job(global_batch_size=64, compile=True), replace(FACTS, has_dropout=True)) == 64


@pytest.mark.parametrize(
    ("technique", "changes", "num_devices", "reason"),
    [
        ("single", {}, 1, None),
        ("single", {}, 2, "more threads"),
        ("ddp", {"exact_chunk": 4}, 4, None),
        ("ddp", {"exact_chunk": 4}, 3, "4 chunks of 4 samples cannot be divided by 3 devices"),
        ("fsdp", {"exact_chunk": 8}, 4, "2 chunks of 8 samples"),
        ("zero2", {"exact_chunk": 4, "communication": "bf16"}, 2, "communication: bf16"),
        ("tensor", {"exact_chunk": 4}, 2, "within a sample"),
        ("context", {"exact_chunk": 4}, 2, "within a sample"),
        ("mesh", {"exact_chunk": 4}, 4, "within a sample"),
        ("pipeline", {"exact_chunk": 4}, 2, None),
        ("offload", {"exact_chunk": 4}, 1, None),
    ],
)
def test_what_cannot_be_exact_says_why(technique, changes, num_devices, reason):
    loaded = registry.load(registry.dotted_path(technique))
    why = why_not_exact(loaded, job(**changes), gangs(num_devices)[-1], FACTS)
    assert why is None if reason is None else reason in (why or "")


def test_an_exact_job_computes_in_one_thread_on_a_cpu():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        use_exact_kernels(torch.device("cpu"))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
