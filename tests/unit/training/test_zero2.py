"""ZeRO-2's division of weights into buckets and shards, and the number of its exchange buffers."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ringmaster.techniques.sharding import sharded as sharded_module
from ringmaster.techniques.sharding.buckets import divide
from ringmaster.techniques.sharding.sharded import ShardedModel

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6)


class Weights(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])


@settings(deadline=None)
@given(shapes=SHAPES, num_ranks=st.integers(1, 5), bucket_bytes=st.integers(1, 2000))
def test_the_shards_of_all_ranks_are_all_weights_once(shapes, num_ranks, bucket_bytes):
    model = Weights(shapes)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    updates = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    for rank in range(num_ranks):
        for bucket in divide(model, bucket_bytes=bucket_bytes, rank=rank, num_ranks=num_ranks):
            for part in bucket.parameter_shards:
                assert part.weight.tolist() == part.of_parameter(part.slot.parameter).tolist()
                assert part.weight.tolist() == part.of(bucket.shard(bucket.weights)).tolist()
                updates[part.slot.name].view(-1)[part.first : part.first + part.length] += 1
    assert all(bool((times == 1).all()) for times in updates.values())
    assert all(map(torch.equal, model.parameters(), before))


def test_a_bucket_ends_where_the_next_parameter_would_overfill_it():
    model = Weights([(100,), (100,), (300,), (50,)])
    buckets = divide(model, bucket_bytes=1000, rank=0, num_ranks=2)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [
        ["tensors.3"],
        ["tensors.2"],
        ["tensors.1", "tensors.0"],
    ]


def test_an_update_of_a_shard_is_one_of_the_model():
    model = Weights([(4, 4)])
    (bucket,) = divide(model, bucket_bytes=1000, rank=0, num_ranks=1)
    with torch.no_grad():
        bucket.parameter_shards[0].weight.fill_(2.0)
    assert model.tensors[0].tolist() == [[2.0] * 4] * 4


def test_tied_and_frozen_weights():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    names = [slot.name for bucket in divide(model, bucket_bytes=1, rank=0, num_ranks=1) for slot in bucket.slots]
    assert names == ["0.weight"]
    assert model[0].weight is model[1].weight


@pytest.fixture(scope="module")
def alone():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("every_micro_batch", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_add_up_and_buffers_are_few(alone, overlap, every_micro_batch):
    inner = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    rows = torch.randn(6, 8)
    inner(rows).square().sum().backward()
    expected = [parameter.grad for parameter in inner.parameters()]
    inner.zero_grad()
    sharded = ShardedModel(
        inner, alone, bucket_bytes=1, most_live_buckets=3, every_micro_batch=every_micro_batch, overlap=overlap
    )
    for i, part in enumerate(rows.split(2)):
        with sharded.micro_batch(is_last=i == 2):
            sharded(part).square().sum().backward()
    whole = {id(part.slot.parameter): part.weight.grad for part in sharded.parameter_shards()}
    for parameter, gradient in zip(inner.parameters(), expected, strict=True):
        torch.testing.assert_close(whole[id(parameter)].view(parameter.shape), gradient)
        assert parameter.grad is None
    assert len(sharded.buckets) == 24
    assert len(sharded._reduction._free) <= 3


class LateWork:
    """A gather whose result is available only after `wait`."""

    def __init__(self, output):
        self._output, self._result = output, output.clone()
        output.fill_(float("nan"))

    def wait(self):
        self._output.copy_(self._result)


class Attending(nn.Module):
    """A model in which `nn.MultiheadAttention` reads its output projection's weights without calling that module."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2), nn.Linear(8, 1)

    def forward(self, rows):
        return self.head(self.attention(rows, rows, rows)[0])


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_no_weight_is_read_before_it_is_gathered(alone, monkeypatch, bucket_bytes):
    inner, rows = Attending(), torch.randn(3, 8)
    sharded = ShardedModel(
        inner, alone, bucket_bytes=bucket_bytes, most_live_buckets=3, every_micro_batch=False, overlap=True
    )
    with sharded.micro_batch(is_last=True):
        expected = sharded(rows)
        expected.sum().backward()
    monkeypatch.setattr(sharded_module, "all_gather", lambda output, *_, **__: LateWork(output))
    sharded.gather_updates()
    assert all(bool(parameter.isnan().all()) for parameter in inner.parameters())
    assert torch.equal(sharded(rows), expected)
    sharded.wait_for_weights()
    assert not any(bool(parameter.isnan().any()) for parameter in inner.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_is_passed_on(alone, training):
    inner = nn.Linear(2, 2)
    sharded = ShardedModel(
        inner, alone, bucket_bytes=1, most_live_buckets=3, every_micro_batch=False, overlap=True
    ).train(training)
    assert (sharded.training, inner.training) == (training, training)
