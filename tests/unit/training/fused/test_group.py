"""The step of a group is one step of each job, whatever happens to another job."""

import math
from types import SimpleNamespace

import torch
from torch import nn

from ringmaster.techniques.multi_adapter.multi_adapter_base import BackwardResult
from ringmaster.techniques.training.fused.group import FusedGroup


class Taught:
    """Replaces a base. It returns the given loss sum and count of every job."""

    model = nn.Module()

    def __init__(self, *learnt):
        self._learnt = [
            BackwardResult(loss_sum=torch.tensor(total), count=count, idle=frozenset()) for total, count in learnt
        ]

    def learn(self, parts, losses):
        return self._learnt


class Counting:
    """Replaces a member of a group. It counts its updates."""

    job = SimpleNamespace(global_batch_size=1)

    def __init__(self, name):
        self.name, self.next_step = name, 0

    def batch(self):
        return {}

    def part(self, batch):
        return None

    def loss(self, output, batch):
        raise AssertionError("the replaced base computes no loss")

    def expect_gradients(self):
        pass

    def update(self, *, count, idle):
        self.next_step += count / count


def test_a_batch_without_labels_is_that_jobs_affair_alone():
    group = FusedGroup(Taught((2.0, 2.0), (0.0, 0.0), (3.0, 1.0)))
    group.members = [Counting(name) for name in "abc"]
    reports = group.step()
    assert [member.next_step for member in group.members] == [1, 0, 1]
    assert math.isnan(reports["b"].loss) and reports["b"].count == 0
    assert (reports["a"].loss, reports["c"].loss) == (1.0, 3.0)
