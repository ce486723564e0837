"""The workers of a job with local updates that one rank holds, and their exchange: see `job.LocalUpdates`.

What is exchanged is added in the order of the workers, so that its bits do not depend on where the workers are. As in a
ring, a rank sends each other rank its part of the summands, adds the part that is its own, and gathers the sums.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringmaster.compat.torch import foreach_add_, foreach_copy_, foreach_div_, foreach_neg_
from ringmaster.compat.torch_distributed import all_gather
from ringmaster.features.local_updates.job import LocalUpdates
from ringmaster.techniques.checkpoints.checkpoint import Checkpoint
from ringmaster.techniques.checkpoints.state import Reader
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import feature_in
from ringmaster.techniques.processes.order import TRIAL
from ringmaster.techniques.training.callbacks import LossSums, StepPart, TrainerContext
from ringmaster.techniques.training.update_rule import UpdateRule

PIECE = 1 << 20
"""Elements that are exchanged at once: a rank shows between pieces that it is alive, however slow its link is."""
WORKERS, OUTER = "workers/", "outer/"
"""Prefixes of tensors in checkpoints: `workers/<worker>/...`, and `outer/<parameter>/<state>`."""


class LocalUpdateRule(UpdateRule):
    """Each worker takes an optimizer step on its part of the batch; in the warm-up all take one together."""

    def __init__(self, trainer: TrainerContext) -> None:
        super().__init__(trainer)
        spec, ranks = trainer.job.feature(LocalUpdates), trainer.ranks
        assert spec is not None
        num_own = spec.workers // ranks.num_ranks
        own = range(ranks.rank * num_own, (ranks.rank + 1) * num_own)
        self._spec, self.parts = spec, [StepPart(number, spec.workers) for number in own]
        names = {parameter: name for name, parameter in trainer.unwrapped.named_parameters()}
        self._workers = LocalWorkers(
            # A trial measures the steps inside a round, and `unmeasured_s` what is exchanged.
            replace(spec, warmup_steps=0, sync_every=sys.maxsize) if trainer.order.purpose == TRIAL else spec,
            num_steps=trainer.job.total_steps,
            parameters={names[parameter]: parameter for parameter in trainer.parameters},
            optimizer=trainer.optimizer,
            build=trainer.build_optimizer,
            own=own,
            group=None if ranks.mesh is None else ranks.mesh.get_group(),
            beat=trainer.beat,
        )

    @classmethod
    def is_for(cls, job: Job) -> bool:
        """Returns whether the job has local updates."""
        return job.feature(LocalUpdates) is not None

    @classmethod
    def refuse(cls, trainer: TrainerContext, reader: Reader, checkpoint: Checkpoint) -> None:
        """Raises ValueError where a checkpoint has workers, or the job has them from now on."""
        job, step = trainer.job, checkpoint.manifest.step
        if reader.names_under(WORKERS):
            raise ValueError(
                f"{checkpoint.location} has a state for each worker of local updates. To fix: give job "
                f"{job.name} the local_updates of the job that wrote it"
            )
        if feature_in(job.phase(step).features, LocalUpdates) is not None and step < trainer.order.last_step:
            assert trainer.technique is not None
            raise ValueError(
                f"job {job.name} has local updates from step {job.phase(step).first_step}, of which "
                f"{trainer.technique.name} knows nothing. To fix: train it on with the technique local"
            )

    def compute(self, trainer: TrainerContext) -> LossSums:
        """Takes a step of each of the rank's workers, or in the warm-up their common gradient."""
        sums = LossSums(0.0, 0.0, 0)
        for part, (_, optimizer) in zip(self.parts, self._workers.each(trainer.next_step), strict=True):
            own = trainer.compute_gradients(part)
            if self._workers.warms_up(trainer.next_step):
                self._workers.take_gradients()
            else:  # the gradients of a part without labels are zeros
                trainer.update(optimizer, own.loss_count or 1.0)
            sums = LossSums(*(total + value for total, value in zip(sums, own, strict=True)))
        return sums

    def is_common(self, step: int) -> bool:
        """Returns whether the step belongs to the warm-up."""
        return self._workers.warms_up(step)

    def after_update(self, step: int) -> None:
        """Takes the outer step where a round ends."""
        self._workers.end_step(step)

    def before_evaluation(self) -> None:
        """Gives the model the weights of the last outer step."""
        self._workers.load_anchor()

    def written(self, trainer: TrainerContext) -> dict[str, Tensor] | None:
        """Returns, from the first round on, the state of the rank's workers, and on rank 0 what all share."""
        if not self._workers.has_begun:
            return None
        shared = {**trainer.model_state(), **self._workers.shared_state()}
        return (shared if trainer.ranks.rank == 0 else {}) | self._workers.own_state(trainer.next_step)

    def restore(self, trainer: TrainerContext, reader: Reader, checkpoint: Checkpoint) -> None:
        """Loads the workers' states."""
        self._workers.restore(reader, checkpoint.manifest.step)

    def unmarked_chunk(self, trainer: TrainerContext) -> int:
        """Returns the job's own: a checkpoint that names no chunk is of a plain job."""
        return trainer.micro_batch

    def unmeasured_s(self, trainer: TrainerContext) -> float:
        """Returns the seconds that exchanges between workers add to a step on average."""
        ranks = trainer.ranks
        ranks.agree(True)
        started_s = time.perf_counter()
        self._workers.synchronize()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = ranks.max(time.perf_counter() - started_s)
        return seconds * self._spec.exchanges_a_step(num_steps=trainer.job.total_steps)


