"""Trainer: trains one job, one global step at a time, under any technique."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.codec import digest, from_json, to_json
from ringmaster.errors import CheckpointNotFound
from ringmaster.features.kernels.job import Numerics
from ringmaster.features.untrusted.job import Untrusted
from ringmaster.techniques.checkpoints.chain import ChainWriter, StateChain, present_environment
from ringmaster.techniques.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointStore,
    WritePieces,
    folder_of,
    store_model,
)
from ringmaster.techniques.checkpoints.state import (
    HostCopies,
    Reader,
    named_state,
    piece_writer,
    read_whole,
    restore_model,
)
from ringmaster.techniques.data import (
    Dataset,
    Indices,
    PreparedData,
    fetch,
    num_tokens_of,
    open_data,
    prepare,
    sampler_of,
    width_of,
)
from ringmaster.techniques.job import Job, TrainingPhase, WarmStart
from ringmaster.techniques.job_parts import Effect
from ringmaster.techniques.loss import REWARDS
from ringmaster.techniques.models.adapters import attach, trained_names, without_subtraction
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_adapter, export_model
from ringmaster.techniques.models.layers import check_components
from ringmaster.techniques.models.peft_format import initial_adapter
from ringmaster.techniques.models.quantization import quantize_base
from ringmaster.techniques.probing import draws_of
from ringmaster.techniques.processes.order import TRAIN, TRIAL, GangOrder
from ringmaster.techniques.processes.ranks import Ranks
from ringmaster.techniques.technique import (
    KERNELS,
    TURN,
    Technique,
    data_parallel_rank,
    data_parallel_size,
    why_no_optimizer,
)
from ringmaster.techniques.training.adaptation import JobAdaptation
from ringmaster.techniques.training.batch_loader import BatchLoader, BatchRequest
from ringmaster.techniques.training.dropout import Draws, drawing, name_modules, seed_generators, seed_torch, use
from ringmaster.techniques.training.exact_sums import group_by_layer, use_exact_kernels
from ringmaster.techniques.training.generation import HELD_OUT, answer_writer_of, beating, prompt_seed, rollout_of
from ringmaster.techniques.training.gradients import compute_in_half, local
from ringmaster.techniques.training.kernels import (
    StepSample,
    optimizer_kernels,
    sampled_updates,
    use_kernels,
    why_kernels_differ,
)
from ringmaster.techniques.training.local_updates import WORKERS, LocalWorkers
from ringmaster.techniques.training.losses import disable_dropout, loss_of
from ringmaster.techniques.training.metrics import MetricTotals
from ringmaster.techniques.training.noise_scale import MEASURED_EVERY, GradientNoise, PreconditionedNorm, probe_steps
from ringmaster.techniques.training.optimizers import (
    ParameterSettings,
    build_optimizer,
    freeze,
    parameter_settings,
    update_,
)
from ringmaster.techniques.training.recomputation import compile_layers

Root = str | Path
"""A folder of checkpoints, or an fsspec URL."""

BY_HASH = "by-hash"
"""The value of "draws" in the metadata of checkpoints whose job draws dropout by hash. Jobs with checkpoints of earlier
releases, which lack it, continue to draw from torch's generator, seeded by step, rank and micro-batch."""

PHASES = "phases"
"""The key, in the metadata of checkpoints, of the list of `TrainingPhase` of a job that has changed its batch size."""

CHUNK = "chunk"
"""The key, in the metadata of checkpoints of exact jobs, of the samples of a chunk."""

WIDTH_MULTIPLE = 8
"""The width of padded samples is a multiple of it, as kernels of matrix products prefer."""
LONGEST = "longest"
WARM_UP_STEPS = 2
"""The first steps of a trial, which are not measured."""
LEAST_STEPS, USUAL_STEPS, ENOUGH_S = 3, 12, 1.5  # of a trial: measured steps, and their total seconds

Beat = Callable[[], None]
"""Reports that this rank is alive; called between long operations."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One global step: the mean loss over its batch, its seconds, and the sums of the values that the ranks passed.

    reward: the mean reward of the completions, of losses that generate them.
    num_samples, num_tokens: of the global batch; tokens by `num_tokens_of`.
    """

    step: int
    loss: float
    seconds: float
    requests: tuple[float, ...]
    reward: float | None = None
    num_samples: int = 0
    num_tokens: int = 0
    noise: GradientNoise | None = None


def batch_width(job: Job, dataset: Dataset, indices: Indices, *, divisor: int = 1) -> int | None:
    """Returns the width to which the samples of a global batch are padded; None for the data set's own.

    divisor: what the width must be divisible by.
    """
    # A compiled model would be compiled again for each width.
    if job.data.padding != LONGEST or job.compile:
        return None
    return width_of(dataset, indices, multiple_of=math.lcm(WIDTH_MULTIPLE, divisor))


