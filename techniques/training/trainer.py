"""Trainer: trains one job, one global step at a time, under any technique."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.codec import digest
from ringmaster.techniques.checkpoints.checkpoint import WritePieces, store_model
from ringmaster.techniques.checkpoints.state import HostCopies, Reader, named_state, piece_writer, restore_model
from ringmaster.techniques.data import Dataset, Indices, fetch, num_tokens_of
from ringmaster.techniques.models.adapters import attach, trained_names, without_subtraction
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_adapter, export_model
from ringmaster.techniques.models.peft_format import initial_adapter
from ringmaster.techniques.models.quantization import check_trainable
from ringmaster.techniques.probing import draws_of
from ringmaster.techniques.processes.order import TRAIN, TRIAL, GangOrder
from ringmaster.techniques.processes.ranks import RankContext
from ringmaster.techniques.technique import (
    INTERLEAVED,
    Technique,
    data_parallel_rank,
    data_parallel_size,
    why_no_optimizer,
)
from ringmaster.techniques.training.batch_loader import RowsRequest
from ringmaster.techniques.training.batch_totals import Chunk, batch_totals
from ringmaster.techniques.training.bound_loss import bind_loss, disable_dropout
from ringmaster.techniques.training.callbacks import LossSums, StepPart, TrainerCallback, change_base
from ringmaster.techniques.training.dropout import Draws, drawing, name_modules, seed_generators, seed_torch, use
from ringmaster.techniques.training.exact_sums import group_by_layer, use_exact_kernels
from ringmaster.techniques.training.generation import WriterContext, answer_writer_of, beating
from ringmaster.techniques.training.gradients import compute_in_half, local
from ringmaster.techniques.training.metric_totals import MetricTotals
from ringmaster.techniques.training.optimizers import (
    ParameterSettings,
    build_optimizer,
    freeze,
    parameter_settings,
    update_,
)
from ringmaster.techniques.training.rank_batches import RankBatches
from ringmaster.techniques.training.rank_job import RankJob, Root
from ringmaster.techniques.training.recomputation import compile_layers
from ringmaster.techniques.training.reference_model import reference_of
from ringmaster.techniques.training.update_rule import rule_of

BY_HASH = "by-hash"
"""The value of "draws" in the metadata of checkpoints whose job draws dropout by hash. Jobs with checkpoints of earlier
releases, which lack it, continue to draw from torch's generator, seeded by step, rank and micro-batch."""

CHUNK = "chunk"
"""The key, in the metadata of checkpoints of exact jobs, of the samples of a chunk."""

WARM_UP_STEPS = 2
"""The first steps of a trial, which are not measured."""
MIN_STEPS, USUAL_STEPS, ENOUGH_S = 3, 12, 1.5  # of a trial: measured steps, and their total seconds

Beat = Callable[[], None]
"""Reports that this rank is alive; called between long operations."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One global step: the mean loss over its batch, its seconds, and the sums of the ranks' votes.

    index: of the step, from 0.
    reward: the mean reward of what the model has written, if it is rewarded.
    num_samples, num_tokens: of the global batch; tokens by `num_tokens_of`.
    measurements: what callbacks have read from the gradients.
    count: of labels, or rows, over which the loss is a mean.
    """

    index: int
    loss: float
    seconds: float
    vote_sums: tuple[float, ...] = ()
    reward: float | None = None
    num_samples: int = 0
    num_tokens: int = 0
    measurements: tuple[Any, ...] = ()
    count: float = 1.0


