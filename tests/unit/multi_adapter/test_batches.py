"""Batches of several adapters: which adapters are computed at once, and which rows belong to which."""

import pytest
import torch

from ringmaster.techniques.multi_adapter.adapter_batches import AdapterBatch, FusedBatch, in_chunks, in_order
from ringmaster.techniques.multi_adapter.adapter_runs import AdapterModules, LoraMatrices, ScalingFactors


def part(*, length=16, num_rows=1, rank=2, sites=("q",), scales=None):
    if scales is None:
        at = {site: LoraMatrices(a=torch.zeros(rank, 4), b=torch.zeros(4, rank), scaling=1.0) for site in sites}
        layout = tuple((site, (rank, 4)) for site in sites)
    else:
        shape = (1, 4) if scales == "inputs" else (4, 1)
        at = {site: ScalingFactors(values=torch.ones(shape), of_inputs=scales == "inputs") for site in sites}
        layout = tuple((site, shape) for site in sites)
    inputs = {"input_ids": torch.zeros(num_rows, length, dtype=torch.int64)}
    return AdapterBatch(adapter_modules=AdapterModules(at=at), inputs=inputs, layout=layout)


def test_chunks_are_even_and_hold_every_part_once():
    parts = [part() for _ in range(17)]
    chunks = list(in_chunks(parts, range(17), tokens_at_once=8 * 16))
    assert [i for chunk in chunks for i in chunk] == list(range(17))
    assert sorted(len(chunk) for chunk in chunks) == [5, 6, 6]
    assert list(in_chunks(parts, range(17), tokens_at_once=None)) == [list(range(17))]
    assert [len(chunk) for chunk in in_chunks(parts[:3], range(3), tokens_at_once=1)] == [1, 1, 1]


def test_adapters_of_one_rank_and_size_lie_side_by_side():
    parts = [part(), part(rank=3), part(), part(length=24), part(sites=("k",))]
    ordered = [parts[i] for i in in_order(parts)]
    batch = FusedBatch(ordered, [each.share(is_packed=True) for each in ordered])
    total = sum(batch.sizes)
    runs = batch.route("q", total, 1)
    assert sorted((run.num_adapters, run.num_rows) for run in runs) == [(1, 16), (1, 24), (2, 16)]
    covered = sorted(row for run in runs for row in range(run.start, run.stop))
    assert len(covered) == len(set(covered)) == total - 16
    assert list(batch.route("v", total, 1)) == []
    with pytest.raises(ValueError, match="whose they are"):
        batch.route("q", total + 1, 1)


def test_each_kind_lies_beside_its_like():
    parts = [part(scales=scales) for scales in (None, "inputs", "outputs", None, "outputs", "inputs")]
    ordered = [parts[i] for i in in_order(parts)]
    runs = FusedBatch(ordered, [each.share(is_packed=True) for each in ordered]).route("q", 6 * 16, 1)
    for found in (runs.products, runs.of_inputs, runs.of_outputs):
        assert [(run.num_adapters, run.num_rows) for run in found] == [(2, 16)]
    covered = sorted(row for run in runs for row in range(run.start, run.stop))
    assert covered == list(range(6 * 16))


def test_stacked_samples_are_told_apart_by_the_first_dimension():
    """Rows that all samples share, such as relative positions, belong to no adapter, however many they are."""
    parts = [part(num_rows=4, length=1) for _ in range(2)]
    batch = FusedBatch(parts, [each.share(is_packed=False) for each in parts], is_packed=False)
    assert [run.num_rows for run in batch.route("q", 8 * 12, 8)] == [4 * 12]
    with pytest.raises(ValueError, match="whose they are"):
        batch.route("q", 8 * 12, 1)
    alone = FusedBatch(parts[:1], [parts[0].share(is_packed=False)], is_packed=False)
    assert [(run.start, run.num_rows) for run in alone.route("q", 510, 1)] == [(0, 510)]