def prepared_data(order: GangOrder) -> PreparedData:
    """Returns the prepared data of an order's job: the data that the order pins, where it does."""
    pinned = from_json(PreparedData, order.data) if order.data else None
    return prepare(order.data_spec, cache_dir=Path(order.cache_dir), pinned=pinned)


class JobTrainingState:
    """What a job owns on a rank, alone or in a group: its data, its step and its checkpoints.

    next_step: the number of completed steps.
    passed_over: newer checkpoints that were skipped as damaged.
    """

    def __init__(self, order: GangOrder, ranks: Ranks) -> None:
        self.order, self.job, self.ranks = order, order.job, ranks
        self.prepared = prepared_data(order)
        cache = Path(order.cache_dir)
        self._training, self._held_out = open_data(self.job.data, cache_dir=cache, prepared=self.prepared)
        self._sampler = sampler_of(self.job, self._training)
        self._loader = BatchLoader(self._training, pins=ranks.device.type == "cuda")
        self.next_step = 0
        self.passed_over: tuple[str, ...] = ()
        self._chain: ChainWriter | None = None

    def num_evaluated_rows(self, *, max_batches: int | None = None) -> int:
        """Returns the number of held-out rows of one evaluation, of at most `max_batches` global batches."""
        num_rows = min(len(self._held_out), self.job.max_evaluated_rows)
        return num_rows if max_batches is None else min(num_rows, max_batches * self.job.global_batch_size)

    def num_evaluated_batches(self) -> int:
        """Returns the number of global batches of one evaluation."""
        return -(-self.num_evaluated_rows() // self.job.global_batch_size)

    def store(self, root: Root) -> CheckpointStore:
        """Returns the checkpoints under `root`, which all ranks read and write together."""
        return CheckpointStore(
            root,
            rank=self.ranks.rank,
            num_ranks=self.ranks.num_ranks,
            agree=self.ranks.agree,
            keep=self.order.keep_checkpoints,
            attempt=self.order.attempt,
        )

    def newest_checkpoint(self, root: Root, *, known_step: int = 0) -> Checkpoint | None:
        """Returns the newest whole checkpoint under `root`.

        Raises ValueError where it belongs to a job that would train other weights. Raises CheckpointNotFound where
        there is none although one of `known_step` was stored.
        """
        store, start = self.store(root), self.order.warm_start
        is_own = start is None or known_step > start.step
        checkpoint, self.passed_over = store.newest(known_step=known_step * is_own), tuple(store.passed_over)
        given = self.job.warm_start
        is_changed = given is not None and str(given.checkpoints) == str(root)  # it was steered: `jobs set`
        if checkpoint is None and start is not None:
            return self._other_checkpoint(start)
        own = weights_digest(self.job, data_digest=self.prepared.digest)
        if (
            checkpoint is not None
            and not is_changed
            and (
                checkpoint.manifest.meta["weights_digest"] != own
                or checkpoint.manifest.meta.get(PHASES, ()) != self._phases(checkpoint.manifest.step)
            )
        ):
            raise ValueError(
                f"{checkpoint.location} is of another version of job {self.job.name}: its model, data, optimizer or "
                "seed changed since. To fix: give the job another name, or remove the folder to start it afresh"
            )
        return checkpoint

    def _other_checkpoint(self, start: WarmStart) -> Checkpoint:
        """Returns the checkpoint of another job that this one goes on from."""
        checkpoint = self.store(start.checkpoints).whole(folder_of(start.step))
        if checkpoint is None:
            raise CheckpointNotFound(
                f"job {self.job.name} starts from step {start.step} in {start.checkpoints}, and no whole checkpoint is "
                "there. To fix: bring it back, or leave out warm_start"
            )
        return checkpoint

    def begin_chain(self, root: Root) -> None:
        """Starts the segment's part of the chain of states, after the checkpoint that was restored, if any."""
        if self.ranks.rank == 0:
            self._chain = ChainWriter.begin(
                root,
                chain=StateChain(
                    job=to_json(self.order.job),
                    weights=weights_digest(self.job, data_digest=self.prepared.digest),
                    data=self.prepared.digest,
                ),
                step=self.next_step,
                digested_steps=self.order.digested_steps,
                environment=present_environment(
                    technique=self.order.technique,
                    config=self.order.config,
                    num_devices=self.order.num_devices,
                    device=self.ranks.device,
                ),
            )

    def extend_chain(self, step: int, *, always: bool) -> None:
        """Adds the published checkpoint of `step` to the chain of states. Called on rank 0."""
        if self._chain is not None:
            self._chain.extend(step, always=always)

    def trained_weights(self, root: Root) -> dict[str, Tensor]:
        """Returns the whole tensors of the model in the newest checkpoint under `root`, which is of this step."""
        checkpoint = CheckpointStore(root).newest()
        assert checkpoint is not None and checkpoint.manifest.step == self.next_step
        return read_whole(checkpoint, prefix="model/")

    def model_meta(self, model: nn.Module) -> dict[str, Any]:
        """Returns the metadata that a checkpoint stores of the job and of the model that it trains."""
        config: Any = getattr(model, "config", None)  # a Hugging Face model's config, for converting the checkpoint
        as_json = json.loads(config.to_json_string(use_diff=False)) if hasattr(config, "to_json_string") else None
        tokenizer = self.prepared.tokenizer_dir and str(Path(self.prepared.tokenizer_dir).absolute())
        own = weights_digest(self.job, data_digest=self.prepared.digest)
        meta = {"job": self.job.name, "weights_digest": own, "config": as_json, "tokenizer_dir": tokenizer}
        return meta | ({PHASES: phases} if (phases := self._phases(self.next_step)) else {})

    def _phases(self, step: int) -> Sequence[Any]:
        """Returns the phases in which the first `step` steps were trained, beginning with that of the job as written.

        None are listed before the first change.
        """
        begun = [to_json(phase) for phase in self.job.phases if phase.first_step < step]
        return begun if len(begun) > 1 else ()

    def _to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor.to(self.ranks.device, non_blocking=True) for key, tensor in batch.items()}


