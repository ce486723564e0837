"""Faults of samples name the loss that reads them."""

import pytest
import torch
from torch import nn

from ringmaster.techniques import DataSpec, Job, ModelSpec
from ringmaster.techniques.probing.faults import faults_of_samples
from ringmaster.techniques.training.bound_loss import BoundLoss


@pytest.mark.parametrize(
    ("kind", "shape", "entry", "remedy"),
    [
        ("unpaired-preference", (2, 4), "desirable", "set loss to kto"),
        ("rag", (2, 4), "passage_scores", "set loss to rag-sequence"),
        ("comparison", (2, 2, 4), "input_ids", "one of pairs, such as bradley-terry"),
        ("embedding", (2, 2, 4), "input_ids", "one of pairs, such as contrastive"),
    ],
)
def test_samples_that_another_loss_reads(kind, shape, entry, remedy):
    data = DataSpec(kind=kind, path="a.jsonl")
    job = Job(name="a", model=ModelSpec(architecture="LlamaForCausalLM"), data=data, global_batch_size=2, num_steps=1)
    batch = {entry: torch.ones(2), "input_ids": torch.zeros(shape, dtype=torch.long)}
    loss = BoundLoss(compute=None, inputs=frozenset({"input_ids"}))
    (fault,) = faults_of_samples(job, nn.Linear(1, 1), loss, batch)
    assert fault.startswith("loss: samples ") and remedy in fault