class Trainer(RankJob):
    """A job on one rank, with the model that it trains.

    model: the model to train, as it was built; by default it is built from the job.
    callbacks: further ones than those of the job's features.
    """

    def __init__(
        self,
        order: GangOrder,
        technique: Technique,
        ranks: RankContext,
        *,
        beat: Beat,
        model: nn.Module | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        super().__init__(order, ranks, technique=technique)
        self.callbacks += tuple(callbacks)
        self._technique, self.beat = technique, beat
        if self.job.is_exact:
            use_exact_kernels(ranks.device)
        beat()
        folder = Path(order.weights_from) if order.weights_from else None
        self._adapter, weights = initial_adapter(self.job.adapter, folder)
        self._base = str(weights) if weights else self.job.model.from_pretrained
        if model is None:
            model = build_model(self.job.model, data=self.prepared, seed=self.job.seed, weights_from=weights)
        change_base(order, model, self._adapter)
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
        self._loss = bind_loss(self.job.loss, model, self.job.model, options=self.job.loss_options)
        disable_dropout(model, self._loss)
        self.reference = reference_of(
            order, model=model, loss=self._loss, prepared=self.prepared, device=ranks.device, autocast=self.autocast
        )
        if order.purpose in (TRAIN, TRIAL):
            check_trainable(model)
        self._training_loss = self._loss
        for callback in self.callbacks:
            self._training_loss = callback.change_model(self, model, self._training_loss)
        writing = WriterContext(
            model=model,
            tokenizer_dir=self.prepared.tokenizer_dir,
            device=ranks.device,
            autocast=self.autocast,
            is_trial=order.purpose == TRIAL,
            beat=beat,
        )
        self._writer = None if self._loss.function is None else self._loss.function.sequence_writer(writing)
        self._reward: float | None = None  # of what was written last
        self._answers = answer_writer_of(self.job.evaluation, writing)
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
        for callback in self.callbacks:
            callback.after_layout(self.unwrapped)
        names = technique.parameter_names(self.model)
        self.build_optimizer: Callable[..., torch.optim.Optimizer] = partial(
            build_optimizer,
            self.job,
            self.updated_parameters,
            settings={parameter: settings[name] for parameter, name in names.items() if name in settings},
        )
        self.optimizer = self.build_optimizer()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.own_part = StepPart(data_parallel_rank(ranks.mesh), data_parallel_size(ranks.mesh))
        self.micro_batch: int = order.config["micro_batch"]
        self.batches = RankBatches(
            job=self.job,
            training=self._training,
            sampler=self._sampler,
            loader=self._loader,
            micro_batch=self.micro_batch,
            width_divisor=technique.width_divisor(ranks.mesh),
            in_turn=self.job.is_exact and technique.takes_chunks == INTERLEAVED,
            callbacks=self.callbacks,
        )
        self.rule = rule_of(self)
        for callback in self.callbacks:
            callback.before_training(self)
        beat()

    def step(self, votes: tuple[float, ...] = ()) -> StepReport:
        """Trains the next global step; `votes` are summed over the ranks with the loss, so that all ranks act alike.

        Raises ValueError, on every rank, where no sample has a label.
        """
        started_s = time.perf_counter()
        if self._writer is None:
            last_step = self.job.total_steps if self.order.purpose == TRAIN else sys.maxsize
            self.batches.loader.begin_step(self.batches.requests(range(self.next_step, last_step), self.rule.parts))
        num_samples = self.job.phase(self.next_step).global_batch_size
        own_sums = self.rule.compute(self)  # by default, `compute_gradients` of `own_part`
        of_callbacks = [callback.summed_values() for callback in self.callbacks]
        sums = iter(self.ranks.sum([*own_sums, *chain.from_iterable(of_callbacks), *votes]))
        loss_sum, count, num_tokens = islice(sums, len(own_sums))
        sums_of_callbacks = [list(islice(sums, len(values))) for values in of_callbacks]
        if not count:
            raise ValueError(
                f"step {self.next_step}: none of its {num_samples} samples has a label. To fix: raise "
                "data.seq_len, so that not all of what is learnt is cut off, or global_batch_size"
            )
        measurements = []
        if self.rule.is_common(self.next_step):
            count_of_gradient = count / self._technique.loss_replicas(self.ranks.mesh)
            to_mean = self._to_mean(count_of_gradient)
            measurements = [
                callback.observe_gradients(values, step=self.next_step, count=count, to_mean=to_mean)
                for callback, values in zip(self.callbacks, sums_of_callbacks, strict=True)
            ]
            self.update(self.optimizer, count_of_gradient)
        self.next_step += 1
        self.rule.after_update(self.next_step)
        report = StepReport(
            index=self.next_step - 1,
            loss=loss_sum / count,
            seconds=time.perf_counter() - started_s,
            vote_sums=tuple(sums),
            reward=self._reward,
            num_samples=num_samples,
            # Ranks of other axes than the data-parallel ones have the same rows.
            num_tokens=round(num_tokens * self.own_part.num_parts / self.ranks.num_ranks),
            measurements=tuple(each for each in measurements if each is not None),
            count=count,
        )
        for callback in self.callbacks:
            callback.after_step(self)
        self.beat()
        return report

    @property
    def unwrapped(self) -> nn.Module:
        """The module whose parameters have the names of the model as it was built."""
        return self._technique.unwrap(self.model)

    @property
    def updated_parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank's optimizer updates."""
        return self._technique.optimizer_parameters(self.model)

    def compute_gradients(self, part: StepPart) -> LossSums:
        """Computes the gradients of a part of the next step's samples; returns its sums."""
        indices, width = self.batches.samples(self.next_step)
        with drawing() if self._draws_by_hash else nullcontext():
            work = _TrainerWork(self, indices, self.batches.places(self.next_step, part), width=width)
            self._write(work)
            chunks = [(rows, True, width) for rows in work.micro_batches]
            totals = self._totals(self._training, chunks, rows=indices, work=work)
            work.loss_function = self._training_loss.given(totals)
            loss_sum, count = self._technique.forward_backward(self.model, work)
        return LossSums(loss=float(loss_sum), loss_count=count, num_tokens=work.num_tokens)

    def _write(self, work: _TrainerWork) -> None:
        """Writes the sequences of a step, if the loss is computed on such."""
        if self._writer is None:
            return
        work.written, self._reward = self._writer.step_batches(
            self._technique.unwrap(self.model),
            (fetch(self._training, rows, width=work.width) for rows in work.micro_batches),
            work.places,
            seed=self.job.seed,
            step=self.next_step,
            gather=self.ranks.gather,
        )

    @torch.no_grad()
    def _totals(
        self, dataset: Dataset, chunks: Iterable[Chunk], *, rows: Indices, work: _TrainerWork
    ) -> Mapping[str, float]:
        """Returns the numbers of the global batch that its loss needs before its forwards; see `batch_totals`."""
        if not self._loss.total_names:
            return {}
        self._loader.settle()
        self.model.eval()
        totals = batch_totals(
            self._loss,
            dataset,
            chunks,
            rows=rows,
            width=self.batches.width(dataset, rows),
            technique=self._technique,
            ranks=self.ranks,
            run=work.run,
        )
        self.model.train()
        return totals

    def _to_mean(self, count: float) -> float:
        return self._technique.gradient_divisor(self.ranks.mesh) / count

    def update(self, optimizer: torch.optim.Optimizer, count: float) -> None:
        """Turns gradients of the sum into those of the global mean, clips them, and takes an optimizer step.

        With g the exchanged gradient, d the exchange's divisor, n the global count and c the clipping norm, the
        optimizer sees g * d/n * min(1, c / |g * d/n|).
        """
        for callback in self.callbacks:
            callback.change_gradients()
        norm = self._technique.grad_norm(self.parameters) if self.job.clip_grad_norm is not None else None
        update_(self.job, optimizer, self.parameters, step=self.next_step, to_mean=self._to_mean(count), norm=norm)
        self._technique.after_step(self.model)
        for parameter in self.parameters:  # not `optimizer.zero_grad`, as the optimizer may hold only a part of them
            parameter.grad = None

    @torch.no_grad()
    def evaluate(self, *, max_batches: int | None = None) -> dict[str, float]:
        """Returns the job's metrics over at most `max_batches` global batches of held-out data; equal on every rank."""
        self._loader.settle()
        of_part = self.evaluated_rows(self._loss)
        evaluated = range(self.num_evaluated_rows(max_batches=max_batches)) if of_part is None else of_part
        chunks, work = list(self._held_out_chunks(evaluated)), _TrainerWork(self)
        self.rule.before_evaluation()
        loss = self._loss.given(self._totals(self._held_out, chunks, rows=evaluated, work=work))
        names = self.job.evaluation.metrics
        metrics = MetricTotals(names, loss=loss, data=self.prepared, exact=self.job.is_exact, part=of_part)
        self.model.eval()
        model = self._technique.unwrap(self.model)
        for rows, counted, width in chunks:
            batch = fetch(self._held_out, rows, width=width)
            written = self._answers.written(model, batch) if self._answers is not None and counted else None
            if self._writer is not None:
                batch = self._writer.held_out_batch(model, batch, seed=self.job.seed, rows=rows)
            output, batch = work.run(batch)
            if counted and output is not None:
                metrics.add(output, batch, rows=rows, written=written)
        if metrics.of_models:
            most = self.job.max_evaluated_rows
            num_rows = most if max_batches is None else min(most, max_batches * self.job.global_batch_size)
            with self.autocast(), beating(model, self.beat):
                metrics.measure_model(model, self.prepared, num_rows, ranks=self.own_part, batch_size=self.micro_batch)
        self.model.train()
        result = metrics.result(self.ranks.gather(metrics.parts()))
        self.observe_rows(metrics.row_values)
        return result

    def _held_out_chunks(self, evaluated: Sequence[int]) -> Iterator[Chunk]:
        """Yields, of the rows that are evaluated, the rank's rows of each forward pass.

        With them it yields whether they count, and the width of the global batch.

        Every rank runs the same number of forward passes; a rank without rows left runs one row that does not count.
        """
        size = self.job.global_batch_size
        for begin in range(0, len(evaluated), size):
            rows = evaluated[begin : begin + size]
            # Whole micro-batches, so that the same rows are computed together by any number of ranks.
            num_own = -(-len(rows) // (self.own_part.num_parts * self.micro_batch)) * self.micro_batch
            width = self.batches.width(self._held_out, rows)
            own_rows = list(rows[self.own_part.number * num_own : (self.own_part.number + 1) * num_own])
            for start in range(0, num_own, self.micro_batch):
                chunk = own_rows[start : start + self.micro_batch]
                yield chunk or [rows[0]], bool(chunk), width

    def save(self, root: Root) -> float:
        """Checkpoints the state after `next_step` steps; returns the seconds that it took."""
        started_s = time.perf_counter()
        self.store(root).save(self.next_step, self.pieces(), self.checkpoint_meta())
        self.beat()
        return time.perf_counter() - started_s

    def pieces(self, *, copies: HostCopies | None = None) -> WritePieces:
        """Returns the pieces that this rank writes into a checkpoint of the present state. All ranks call it together.

        With `copies`, the state is copied at once; without it, the state must not change before it is written.
        """
        return piece_writer(self.written(), copies=copies)

    def written(self) -> dict[str, Tensor]:
        """Returns the tensors, by canonical name, of which this rank writes its parts into a checkpoint."""
        if (own := self.rule.written(self)) is not None:
            return own
        named = {**self.model_state(), **self._technique.optimizer_state(self.model, self.optimizer)}
        return {k: v for k, v in named.items() if self._technique.writes(k, v, rank=self.ranks.rank)}

    def model_state(self) -> dict[str, Tensor]:
        """Returns the tensors of the model that checkpoints store."""
        return named_state(self.unwrapped, only=self._stored)

    def own_tensors(self) -> Iterator[Tensor]:
        """Yields what this rank holds of parameters and optimizer state, in one order."""
        for parameter in self.parameters:
            yield local(parameter)
            states = self.optimizer.state.get(parameter, {})
            yield from (local(states[key]) for key in sorted(states) if isinstance(states[key], Tensor))

    def checkpoint_meta(self) -> dict[str, Any]:
        """Returns the metadata of the job that a checkpoint stores."""
        meta = self.model_meta(self._plain) | ({CHUNK: self.micro_batch} if self.job.is_exact else {})
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
            chunk = checkpoint.manifest.meta.get(CHUNK, self.rule.unmarked_chunk(self))
            if chunk != self.micro_batch:
                raise ValueError(
                    f"{checkpoint.location} was trained exactly, in chunks of {chunk} samples, and not of "
                    f"{self.micro_batch}. To fix: set exact_chunk: {chunk}"
                )
        with Reader(checkpoint) as reader:
            restore_model(reader, self.unwrapped, only=self._stored)
            self._technique.restore_optimizer(reader, self.model, self.optimizer)
            self.rule.restore(self, reader, checkpoint)
        self.next_step = checkpoint.manifest.step
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
                    folder, adapter=adapter, spec=spec, base=base, state=state, prepared=prepared, job=self.job
                )
            else:
                export_model(
                    folder, spec=spec, model=self._plain, state=state, prepared=prepared, base=base, job=self.job
                )
            if self.order.model_url is not None:
                self.beat()
                store_model(folder, self.order.model_url)
        self.beat()

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the autocast context of the job's precision."""
        enabled = self.job.phase(self.next_step).precision == "bf16"
        return torch.autocast(self.ranks.device.type, dtype=torch.bfloat16, enabled=enabled)


class _TrainerWork:
    """A rank's part of one step; implements `ringmaster.techniques.technique.StepWork`."""

    def __init__(
        self, trainer: Trainer, indices: Indices = (), places: Sequence[range] = (), *, width: int | None = None
    ) -> None:
        self._trainer, self._step, self.width = trainer, trainer.next_step, width
        self.beat, self.autocast, self.inputs = trainer.beat, trainer.autocast, trainer._loss.forward_inputs
        self.written: list[dict[str, Tensor]] | None = None  # of each micro-batch, where the model writes them
        self.places = places
        self.micro_batches = [[int(indices[place]) for place in each] for each in places]
        self.loss_function = trainer._training_loss
        self.is_measured = trainer.batches.splits_first(self._step)
        self._num_tokens: dict[int, int] = {}  # by micro-batch, which may be read twice

    @property
    def num_tokens(self) -> int:
        """The tokens of the micro-batches that were read."""
        return sum(self._num_tokens.values())

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    def batch(self, index: int) -> dict[str, Tensor]:
        trainer, loader = self._trainer, self._trainer.batches.loader
        if self.written is not None:
            self._num_tokens[index] = num_tokens_of(self.written[index])
            return self.before_forward(self.written[index])
        request = RowsRequest(rows=tuple(self.micro_batches[index]), width=self.width)
        if not trainer._draws_by_hash:
            first = self.places[index].start
            of_rank = (0, first // trainer.micro_batch) if trainer.job.is_exact else (trainer.own_part.number, index)
            seed = _derived_seed(trainer.job.seed, self._step, *of_rank)
            batch = loader.batch(request, seed=lambda: seed_torch(seed))
        else:
            samples, seed = self.places[index], _derived_seed(trainer.job.seed, self._step)
            batch = loader.batch(request, seed_sample=lambda place: seed_generators(seed, samples[place]))
        self._num_tokens[index] = num_tokens_of(batch)
        batch = self.before_forward(trainer._to_device(trainer._technique.part(batch)))
        if trainer._draws_by_hash:
            use(Draws(seed=seed, samples=self.loss_function.sequences(samples), shared=trainer._sites.shared))
        loader.load_ahead()
        return batch

    def before_forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the batch with what the trained model computes as the reference of its loss, before the forward."""
        trainer, reference = self._trainer, self._trainer.reference
        if reference is None:
            return batch
        return reference.before_forward(
            batch,
            trained=trainer.model,
            inner=trainer.unwrapped,
            forward=lambda batch: trainer._technique.forward(trainer.model, batch, self),
        )

    def run(self, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """Returns the model's output for a batch, and the batch with what its loss compares.

        The output is None on ranks that have none: in a pipeline only the last stage has one.
        """
        trainer = self._trainer
        batch = self.before_forward(trainer._to_device(trainer._technique.part(batch)))
        output = trainer._technique.forward(trainer.model, batch, self)
        self.beat()
        return output, batch if output is None else self.before_loss(batch)

    def before_loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the batch with what a frozen copy computes as the reference of its loss, before the loss."""
        reference = self._trainer.reference
        return batch if reference is None else reference.before_loss(batch)

    def loss(self, output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | int]:
        return self.loss_function(output, self.before_loss(batch))

    def zero(self) -> Tensor:
        # Sums of a few fp32 losses have no error in fp64, so that an exact job's do not depend on their order.
        dtype = torch.float64 if self._trainer.job.is_exact else torch.float32
        return torch.zeros((), device=self._trainer.ranks.device, dtype=dtype)

    def measure_part(self, count: float) -> None:
        for callback in self._trainer.callbacks:
            callback.observe_first(count=count, num_samples=len(self.places[0]) * self._trainer.own_part.num_parts)


def _derived_seed(*parts: int) -> int:
    """Returns a seed of what the numbers identify; it is derived, so that no generator's state need be stored."""
    return int(digest(parts), 16) % (1 << 63)