UPDATE_RULES = (LocalUpdateRule,)


@dataclass(frozen=True, kw_only=True)
class LocalWorker:
    """A worker: its number in the job, its values of the trained parameters, and its optimizer."""

    number: int
    values: list[Tensor]
    optimizer: torch.optim.Optimizer


class LocalWorkers:
    """The workers of a rank, each with weights and an optimizer of its own from the first round on.

    spec: of the job, with `num_steps` steps.
    parameters: the trained parameters by name.
    optimizer: of the steps of the warm-up. `build` makes another one of the same parameters.
    own: the numbers of the rank's workers. group: the ranks, None for a single one.
    """

    def __init__(
        self,
        spec: LocalUpdates,
        *,
        num_steps: int,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        build: Callable[[], torch.optim.Optimizer],
        own: range,
        group: dist.ProcessGroup | None,
        beat: Callable[[], None],
    ) -> None:
        self.spec, self._num_steps, self._group, self._beat = spec, num_steps, group, beat
        self._names, self._parameters = [*parameters], [*parameters.values()]
        self._first, self._build, self._own = optimizer, build, own
        self._gradients: list[list[Tensor]] = []
        self._workers: list[LocalWorker] = []
        self._anchor: list[nn.Parameter] = []
        self._outer: torch.optim.Optimizer | None = None

    def warms_up(self, step: int) -> bool:
        """Returns whether all workers take the step `step` together."""
        return step < self.spec.warmup_steps

    def each(self, step: int) -> Iterator[tuple[int, torch.optim.Optimizer]]:
        """Yields the number and the optimizer of each of the rank's workers, with the model's weights set to its own.

        In the warm-up they have the weights and the optimizer in common, and `take_gradients` follows each of them.
        """
        if self.warms_up(step):
            yield from ((number, self._first) for number in self._own)
            return
        self.begin()
        for worker in self._workers:
            self._load(worker.values)
            yield worker.number, worker.optimizer

    def begin(self) -> None:
        """Begins the first round, in which each worker starts from the present weights and optimizer state."""
        if self._workers:
            return
        spec = self.spec
        self._anchor = [nn.Parameter(_copy(parameter)) for parameter in self._parameters]
        self._outer = torch.optim.SGD(
            self._anchor,
            lr=spec.outer_lr,
            momentum=spec.outer_momentum,
            nesterov=spec.outer_momentum > 0,
            foreach=True,
        )
        for number in self._own:
            optimizer = self._first if number == self._own[0] else self._build()
            if optimizer is not self._first:
                for parameter, state in self._first.state.items():
                    optimizer.state[parameter] = {
                        key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()
                    }
            values = [_copy(parameter) for parameter in self._parameters]
            self._workers.append(LocalWorker(number=number, values=values, optimizer=optimizer))

    def take_gradients(self) -> None:
        """Takes the gradients of a worker in the warm-up; after the last one of the rank, all have their sum."""
        self._gradients.append([_gradient(parameter) for parameter in self._parameters])
        if len(self._gradients) == len(self._own):
            for parameter, total in zip(self._parameters, self._exchange(self._gradients), strict=True):
                parameter.grad = total
            self._gradients.clear()

    def end_step(self, step: int) -> None:
        """Takes the outer step where a round ends after `step` steps."""
        if not self.warms_up(step - 1) and self.spec.ends_round(step, num_steps=self._num_steps):
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Takes the outer step on the mean difference of the workers' weights from those at the round's start."""
        assert self._outer is not None
        for worker in self._workers:
            foreach_neg_(worker.values)
            foreach_add_(worker.values, self._anchor_values)
        totals = self._exchange([worker.values for worker in self._workers])
        foreach_div_(totals, float(self.spec.workers))
        for anchor, mean in zip(self._anchor, totals, strict=True):
            anchor.grad = mean
        self._outer.step()
        self._outer.zero_grad()
        for worker in self._workers:
            foreach_copy_(worker.values, self._anchor_values)

    def load_anchor(self) -> None:
        """Sets the model's weights to those of the last outer step."""
        if self._workers:
            self._load(self._anchor_values)

    def shared_state(self) -> dict[str, Tensor]:
        """Returns what is equal on all ranks: the weights of the last outer step, and the outer optimizer's state."""
        if self._outer is None:
            return {}
        state = {f"model/{name}": anchor.data for name, anchor in zip(self._names, self._anchor, strict=True)}
        for name, anchor in zip(self._names, self._anchor, strict=True):
            state |= {f"{OUTER}{name}/{key}": value for key, value in _tensors(self._outer, anchor).items()}
        return state

    def own_state(self, step: int) -> dict[str, Tensor]:
        """Returns the states of the rank's workers after `step` steps: their weights only inside a round."""
        state: dict[str, Tensor] = {}
        for worker in self._workers:
            prefix = f"{WORKERS}{worker.number}/"
            for name, parameter, value in zip(self._names, self._parameters, worker.values, strict=True):
                for key, tensor in _tensors(worker.optimizer, parameter).items():
                    state[f"{prefix}optimizer/{name}/{key}"] = tensor
                if not self.spec.ends_round(step, num_steps=self._num_steps):
                    state[f"{prefix}model/{name}"] = value
        return state

    @property
    def _anchor_values(self) -> list[Tensor]:
        return [anchor.data for anchor in self._anchor]

    @property
    def has_begun(self) -> bool:
        """Whether the workers have weights of their own."""
        return bool(self._workers)

    def restore(self, reader: Reader, step: int) -> None:
        """Loads the workers' states after `step` steps; the model has those of the last outer step.

        A checkpoint from before the first round, or of a job without local updates, has none.
        """
        if not reader.names_under(WORKERS) and not reader.names_under(OUTER):
            return
        self.begin()
        assert self._outer is not None
        for worker in self._workers:
            prefix = f"{WORKERS}{worker.number}/"
            for name, parameter, value in zip(self._names, self._parameters, worker.values, strict=True):
                _restore(reader, worker.optimizer, parameter, prefix=f"{prefix}optimizer/{name}/")
                if not self.spec.ends_round(step, num_steps=self._num_steps):
                    reader.fill(f"{prefix}model/{name}", value)
        for name, anchor in zip(self._names, self._anchor, strict=True):
            _restore(reader, self._outer, anchor, prefix=f"{OUTER}{name}/")

    def _load(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value

    @torch.no_grad()
    def _exchange(self, summands: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Returns the sums over the workers of all ranks; a summand is a tensor for each parameter."""
        totals = [torch.empty_like(tensor) for tensor in summands[0]]
        for places in _pieces([tensor.numel() for tensor in totals]):
            flat = [torch.cat([tensors[i].view(-1)[at] for i, at in places]) for tensors in summands]
            total = sum_in_order(flat, group=self._group)
            for (i, at), part in zip(places, torch.split(total, [at.stop - at.start for _, at in places]), strict=True):
                totals[i].view(-1)[at] = part
            self._beat()
        return totals


def sum_in_order(summands: Sequence[Tensor], *, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the sum of flat tensors of all ranks, equally many on each, in the order of the ranks."""
    num_ranks, length = (1 if group is None else group.size()), len(summands[0])
    stacked = nn.functional.pad(torch.stack(list(summands)), (0, -length % num_ranks))
    arriving = stacked.view(len(summands), num_ranks, -1).transpose(0, 1).contiguous()
    if group is not None:
        sent, arriving = arriving, torch.empty_like(arriving)
        dist.all_to_all_single(arriving, sent, group=group)
    part = arriving[0, 0]
    for other in arriving.flatten(0, 1)[1:]:
        part += other
    if group is None:
        return part
    total = torch.empty(num_ranks * len(part), dtype=part.dtype, device=part.device)
    all_gather(total, part, group=group)
    return total[:length]


def _pieces(sizes: Sequence[int]) -> list[list[tuple[int, slice]]]:
    """Returns the places in tensors of these sizes that are exchanged together: at most `PIECE` elements each time."""
    pieces: dict[int, list[tuple[int, slice]]] = defaultdict(list)
    begin = 0  # of the tensor, among the elements of all
    for i, size in enumerate(sizes):
        for first in range(begin - begin % PIECE, begin + size, PIECE):
            start, end = max(first, begin), min(first + PIECE, begin + size)
            pieces[first].append((i, slice(start - begin, end - begin)))
        begin += size
    return list(pieces.values())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Takes a parameter's gradient, zeros where it has none."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return gradient.contiguous()


def _tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    return {key: value for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}


def _restore(reader: Reader, optimizer: torch.optim.Optimizer, parameter: Tensor, *, prefix: str) -> None:
    for key in reader.names_under(prefix):
        optimizer.state[parameter][key] = reader.state(f"{prefix}{key}", parameter, optimizer)
