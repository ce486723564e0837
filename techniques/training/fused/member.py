"""One job of a group that shares a base: its adapter, optimizer, step and checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringmaster.techniques.checkpoints.checkpoint import WritePieces, store_model
from ringmaster.techniques.checkpoints.state import HostCopies, Reader, named_state, piece_writer, restore_model
from ringmaster.techniques.data import fetch
from ringmaster.techniques.models.adapters import AdaptedLinear, first_state, own_leaves, sites
from ringmaster.techniques.models.export import export_adapter
from ringmaster.techniques.models.peft_format import PREFIX, resolved
from ringmaster.techniques.multi_adapter.adapter_batches import AdapterBatch
from ringmaster.techniques.multi_adapter.adapter_runs import AdapterModules, adapter_modules_of
from ringmaster.techniques.multi_adapter.parameter_rows import ParameterRow, in_order_of, tree_of
from ringmaster.techniques.processes.order import GangOrder
from ringmaster.techniques.processes.ranks import RankContext, alone
from ringmaster.techniques.training.batch_loader import RowsRequest
from ringmaster.techniques.training.bound_loss import BoundLoss, bind_loss
from ringmaster.techniques.training.gradients import global_norm, whole
from ringmaster.techniques.training.optimizers import build_optimizer, parameter_settings, update_
from ringmaster.techniques.training.rank_job import RankJob, Root, batch_width


class GroupMember(RankJob):
    """A job on one rank that is trained while other jobs are trained on the same base.

    order: the job's order, with the paths of its data, checkpoints and model, as for a gang of its own.
    model: the base.
    ranks: the ranks of the gang. Each has an equal part of every batch and a full copy of the adapter.
    """

    def __init__(
        self, order: GangOrder, model: nn.Module, *, device: torch.device, ranks: RankContext | None = None
    ) -> None:
        assert order.job.adapter is not None
        super().__init__(order, ranks or alone(device))
        self._model = model
        self.loss: BoundLoss = bind_loss(self.job.loss, model, self.job.model, options=self.job.loss_options)
        self._adapter = resolved(order.job.adapter)
        self.sites: list[AdaptedLinear] = sites(model, self._adapter)
        self.own: list[str] = own_leaves(model, self._adapter)
        state = first_state(model, self._adapter, self.sites, seed=self.job.seed)
        state = {name: whole(value).to(device).float() for name, value in state.items()}
        self.tree = tree_of(in_order_of(model, state))
        settings = parameter_settings(self.job, self.tree)
        self.row = ParameterRow(self.tree, settings=settings)
        of_segments = {segment: settings[name] for segment, name in self.row.names().items()}
        self.optimizer = build_optimizer(self.job, self.row.segments, settings=of_segments)
        self._parameters = dict(self.tree.named_parameters())
        self._adapter_modules: tuple[int, AdapterModules] = (
            -1,
            AdapterModules(),
        )  # with the row's `num_moves` when they were built
        self._idle: frozenset[str] = frozenset()
        self._unreached: set[str] = set()  # own weights that no backward has reached in this step
        for name in self._own_weights():
            forget = partial(self._unreached.discard, name)
            self._parameters[name].register_post_accumulate_grad_hook(lambda _, forget=forget: forget())  # type: ignore[no-untyped-call]

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    def batch(self) -> dict[str, Tensor]:
        """The rank's part of the next step's global batch, on the device."""
        following = (self._request(step) for step in range(self.next_step, self.job.total_steps))
        self._loader.begin_step(following)
        batch = self._loader.batch(self._request(self.next_step))
        self._loader.load_ahead()
        return self._to_device(batch)

    def _request(self, step: int) -> RowsRequest:
        rows = self._sampler.indices(step)
        width = batch_width(self.job, self._training, rows)
        return RowsRequest(rows=tuple(self._own_rows(rows.tolist())), width=width)

    def _own_rows(self, rows: Sequence[int]) -> list[int]:
        size = len(rows) // self.ranks.num_ranks
        return list(rows[self.ranks.rank * size : (self.ranks.rank + 1) * size])

    def part(self, batch: Mapping[str, Tensor]) -> AdapterBatch:
        """The job's part of the group's shared batch: its adapter modules and the model's inputs."""
        if self._adapter_modules[0] != self.row.num_moves:
            self._adapter_modules = (
                self.row.num_moves,
                adapter_modules_of(self._adapter, self.sites, self.own, self._parameters),
            )
        return AdapterBatch(
            adapter_modules=self._adapter_modules[1], inputs=self.loss.forward_inputs(batch), layout=self.row.layout
        )

    def expect_gradients(self) -> None:
        """Prepares for a backward: zeroes the gradients of the job's own module weights.

        A backward adds to these gradients; it overwrites those of the adapter's other parameters.
        """
        self._unreached.update(self._own_weights())
        for name in self._unreached:
            gradient = self._parameters[name].grad
            assert gradient is not None
            gradient.zero_()

    def _own_weights(self) -> list[str]:
        return [name for name in self._parameters if name == PREFIX or name.rpartition(".")[0] in self.own]

    def update(self, *, count: float, idle: frozenset[str] = frozenset()) -> None:
        """Takes one optimizer step, as a gang of the job's own does. The gradients are sums over `count` elements.

        idle: the sites that the model did not use. Their parameters stay unchanged.
        """
        resting = tuple(f"{site}." for site in idle)
        at_rest = {
            name: p for name, p in self._parameters.items() if name.startswith(resting) or name in self._unreached
        }
        kept = {name: parameter.detach().clone() for name, parameter in at_rest.items()}
        for parameter in at_rest.values():
            assert parameter.grad is not None
            parameter.grad.zero_()
        norm = None
        if self.job.clip_grad_norm is not None:
            norm = global_norm([p for name, p in self._parameters.items() if name not in at_rest])
        update_(self.job, self.optimizer, self.row.segments, step=self.next_step, to_mean=1 / count, norm=norm)
        for name, value in kept.items():
            self._parameters[name].data.copy_(value)
        self._idle = frozenset(at_rest)
        self.next_step += 1

    def held_out(self, *, max_batches: int | None = None) -> Iterator[tuple[dict[str, Tensor], list[int]]]:
        """Yields this rank's part of each held-out global batch, and the numbers of its rows, if its metrics count.

        All ranks get the same number of rows at a time. Rows that cannot be divided evenly go to every rank, and only
        the first rank counts them: the others get no numbers. max_batches: at most so many, and those of the job.
        """
        self._loader.settle()
        size, of_part = self.job.global_batch_size, self.evaluated_rows(self.loss)
        evaluated = range(self.num_evaluated_rows(max_batches=max_batches)) if of_part is None else of_part
        for first in range(0, len(evaluated), size):
            rows = evaluated[first : first + size]
            is_divided = len(rows) % self.ranks.num_ranks == 0
            own_rows = self._own_rows(rows) if is_divided else list(rows)
            batch = fetch(self._held_out, own_rows, width=batch_width(self.job, self._held_out, rows))
            yield self._to_device(batch), own_rows if is_divided or self.ranks.rank == 0 else []

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, root: Root) -> None:
        """Writes a checkpoint of the adapter, its optimizer and its step, in the format that every technique reads."""
        self.store(root).save(self.next_step, self.pieces(), self.checkpoint_meta())

    def written(self) -> dict[str, Tensor]:
        """The checkpoint tensors that this rank writes, by canonical name: all on the first rank, none on others."""
        if self.ranks.rank > 0:
            return {}
        states = self.row.states(self.optimizer)
        used = {key: value for key, value in states.items() if key.split("/")[1] not in self._idle}
        return {**named_state(self.tree), **used}

    def pieces(self, *, copies: HostCopies | None = None) -> WritePieces:
        """The pieces of a checkpoint of the current state. copies: buffers to which the state is copied at once."""
        return piece_writer(self.written(), copies=copies)

    def checkpoint_meta(self) -> dict[str, Any]:
        """The job's metadata in a checkpoint's manifest."""
        return self.model_meta(self._model)

    def restore(self, root: Root, *, known_step: int = 0) -> int:
        """Restores the newest checkpoint, whichever technique wrote it; returns the number of steps done.

        Raises as `newest_checkpoint`.
        """
        checkpoint = self.newest_checkpoint(root, known_step=known_step)
        if checkpoint is None:
            return 0
        with Reader(checkpoint) as reader:
            restore_model(reader, self.tree)
            self.row.restore(reader, self.optimizer)
        self.next_step = checkpoint.manifest.step
        return self.next_step

    def export(self, folder: Path, root: Root) -> None:
        """Writes the newest checkpoint's adapter in peft's format. The first rank writes; the others do nothing."""
        if self.ranks.rank == 0:
            export_adapter(
                folder,
                adapter=self._adapter,
                spec=self.job.model,
                base=self.order.weights_from or self.job.model.from_pretrained,
                state=self.trained_weights(root),
                prepared=self.prepared,
                job=self.job,
            )
            if self.order.model_url is not None:
                store_model(folder, self.order.model_url)
