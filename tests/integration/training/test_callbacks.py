"""Parts of features in training: what they are shown, in which order, and whether they change what they may."""

import pytest
import torch

from ringmaster.techniques import registry
from ringmaster.techniques.processes.ranks import alone
from ringmaster.techniques.training import callbacks
from ringmaster.techniques.training.callbacks import TrainerCallback
from ringmaster.techniques.training.trainer import Trainer
from ringmaster.techniques.training.update_rule import UpdateRule
from tests.integration.workbench import SINGLE


class Recorder(TrainerCallback):
    """Notes the hooks that are called, for all recorders of a test."""

    called: list[str]

    @classmethod
    def is_for(cls, state):
        return True

    def __getattribute__(self, name):
        if name in vars(TrainerCallback) and not name.startswith("_"):
            Recorder.called.append(name)
        return super().__getattribute__(name)


class Zeroes(TrainerCallback):
    """Zeroes all gradients."""

    @classmethod
    def is_for(cls, state):
        return True

    def before_training(self, trainer):
        self.parameters = trainer.parameters

    def change_gradients(self):
        for parameter in self.parameters:
            parameter.grad.zero_()


class GradientLength(Zeroes):
    """Measures the squared length of the mean gradient, and sums the number of ranks."""

    def summed_values(self):
        return (1.0, 2.0)

    def observe_gradients(self, sums, *, step, count, to_mean):
        return (*sums, step, sum(float((to_mean * p.grad).square().sum()) for p in self.parameters))

    def change_gradients(self):
        pass


class NoUpdate(UpdateRule):
    """Drops the gradients."""

    @classmethod
    def is_for(cls, job):
        return job.name == "idle"

    def is_common(self, step):
        return False


class Feature:
    """A feature's module `trainer`."""

    TRAINER_CALLBACKS: tuple[type, ...] = ()
    UPDATE_RULES = (NoUpdate,)


@pytest.fixture
def trainer_with(bench, tmp_path, monkeypatch):
    def make(*classes, **changes):
        monkeypatch.setattr(Feature, "TRAINER_CALLBACKS", classes)
        monkeypatch.setattr(callbacks.features, "modules", lambda kind, **_: (Feature,) if kind == "trainer" else ())
        order = bench.order(bench.job(**changes), SINGLE, tmp_path)
        return Trainer(order, registry.load(SINGLE.path), alone(torch.device("cpu")), beat=lambda: None)

    return make


def values(trainer):
    return [parameter.detach().clone() for parameter in trainer.parameters]


def test_gradients_are_observed_before_any_part_changes_them(trainer_with):
    trainer = trainer_with(Zeroes, GradientLength)
    before, report = values(trainer), trainer.step((7.0,))

    ((one, two, step, length),) = report.measurements
    assert (one, two, step, report.vote_sums) == (1.0, 2.0, 0, (7.0,)) and length > 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))


def test_hooks_are_called_in_the_order_in_which_they_are_declared(trainer_with):
    Recorder.called = []
    trainer = trainer_with(Recorder)
    trainer.step()
    declared = list(vars(TrainerCallback))
    called = list(dict.fromkeys(Recorder.called))
    assert called == sorted(called, key=declared.index)
    assert {"change_model", "after_layout", "observe_gradients", "after_step"} <= {*called}


def test_a_job_has_one_update_rule(trainer_with):
    trainer = trainer_with(name="idle")
    before = values(trainer)
    trainer.step()
    assert isinstance(trainer.rule, NoUpdate)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))
    assert type(trainer_with(name="other").rule) is UpdateRule
