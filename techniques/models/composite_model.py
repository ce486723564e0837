"""Composite models: the models of several jobs that train a common component, trained as one model by one job.

Update rule "sum". In each step every job j contributes its own global batch B_j, the one that it would train on alone,
and its own loss L_j, the mean over B_j by the job's own count (of labels, tokens or rows). The step minimises

    L = sum over j of w_j L_j

So a parameter of the component gets the sum of the jobs' gradients, each times its weight w_j; a job's other parameters
get w_j times the job's own gradient. The norm by which gradients are clipped is that of all parameters, of which those
of the component count once. Then there is one optimizer step. The component begins with the weights, and has the
config, of the first job's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.codec import from_json
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.job import Job
from ringmaster.techniques.models.build import build_model, skeleton
from ringmaster.techniques.models.model_folders import few
from ringmaster.techniques.training.bound_loss import BoundLoss, SampleTensors, SumAndCount, bind_loss
from ringmaster.techniques.training.dropout import current

NUM_SAMPLES, COUNT = "samples", "count"


def composite_model(
    *, paths: Sequence[str], weights: Sequence[float], parts: Sequence[Mapping[str, Any]]
) -> CompositeModel:
    """Returns the composite of fresh or pretrained models; the factory of a composed job.

    paths: the path of the component in each model. weights: the factor of each job's loss.
    parts: each job and its prepared data, as in `PreparedData.parts`.
    Raises ValueError, with all faults, where the models have no such component in common.
    """
    jobs = [from_json(Job, part["job"]) for part in parts]
    data = [from_json(PreparedData, part["data"]) for part in parts]
    is_meta = torch.empty(0).device.type == "meta"  # as within `skeleton`
    models = [
        skeleton(job.model, own) if is_meta else build_model(job.model, data=own, seed=job.seed)
        for job, own in zip(jobs, data, strict=True)
    ]
    share_component(models, paths, names=[job.name for job in jobs])
    losses = [
        bind_loss(job.loss, model, job.model, options=job.loss_options) for job, model in zip(jobs, models, strict=True)
    ]
    return CompositeModel(models, CompositeLoss.of(losses, weights, names=[job.name for job in jobs]))


def share_component(models: Sequence[nn.Module], paths: Sequence[str], *, names: Sequence[str]) -> None:
    """Puts the first model's component, the module at the first path, into the other models.

    names: of the models' jobs, for messages. Raises ValueError, with all faults, where the modules are not alike.
    """
    modules, faults = [dict(model.named_modules()) for model in models], []
    for own, path, name in zip(modules, paths, names, strict=True):
        if path not in own:
            there = ", ".join(name for name in own if name and name.count(".") <= path.count("."))
            faults.append(f"job {name}: its model has no module {path!r}. To fix: name one of {there}")
    if not faults:
        first = modules[0][paths[0]]
        for own, path, name in zip(modules[1:], paths[1:], names[1:], strict=True):
            if wrong := _differences(first, own[path]):
                faults.append(
                    f"job {name}: {path} is not like {paths[0]} of {names[0]}: {few(wrong)}. To fix: give both models "
                    "the same sizes there, or share a smaller module"
                )
    if faults:
        raise ValueError("; ".join(f"shared_components: {fault}" for fault in faults))
    for model, path in zip(models[1:], paths[1:], strict=True):
        model.set_submodule(path, first)
        if hasattr(model, "tie_weights"):  # a head may have the weights of an embedding inside the component
            model.tie_weights()  # type: ignore[operator]


def _differences(one: nn.Module, other: nn.Module) -> list[str]:
    """Returns how two modules differ: in their class, and in the names and shapes of parameters and buffers."""
    if type(one) is not type(other):
        return [f"it is a {type(other).__name__} and not a {type(one).__name__}"]
    shapes = [{name: list(tensor.shape) for name, tensor in module.state_dict().items()} for module in (one, other)]
    return [
        f"{name} is {shapes[1].get(name, 'missing')}, not {shapes[0].get(name, 'there')}"
        for name in sorted({**shapes[0], **shapes[1]})
        if shapes[0].get(name) != shapes[1].get(name)
    ]


class CompositeModel(nn.Module):
    """Several models with a common module, each called on its own rows. Their modules are `part0`, `part1`, ...

    own_loss: the loss of all, and with it what each model's `forward` takes.
    """

    def __init__(self, models: Sequence[nn.Module], loss: CompositeLoss) -> None:
        super().__init__()
        for index, model in enumerate(models):
            self.add_module(f"part{index}", model)
        self.own_loss = loss

    def part(self, index: int) -> nn.Module:
        """Returns one of the models."""
        return self.get_submodule(f"part{index}")

    def forward(self, **batch: Tensor) -> list[Any]:
        """Returns each model's output. batch: {"part0.NAME": [samples, rows of a sample, ...]}."""
        draws, outputs = current(), []
        for index, loss in enumerate(self.own_loss.parts):
            rows = rows_of_part(batch, index)
            num_rows = len(next(iter(rows.values()))) // len(next(iter(batch.values())))
            with nullcontext() if draws is None else draws.divided(num_rows):
                outputs.append(self.part(index)(**loss.forward_inputs(rows)))
        return outputs


