"""Factories for probed jobs: data sets with various faults, and losses and models that mix samples of a batch."""

import torch
from torch import nn
from torch.nn import functional

from ringmaster.techniques.metric import Metric


class Samples:
    """A number of samples, each made by a function of its index."""

    def __init__(self, make, number=16):
        self._make, self._number = make, number

    def __len__(self):
        return self._number

    def __getitem__(self, index):
        return self._make(index)


def _both(make):
    return Samples(make), Samples(make)


def classes(**changes):
    """Samples of eight tokens with one of two classes. `changes` replace tensors; None leaves a tensor out."""

    def make(index):
        sample = {"input_ids": torch.arange(8) + index, "labels": torch.tensor(index % 2)}
        sample |= {name: torch.tensor(value) for name, value in changes.items() if value is not None}
        return {name: tensor for name, tensor in sample.items() if name not in changes or changes[name] is not None}

    return _both(make)


def late_class():
    """A data set with a third class in the last samples only."""
    return _both(lambda index: {"input_ids": torch.arange(8), "labels": torch.tensor(2 if index > 12 else 0)})


def masked():
    """Samples of which every fourth token is masked, and has a label."""

    def make(index):
        tokens, at = torch.arange(24) + index, torch.arange(24) % 4 == 0
        return {"input_ids": torch.where(at, 1, tokens), "labels": torch.where(at, tokens, -100)}

    return _both(make)


def renamed():
    return _both(lambda index: {"tokens": torch.arange(8), "labels": torch.tensor(0)})


def tuples():
    return _both(lambda index: (torch.arange(8), torch.tensor(0)))


def uneven():
    return _both(lambda index: {"input_ids": torch.arange(8 + index), "labels": torch.tensor(0)})


def one_set():
    return Samples(lambda index: {})


def failing():
    raise KeyError("no such column")


def points():
    return _both(lambda index: {"point": torch.linspace(index, index + 1, 4), "target": torch.tensor(1.0)})


def narrow():
    return nn.Linear(5, 1)


class _Squared(nn.Module):
    def __init__(self, *, normalised):
        super().__init__()
        self.line = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if normalised else nn.Tanh(), nn.Linear(4, 1))

    def forward(self, point):
        return self.line(point)


def squared(normalised=False):
    return _Squared(normalised=normalised)


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.scale = nn.Linear(4, 1), nn.Parameter(torch.tensor(2.0))

    def forward(self, point):
        return self.scale * self.line(point)


def scaled():
    return _Scaled()


def error(output, batch):
    return functional.mse_loss(output.squeeze(-1), batch["target"], reduction="sum"), len(output)


def mean_error(output, batch):
    """A loss that returns a mean instead of a sum, which is correct for an undivided batch only."""
    return functional.mse_loss(output.squeeze(-1), batch["target"]), 1


def contrast(output, batch):
    """A loss that contrasts each sample with all others of the batch."""
    ends = functional.normalize(output.logits[:, -1], dim=-1)
    return functional.cross_entropy(5 * ends @ ends.T, torch.arange(len(ends)), reduction="sum"), len(ends)


def no_gradient(output, batch):
    return output.detach().sum(), len(output)


def long_prompts(num_common=50, seq_len=96):
    """Pairs that begin with the same prompt of many tokens; the first pair is of two equal sequences."""

    def make(index):
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 64, (2, seq_len), generator=draw)
        ids[1, : seq_len if index == 0 else num_common] = ids[0, : seq_len if index == 0 else num_common]
        labels = ids.clone()
        labels[:, :num_common] = -100
        return {"input_ids": ids, "labels": labels}

    return _both(make)


class Unmeasurable(Metric):
    """A metric whose value is not a number."""

    name = "unmeasurable"
    higher_is_better = True
    sums = ("rows",)

    def compute_sums(self, outputs):
        return {"rows": torch.ones(len(outputs.batch["input_ids"]))}

    def value(self, sums):
        return {"rows": 1.0}


class Garbled(Exception):
    """An exception whose text cannot be read."""

    def __str__(self):
        raise KeyboardInterrupt


class OddMetric(Metric):
    """A metric whose sums of a batch are what a test sets."""

    name = "odd"
    higher_is_better = True
    sums = ("odd", "rows")
    made = staticmethod(lambda outputs, num_rows: None)

    def compute_sums(self, outputs):
        num_rows = len(outputs.batch["input_ids"])
        made = OddMetric.made(outputs, num_rows)
        return made if isinstance(made, (dict, list)) else {"odd": made, "rows": torch.ones(num_rows)}

    def value(self, sums):
        return sums["odd"].mean() / sums["rows"]