class Trainer(JobTrainingState):
    """The training state of a job on one rank.

    model: the model to train, as it was built; by default it is built as the job says.
    """

    def __init__(
        self, order: GangOrder, technique: Technique, ranks: Ranks, *, beat: Beat, model: nn.Module | None = None
    ) -> None:
        super().__init__(order, ranks)
        if technique.updates_locally and order.job.phases:
            self.job = replace(order.job, local_updates=order.job.phases[-1].local_updates)
        self._technique, self._beat = technique, beat
        if self.job.is_exact:
            use_exact_kernels(ranks.device)
        beat()
        folder = Path(order.weights_from) if order.weights_from else None
        self._adapter, weights = initial_adapter(self.job.adapter, folder)
        self._base = str(weights) if weights else self.job.model.from_pretrained
        if model is None:
            model = build_model(self.job.model, data=self.prepared, seed=self.job.seed, weights_from=weights)
        if self.job.base_format is not None and self._adapter is not None:
            quantize_base(model, self._adapter)
        if order.purpose == TRAIN:  # a trial may stand for other jobs, with other components
            check_components(self.job, model)
        # Checkpoints and exports of a model with an adapter contain only the trained parameters.
        self._stored: frozenset[str] | None = None
        if self._adapter is not None:
            self._stored = trained_names(attach(model, self._adapter, seed=self.job.seed))
        self._subtracted: dict[str, Tensor] = {}  # the first values of an adapter whose product the base lacks
        if self._adapter is not None and self._adapter.subtracts:
            self._subtracted = {k: v.detach().clone() for k, v in model.named_parameters() if v.requires_grad}
        settings: Mapping[str, ParameterSettings] = {}
        if order.purpose in (TRAIN, TRIAL):  # an evaluation may be of another model
            if reason := why_no_optimizer(technique, self.job):
                raise ValueError(f"{reason}. To fix: take another technique, or another optimizer")
            if self.job.freeze:
                freeze(model, self.job.freeze)
            settings = parameter_settings(self.job, model)
        self._plain = model
        self._sites = draws_of(self.job, data=self.prepared, cache_dir=Path(order.cache_dir))
        # Compiled layers draw from the compiler's generator. This needs no hash, as their batch is not divided.
        self._draws_by_hash = (self._sites.draws or self.job.adapter_drops_out) and not self.job.compile
        if self._draws_by_hash:
            name_modules(model)
        self._loss = loss_of(self.job.loss, model, self.job.model, options=self.job.loss_options)
        disable_dropout(model, self._loss)
        self.adaptation = JobAdaptation(
            order,
            model=model,
            loss=self._loss,
            prepared=self.prepared,
            device=ranks.device,
            autocast=self._autocast,
        )
        self._rollout = rollout_of(
            self._loss.function,
            model=model,
            tokenizer_dir=self.prepared.tokenizer_dir,
            device=ranks.device,
            autocast=self._autocast,
            is_trial=order.purpose == TRIAL,
            beat=beat,
        )
        self._answers = answer_writer_of(
            self.job.evaluation,
            model=model,
            tokenizer_dir=self.prepared.tokenizer_dir,
            device=ranks.device,
            autocast=self._autocast,
            is_trial=order.purpose == TRIAL,
            beat=beat,
        )
        beat()
        if not technique.moves_model:
            model.to(ranks.device)
        technique.precision, technique.communication = self.job.precision, self.job.communication
        technique.skips_layers, technique.exact = self._sites.scalars, self.job.is_exact
        if self.job.is_exact:
            group_by_layer(model)
        self.model = technique.parallelize(model, ranks.mesh, order.config).train()
        if self.job.precision == "bf16-params":
            compute_in_half(technique.unwrap(self.model))
        if self.job.compile:
            compile_layers(technique.unwrap(self.model), device_type=ranks.device.type)
        self.adaptation.lay_out(technique.unwrap(self.model))
        names = technique.parameter_names(self.model)
        build = partial(
            build_optimizer,
            self.job,
            technique.optimizer_parameters(self.model),
            settings={parameter: settings[name] for parameter, name in names.items() if name in settings},
        )
        self.optimizer = build()
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._dp_rank, self._dp_size = data_parallel_rank(ranks.mesh), data_parallel_size(ranks.mesh)
        self._micro_batch: int = order.config["micro_batch"]
        self._norm: PreconditionedNorm | None = None  # of jobs that may change their batch size
        self._part: tuple[Tensor, int] | None = None  # the squared norm of a step's first micro-batches, and their size
        self._workers: LocalWorkers | None = None
        self._own_shares = [(self._dp_rank, self._dp_size)]  # of a global batch: numbers, and how many there are
        if (local := self.job.local_updates) is not None:
            num_own = local.workers // ranks.num_ranks
            own = range(ranks.rank * num_own, (ranks.rank + 1) * num_own)
            self._own_shares = [(number, local.workers) for number in own]
            self._workers = LocalWorkers(
                # A trial measures the steps inside a round, and `exchange_s` what is exchanged.
                replace(local, warmup_steps=0, sync_every=sys.maxsize) if order.purpose == TRIAL else local,
                num_steps=self.job.total_steps,
                parameters={names[parameter]: parameter for parameter in self._parameters},
                optimizer=self.optimizer,
                build=build,
                own=own,
                group=None if ranks.mesh is None else ranks.mesh.get_group(),
                beat=beat,
            )
        self.kernels_refused = ""
        if (kernels := order.config.get(KERNELS)) is not None:
            self.kernels_refused = self._take_kernels(kernels, build)
            if self.kernels_refused and order.purpose == TRIAL:
                raise ValueError(self.kernels_refused)
        if order.purpose == TRAIN and technique.measures_noise and len(self.job.may_vary.global_batch_size) > 1:
            self._norm = PreconditionedNorm(self._parameters, self.optimizer, device=ranks.device)
        beat()

    def step(self, asks: tuple[float, ...] = ()) -> StepReport:
        """Trains the next global step; `asks` are summed over the ranks with the loss, so that all ranks act alike.

        Raises ValueError, on every rank, where no sample has a label.
        """
        started_s = time.perf_counter()
        if self._rollout is None:
            self._loader.begin_step(self._following())
        indices, width = self._global_batch(self.next_step)
        if self._workers is None:
            share, reward = self._share(indices, self._places(self.next_step, *self._own_shares[0]), width=width)
        else:
            share, reward = self._shares_of_workers(self._workers, indices, width=width), None
        loss_sum, count, num_tokens, part_count, *totals = self.ranks.sum([*share, *asks])
        if not count:
            raise ValueError(
                f"step {self.next_step}: none of its {len(indices)} samples has a label. To fix: raise "
                "data.seq_len, so that not all of what is learnt is cut off, or global_batch_size"
            )
        noise = None
        if self._workers is None or self._workers.warms_up(self.next_step):
            count_of_gradient = count / self._technique.loss_replicas(self.ranks.mesh)
            noise = (
                self._noise(part_count / count, count_of_gradient) if part_count and self._part is not None else None
            )
            self._update(self.optimizer, count_of_gradient)
        if self._workers is not None:
            self._workers.end_step(self.next_step + 1)
        report = StepReport(
            step=self.next_step,
            loss=loss_sum / count,
            seconds=time.perf_counter() - started_s,
            requests=tuple(totals),
            reward=reward,
            num_samples=len(indices),
            num_tokens=round(num_tokens * self._dp_size / self.ranks.num_ranks),  # other axes have the same rows
            noise=noise,
        )
        self.next_step += 1
        self._beat()
        return report

    @property
    def _phase(self) -> TrainingPhase:
        """The phase of the next step."""
        return self.job.phase(self.next_step)

    def measures_noise(self, step: int) -> bool:
        """Whether the noise scale is measured in a step, which then has two parts at least on each rank."""
        if self._norm is None or step == 0:  # the optimizer has no second moments yet
            return False
        return step < probe_steps(self.job.phase(0).num_steps) or step % MEASURED_EVERY == 0

    def _share(
        self, indices: Indices, places: Sequence[range], *, width: int | None
    ) -> tuple[list[float], float | None]:
        """Computes the gradients of the samples at `places` of the global batch.

        Returns the sum of the loss, its count, the number of tokens and the count of a part whose gradients were
        measured by themselves; and the mean reward of completions.
        """
        with drawing() if self._draws_by_hash else nullcontext():
            work = _TrainerWork(self, indices, places, width=width)
            reward = self._generate(work)
            work.loss_function = self.adaptation.loss.given(self._totals(self._training, work.micro_batches))
            loss_sum, count = self._technique.forward_backward(self.model, work)
        self._part = None if work.part_norm is None else (work.part_norm, len(places[0]) * self._dp_size)
        return [float(loss_sum), count, work.num_tokens, work.part_count], reward

    def _shares_of_workers(self, workers: LocalWorkers, indices: Indices, *, width: int | None) -> list[float]:
        """Takes a step of each of the rank's workers, or in the warm-up their common gradient; returns the sums."""
        sums = [0.0] * 4
        for number, optimizer in workers.each(self.next_step):
            places = self._places(self.next_step, number, workers.spec.workers)
            share, _ = self._share(indices, places, width=width)
            if workers.warms_up(self.next_step):
                workers.take_gradients()
            else:  # the gradients of a share without labels are zeros
                self._update(optimizer, share[1] or 1.0)
            sums = [total + value for total, value in zip(sums, share, strict=True)]
        return sums

    def exchange_s(self) -> float:
        """Returns the seconds that exchanges between workers add to a step on average; 0 where each step has its own.

        A trial calls it, whose state is not kept.
        """
        if self._workers is None:
            return 0.0
        assert self.job.local_updates is not None
        self.ranks.agree(True)
        started_s = time.perf_counter()
        self._workers.synchronize()
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = self.ranks.max(time.perf_counter() - started_s)
        return seconds * self.job.local_updates.exchanges_a_step(num_steps=self.job.total_steps)

    def _take_kernels(self, name: str, build: Callable[..., torch.optim.Optimizer]) -> str:
        """Has steps computed by the kernels `name` if they agree with plain ones; returns why they do not, or ""."""
        numerics = self.job.part(Numerics)
        assert numerics is not None, "only such jobs have kernels to choose from"
        arguments = optimizer_kernels(name, self.job)
        plain = other = self._sample_step
        if arguments is not None:
            others = partial(build, kernels=arguments)
            plain, other = partial(self._sample_update, build), partial(self._sample_update, others)
        refused = why_kernels_differ(
            name,
            plain=plain,
            use=partial(use_kernels, self._technique.unwrap(self.model), name, device_type=self.ranks.device.type),
            other=other,
            tolerance=numerics.tolerance,
            agree=self.ranks.max,
        )
        if arguments is not None and not refused:
            self.optimizer = build(kernels=arguments)
        return refused

    def _sample_step(self, step: int) -> StepSample:
        """Returns the loss and the gradients of a step, after which the job is as before."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.next_step, before = step, self.next_step
        indices, width = self._global_batch(step)
        share, _ = self._share(indices, self._places(step, *self._own_shares[0]), width=width)
        self.next_step = before
        loss_sum, count, *_ = self.ranks.sum(share)
        gradients = [parameter.grad.clone() for parameter in self._parameters if parameter.grad is not None]
        for parameter in self._parameters:
            parameter.grad = None
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(value)
        self._beat()
        return loss_sum / max(count, 1.0), gradients

    def _sample_update(self, build: Callable[[], torch.optim.Optimizer], step: int) -> StepSample:
        """Returns what steps of an optimizer do, after which the job is as before."""
        updated = self._technique.optimizer_parameters(self.model)
        return sampled_updates(updated, build, seed=step, lr=self.job.optimizer.lr)

    def _generate(self, work: _TrainerWork) -> float | None:
        """Writes the completions of a step on which the loss is computed; returns their mean reward.

        Their random numbers depend on the seed, the step and the prompt's place in the global batch alone.
        """
        if self._rollout is None:
            return None
        model, batches = self._technique.unwrap(self.model), []
        for index, rows in enumerate(work.micro_batches):
            seeds = [prompt_seed(self.job.seed, self.next_step, place) for place in work.places[index]]
            batches.append(self._rollout.completed(model, fetch(self._training, rows, width=work.width), seeds=seeds))
            self._beat()
        own_rewards = torch.cat([batch[REWARDS].flatten() for batch in batches]).double().cpu()
        every = torch.cat(self.ranks.gather([own_rewards])[0])
        work.completions = self._rollout.with_advantages(batches, of_batch=every)
        return float(every.nanmean())

    def _following(self) -> Iterator[BatchRequest]:
        """Yields the micro-batches of this rank, from the next step on."""
        steps = range(self.next_step, self.job.total_steps if self.order.purpose == TRAIN else sys.maxsize)
        for step in steps:
            indices, width = self._global_batch(step)
            for places in chain.from_iterable(self._places(step, *share) for share in self._own_shares):
                yield BatchRequest(rows=tuple(int(indices[place]) for place in places), width=width)

    def _load(self, request: BatchRequest, **seeds: Callable[..., object]) -> dict[str, Tensor]:
        return self._loader.batch(request, **seeds)

    def _global_batch(self, step: int) -> tuple[Indices, int | None]:
        """Returns the samples of a step, and the width to which they are padded."""
        indices = self._sampler.at(self.job.samples(step))
        return indices, self._width(self._training, indices)

    def _places(self, step: int, index: int, num_shares: int) -> list[range]:
        """Returns the places in the global batch of the samples of each micro-batch of a share."""
        size, rows = self.job.phase(step).global_batch_size, self._micro_batch
        if self.job.is_exact and self._technique.takes_chunks == TURN:
            firsts = range(index * rows, size, num_shares * rows)
            return [range(first, first + rows) for first in firsts]
        share = size // num_shares
        if self.measures_noise(step):
            rows = min(rows, -(-share // 2))
        first, end = index * share, (index + 1) * share
        return [range(start, min(start + rows, end)) for start in range(first, end, rows)]

    def _width(self, dataset: Dataset, indices: Indices) -> int | None:
        """Returns the width to which the samples of a global batch are padded, the same on every rank."""
        return batch_width(self.job, dataset, indices, divisor=self._technique.width_divisor(self.ranks.mesh))

    def _totals(self, dataset: Dataset, chunks: Iterable[Sequence[int]]) -> dict[str, float]:
        """Returns the numbers of the global batch that its loss needs before the first forward; mostly there are none.

        chunks: the rank's rows of the batch.
        """
        if not self._loss.total_names:
            return {}
        self._loader.settle()
        own_totals = dict.fromkeys(self._loss.total_names, 0.0)
        for rows in chunks:
            for name, value in self._loss.totals(fetch(dataset, list(rows))).items():
                own_totals[name] += value
        num_replicas = self.ranks.num_ranks // self._dp_size  # ranks with the same rows
        return {
            name: value / num_replicas
            for name, value in zip(own_totals, self.ranks.sum([*own_totals.values()]), strict=True)
        }

    def _noise(self, share: float, count: float) -> GradientNoise:
        """Returns what the gradients of the step, and of its first micro-batches, tell of their noise.

        share: of the global count, in the first micro-batches. count: as for `_update`.
        """
        assert self._norm is not None and self._part is not None
        to_mean = self._technique.gradient_divisor(self.ranks.mesh) / count
        (part, part_size), whole = self._part, self._norm.squared()
        return GradientNoise.of(
            self.next_step,
            part=float(part) * (to_mean / share) ** 2,
            whole=float(whole) * to_mean**2,
            part_size=part_size,
            size=self._phase.global_batch_size,
        )

    def _update(self, optimizer: torch.optim.Optimizer, count: float) -> None:
        """Turns gradients of the sum into those of the global mean, clips them, and takes an optimizer step.

        With g the exchanged gradient, d the exchange's divisor, n the global count and c the clipping norm, the
        optimizer sees g * d/n * min(1, c / |g * d/n|).
        """
        self.adaptation.mask_gradients()
        to_mean = self._technique.gradient_divisor(self.ranks.mesh) / count
        norm = self._technique.grad_norm(self._parameters) if self.job.clip_grad_norm is not None else None
        update_(self.job, optimizer, self._parameters, step=self.next_step, to_mean=to_mean, norm=norm)
        self._technique.after_step(self.model)
        for parameter in self._parameters:  # not `optimizer.zero_grad`, as the optimizer may hold only a share of them
            parameter.grad = None

    @torch.no_grad()
    def evaluate(self, *, max_batches: int | None = None) -> dict[str, float]:
        """Returns the job's metrics over at most `max_batches` global batches of held-out data; equal on every rank."""
        self._loader.settle()
        chunks = list(self._held_out_chunks(self.num_evaluated_rows(max_batches=max_batches)))
        totals = self._totals(self._held_out, [rows for rows, counted, _ in chunks if counted])
        names, loss = self.job.evaluation.metrics, self._loss.given(totals)
        metrics = MetricTotals(names, loss=loss, data=self.prepared, exact=self.job.is_exact)
        work = _TrainerWork(self)
        if self._workers is not None:
            self._workers.load_anchor()
        self.model.eval()
        model = self._technique.unwrap(self.model)
        for rows, counted, width in chunks:
            batch = fetch(self._held_out, rows, width=width)
            written = self._answers.written(model, batch) if self._answers is not None and counted else None
            if self._rollout is not None:
                seeds = [prompt_seed(self.job.seed, HELD_OUT, row) for row in rows]  # the same at every step
                (batch,) = self._rollout.with_advantages([self._rollout.completed(model, batch, seeds=seeds)])
            batch = work.completed(self._to_device(self._technique.part(batch)))
            output = self._technique.forward(self.model, batch, work)
            if counted and output is not None:  # in a pipeline only the last stage has an output
                metrics.add(output, work.with_reference(batch), rows=rows, written=written)
            self._beat()
        if metrics.of_models:
            most = self.job.max_evaluated_rows
            num_rows = most if max_batches is None else min(most, max_batches * self.job.global_batch_size)
            with self._autocast(), beating(model, self._beat):
                metrics.measure_model(
                    model, self.prepared, num_rows, ranks=(self._dp_rank, self._dp_size), batch_size=self._micro_batch
                )
        self.model.train()
        return metrics.result(self.ranks.gather(metrics.parts()))

    def _held_out_chunks(self, num_rows: int) -> Iterator[tuple[list[int], bool, int | None]]:
        """Yields the rank's rows of each forward pass, whether they count, and the width of the global batch.

        Every rank runs the same number of forward passes; a rank without rows left runs one row that does not count.
        """
        size = self.job.global_batch_size
        for first in range(0, num_rows, size):
            rows = range(first, min(first + size, num_rows))
            # Whole micro-batches, so that the same rows are computed together by any number of ranks.
            share = -(-len(rows) // (self._dp_size * self._micro_batch)) * self._micro_batch
            width = self._width(self._held_out, rows)
            own_rows = list(rows[self._dp_rank * share : (self._dp_rank + 1) * share])
            for start in range(0, share, self._micro_batch):
                chunk = own_rows[start : start + self._micro_batch]
                yield chunk or [first], bool(chunk), width

    def save(self, root: Root) -> float:
        """Checkpoints the state after `next_step` steps; returns the seconds that it took."""
        started_s = time.perf_counter()
        self.store(root).save(self.next_step, self.pieces(), self.checkpoint_meta())
        self._beat()
        return time.perf_counter() - started_s

    def pieces(self, *, copies: HostCopies | None = None) -> WritePieces:
        """Returns the pieces that this rank writes into a checkpoint of the present state. All ranks call it together.

        With `copies`, the state is copied at once; without it, the state must not change before it is written.
        """
        return piece_writer(self.written(), copies=copies)

    def written(self) -> dict[str, Tensor]:
        """Returns the tensors, by canonical name, of which this rank writes its parts into a checkpoint."""
        model = self._technique.unwrap(self.model)
        if self._workers is not None and self._workers.has_begun:
            shared = {**named_state(model, only=self._stored), **self._workers.shared_state()}
            return (shared if self.ranks.rank == 0 else {}) | self._workers.own_state(self.next_step)
        named = {**named_state(model, only=self._stored), **self._technique.optimizer_state(self.model, self.optimizer)}
        return {k: v for k, v in named.items() if self._technique.writes(k, v, rank=self.ranks.rank)}

    def digest_step(self) -> None:
        """Adds the present state to the chain of states, on rank 0, where the job may run on untrusted nodes."""
        if self._chain is not None and self.job.part(Untrusted) is not None:
            self._chain.digest_step(self.next_step, self._own_tensors())

    def _own_tensors(self) -> Iterator[Tensor]:
        """Yields what this rank holds of parameters and optimizer state, in one order."""
        for parameter in self._parameters:
            yield local(parameter)
            states = self.optimizer.state.get(parameter, {})
            yield from (local(states[key]) for key in sorted(states) if isinstance(states[key], Tensor))

    def checkpoint_meta(self) -> dict[str, Any]:
        """Returns the metadata of the job that a checkpoint stores."""
        meta = self.model_meta(self._plain) | ({CHUNK: self._micro_batch} if self.job.is_exact else {})
        return {**meta, "draws": BY_HASH} if self._draws_by_hash else meta

    def restore(self, root: Root, *, known_step: int = 0) -> int:
        """Loads the newest whole checkpoint under `root`, if any; returns the number of completed steps.

        Raises as `newest_checkpoint`.
        """
        checkpoint = self.newest_checkpoint(root, known_step=known_step)
        if checkpoint is None:
            return 0
        self._draws_by_hash = self._draws_by_hash and checkpoint.manifest.meta.get("draws") == BY_HASH
        if self.job.is_exact:
            # Earlier releases divided none. With local updates, one without it is of a plain job (`warm_start`).
            undivided = self.job.global_batch_size if self._workers is None else self._micro_batch
            chunk = checkpoint.manifest.meta.get(CHUNK, undivided)
            if chunk != self._micro_batch:
                raise ValueError(
                    f"{checkpoint.location} was trained exactly, in chunks of {chunk} samples, and not of "
                    f"{self._micro_batch}. To fix: set exact_chunk: {chunk}"
                )
        model = self._technique.unwrap(self.model)
        with Reader(checkpoint) as reader:
            restore_model(reader, model, only=self._stored)
            self._technique.restore_optimizer(reader, self.model, self.optimizer)
            if self._workers is not None:
                self._workers.restore(reader, checkpoint.manifest.step)
            elif reader.names_under(WORKERS):
                raise ValueError(
                    f"{checkpoint.location} has a state for each worker of local updates. To fix: give job "
                    f"{self.job.name} the local_updates of the job that wrote it"
                )
        self.next_step = checkpoint.manifest.step
        if self._workers is None and self._phase.local_updates is not None and self.next_step < self.order.last_step:
            raise ValueError(
                f"job {self.job.name} has local updates from step {self._phase.first_step}, of which "
                f"{self._technique.name} knows nothing. To fix: train it on with the technique local"
            )
        return self.next_step

    def export(self, folder: Path, root: Root) -> None:
        """Writes the model of the newest checkpoint under `root` in the format of `from_pretrained`.

        Rank 0 reads it from the checkpoint, so that the ranks' layout does not matter; the other ranks do nothing.
        """
        if self.ranks.rank == 0:
            state = self.trained_weights(root)
            spec, prepared, base = self.job.model, self.prepared, self._base
            if self._adapter is not None:
                adapter, state = without_subtraction(self._adapter, state, self._subtracted)
                export_adapter(
                    folder, adapter=adapter, spec=spec, base=base, state=state, prepared=prepared,
                    quantize_base=self.job.base_format, job=self.job,
                )  # fmt: skip
            else:
                export_model(
                    folder, spec=spec, model=self._plain, state=state, prepared=prepared, base=base, job=self.job
                )
            if self.order.model_url is not None:
                self._beat()
                store_model(folder, self.order.model_url)
        self._beat()

    def _autocast(self) -> AbstractContextManager[Any]:
        enabled = self._phase.precision == "bf16"
        return torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=enabled)