def rows_of_part(batch: SampleTensors, index: int) -> dict[str, Tensor]:
    """Returns the rows of one model in a composite batch, as its job alone would have them: {NAME: [rows, ...]}."""
    prefix = f"part{index}."
    return {k.removeprefix(prefix): value.flatten(0, 1) for k, value in batch.items() if k.startswith(prefix)}


@dataclass(frozen=True, kw_only=True)
class CompositeLoss(BoundLoss):
    """The weighted sum of the losses of the jobs, each a mean over its own global batch.

    parts, weights, names: of each job its loss, the loss's factor, and the job's name.
    known: totals of the global batch that the rows belong to; None where the rows are the global batch.
    """

    parts: tuple[BoundLoss, ...]
    weights: tuple[float, ...]
    names: tuple[str, ...]
    known: Mapping[str, float] | None = None

    @classmethod
    def of(cls, parts: Sequence[BoundLoss], weights: Sequence[float], *, names: Sequence[str]) -> CompositeLoss:
        """Returns the loss of jobs."""
        return cls(compute=None, inputs=None, parts=tuple(parts), weights=tuple(weights), names=tuple(names))

    def __call__(self, output: Any, batch: SampleTensors) -> SumAndCount:
        """Returns the batch's summand of the loss times the number of samples of the global batch, and its samples.

        Raises ValueError where a job has no label in the global batch, or its labels do not determine its count.
        """
        totals, num_samples = self.known, len(next(iter(batch.values())))
        if totals is None:
            totals = self.totals(batch)
        sums: list[Tensor] = []
        for index, (part, weight, name) in enumerate(zip(self.parts, self.weights, self.names, strict=True)):
            prefix, rows = f"{index}.", rows_of_part(batch, index)
            given = {key.removeprefix(prefix): value for key, value in totals.items() if key.startswith(prefix)}
            if not given[COUNT]:
                raise ValueError(
                    f"job {name}: none of the samples of a step has a label. To fix: raise its data.seq_len or its "
                    "global_batch_size"
                )
            part_sum, count = part.given(given)(output[index], rows)
            if self.known is None and float(count) != given[COUNT]:
                raise ValueError(
                    f"job {name}: its loss counts {float(count):g} in {given[COUNT]:g} labels or rows, and a composite "
                    "must know the count before the forward. To fix: take a loss that counts labels or rows"
                )
            sums.append(part_sum * (weight / given[COUNT]))
        return torch.stack(sums).sum() * totals[NUM_SAMPLES], num_samples

    @property
    def total_names(self) -> tuple[str, ...]:
        """The number of samples, and of each job the count and what its loss takes."""
        of_parts = (f"{i}.{name}" for i, part in enumerate(self.parts) for name in (COUNT, *part.total_names))
        return NUM_SAMPLES, *of_parts

    def totals(self, batch: SampleTensors) -> Mapping[str, float]:
        """Returns this batch's summands."""
        result = {NUM_SAMPLES: float(len(next(iter(batch.values()))))}
        for index, part in enumerate(self.parts):
            rows = rows_of_part(batch, index)
            own = {COUNT: float(part.num_counted(rows)), **part.totals(rows)}
            result |= {f"{index}.{name}": value for name, value in own.items()}
        return result

    def given(self, totals: Mapping[str, float]) -> BoundLoss:
        """Returns the loss of rows of a global batch with these totals."""
        return replace(self, known=totals) if totals else self
