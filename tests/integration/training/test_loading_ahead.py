"""Trainings whose samples are loaded ahead: the same weights as without, whatever is drawn, divided or interrupted."""

import random

import numpy as np
import pytest
import torch

from ringmaster.codec import to_json
from ringmaster.techniques import DataSpec, EvaluationSpec, Job, ModelSpec, registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.processes.order import TRAIN, GangOrder, Slot
from ringmaster.techniques.processes.ranks import alone
from ringmaster.techniques.training import batch_loader
from ringmaster.techniques.training.trainer import Trainer
from tests.integration.workbench import GPT2, GPT2_WITH_DROPOUT, SINGLE, is_bit_equal
from tests.matrix import matrix


class Tokens:
    """Samples; some of them draw from the generators, or are damaged."""

    def __init__(self, *, draws=False):
        self.draws, self.damaged = draws, -1

    def __len__(self):
        return 128

    def __getitem__(self, index):
        if index == self.damaged:
            raise ValueError(f"sample {index} is damaged")
        row = torch.randint(50, (12,), generator=torch.Generator().manual_seed(index))
        if self.draws:
            row[0], row[1] = torch.randint(50, ()), random.randrange(50)
            row[2] = np.random.randint(50)
        return {"input_ids": row, "labels": row}


def tokens(**options):
    return Tokens(**options), Tokens(**options)


@pytest.fixture
def trainer(tmp_path):
    """Returns a trainer of a job on tokens."""

    def of(model=GPT2_WITH_DROPOUT, *, micro_batch=3, **options):
        data = DataSpec(factory=f"{__name__}:tokens", kwargs=options)
        model = ModelSpec(architecture=model.architecture, config={**model.config, "vocab_size": 50, "n_positions": 12})
        job = Job(
            name="a",
            model=model,
            data=data,
            global_batch_size=8,
            num_steps=12,
            evaluation=EvaluationSpec(max_batches=2),
        )
        order = GangOrder(
            purpose=TRAIN,
            job=job,
            technique=SINGLE.path,
            config={"micro_batch": micro_batch, "recompute": "none"},
            slots=(Slot(kind="cpu", index=0),),
            folder=str(tmp_path),
            cache_dir=str(tmp_path),
            data=to_json(prepare(data, cache_dir=tmp_path)),
            last_step=12,
        )
        return Trainer(order, registry.load(SINGLE.path), alone(torch.device("cpu")), beat=lambda: None)

    return of


def weights_of(trainer, *, until=12, evaluated=(5,)):
    metrics = []
    while trainer.next_step < until:
        trainer.step()
        if trainer.next_step in evaluated:
            metrics.append(trainer.evaluate())
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}, metrics


@pytest.mark.parametrize(
    "options",
    matrix(
        [{}, {"draws": True}, {"model": GPT2}, {"micro_batch": 8}],
        quick=[{}, {"draws": True}],
        ids=["dropout", "drawn samples", "no dropout", "whole batches"],
    ),
)
def test_weights_have_the_same_bits(trainer, tmp_path, monkeypatch, options):
    monkeypatch.setattr(batch_loader, "SLOW_S", 1e3)
    plain, metrics = weights_of(trainer(**options))
    monkeypatch.setattr(batch_loader, "SLOW_S", 0.0)
    first = trainer(**options)
    weights_of(first, until=7)
    assert first._loader.is_ahead is not options.get("draws", False)
    first.save(tmp_path / "checkpoints")
    second = trainer(**options)  # continues from a checkpoint, as after a stop command
    second.restore(tmp_path / "checkpoints")
    resumed, _ = weights_of(second)
    assert is_bit_equal(plain, resumed)
    whole, measured = weights_of(trainer(**options))
    assert is_bit_equal(plain, whole) and measured == metrics


def test_a_damaged_sample_fails_its_own_step(trainer, monkeypatch):
    monkeypatch.setattr(batch_loader, "SLOW_S", 0.0)
    damaged = trainer()
    damaged._training.damaged = damaged._sampler.indices(6)[2]
    with pytest.raises(ValueError, match=r"^sample \d+ is damaged$"):
        weights_of(damaged, evaluated=(5, 6))
    assert damaged.next_step == 6