class _TrainerWork:
    """A rank's share of one step; implements `ringmaster.techniques.technique.StepWork`."""

    def __init__(
        self, trainer: Trainer, indices: Indices = (), places: Sequence[range] = (), *, width: int | None = None
    ) -> None:
        self._trainer, self._step, self.width = trainer, trainer.next_step, width
        self.completions: list[dict[str, Tensor]] | None = None  # of each micro-batch, where the loss generates them
        self.places = places
        self.micro_batches = [[int(indices[place]) for place in each] for each in places]
        self.loss_function = trainer.adaptation.loss
        self.is_measured = trainer.measures_noise(self._step)
        self.part_norm: Tensor | None = None  # of the gradients of the first micro-batches of all ranks, squared
        self.part_count = 0.0
        self._num_tokens: dict[int, int] = {}  # by micro-batch, which may be read twice

    @property
    def num_tokens(self) -> int:
        """The tokens of the micro-batches that were read."""
        return sum(self._num_tokens.values())

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    def batch(self, index: int) -> dict[str, Tensor]:
        trainer = self._trainer
        if self.completions is not None:
            self._num_tokens[index] = num_tokens_of(self.completions[index])
            return self.completed(self.completions[index])
        request = BatchRequest(rows=tuple(self.micro_batches[index]), width=self.width)
        if not trainer._draws_by_hash:
            first = self.places[index].start
            of_rank = (0, first // trainer._micro_batch) if trainer.job.is_exact else (trainer._dp_rank, index)
            seed = _derived_seed(trainer.job.seed, self._step, *of_rank)
            batch = trainer._load(request, seed=lambda: seed_torch(seed))
        else:
            samples, seed = self.places[index], _derived_seed(trainer.job.seed, self._step)
            batch = trainer._load(request, seed_sample=lambda place: seed_generators(seed, samples[place]))
        self._num_tokens[index] = num_tokens_of(batch)
        batch = self.completed(trainer._to_device(trainer._technique.part(batch)))
        if trainer._draws_by_hash:
            use(Draws(seed=seed, samples=self.loss_function.sequences(samples), shared=trainer._sites.shared))
        trainer._loader.load_ahead()
        return batch

    def completed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the batch with what the reference of its loss gives, if the trained model itself computes it."""
        trainer, reference = self._trainer, self._trainer.adaptation.reference
        if reference is None:
            return batch
        return reference.before_forward(
            batch,
            trained=trainer.model,
            inner=trainer._technique.unwrap(trainer.model),
            forward=lambda batch: trainer._technique.forward(trainer.model, batch, self),
        )

    def with_reference(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the batch with what the reference of its loss gives, if a frozen copy computes it."""
        reference = self._trainer.adaptation.reference
        return batch if reference is None else reference.before_loss(batch)

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._trainer._loss.forward_inputs(batch)

    def loss(self, output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | int]:
        return self.loss_function(output, self.with_reference(batch))

    def autocast(self) -> AbstractContextManager[Any]:
        return self._trainer._autocast()

    def zero(self) -> Tensor:
        # Sums of a few fp32 losses have no error in fp64, so that an exact job's do not depend on their order.
        dtype = torch.float64 if self._trainer.job.is_exact else torch.float32
        return torch.zeros((), device=self._trainer.ranks.device, dtype=dtype)

    def measure_part(self, count: float) -> None:
        assert self._trainer._norm is not None
        self.part_norm, self.part_count = self._trainer._norm.squared(), count

    def beat(self) -> None:
        self._trainer._beat()


def weights_digest(job: Job, *, data_digest: str) -> str:
    """Returns a digest of all that determines the job's weights: two jobs with one digest train the same model."""
    others = {"name", "techniques", "num_devices", "evaluation", "exact", "exact_chunk", "may_vary", PHASES}
    same = others | job.unaffected(Effect.WEIGHTS)
    if job.phases:  # they are compared by themselves
        job = replace(job, num_steps=job.phases[0].num_steps, local_updates=None)
    fields = {key: value for key, value in to_json(job).items() if key not in same}
    return digest({**fields, "data_digest": data_digest})


def _derived_seed(*parts: int) -> int:
    """Returns a seed of what the numbers identify; it is derived, so that no generator's state need be stored."""
    return int(digest(parts), 16) % (1 << 63)
