"""What an optional feature adds to the training of a job: its `TrainerCallback`s.

A callback adds something, such as masks of weights, a measurement or events. A job has any number of them. How the
gradients of a step change the weights is decided by the job's `UpdateRule`, of which it has exactly one.

The module `trainer` of a feature lists its callbacks in `TRAINER_CALLBACKS`. They are called in the order of
`ringmaster.features.packages`. Methods that read what other callbacks change have a name of their own and are called
before: `observe_gradients` before `change_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from ringmaster import features

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ringmaster.techniques.data_source import PreparedData
    from ringmaster.techniques.job import Job
    from ringmaster.techniques.job_specs import Adapter
    from ringmaster.techniques.processes.gang_events import EvaluationReported, JobEvent, RowValues
    from ringmaster.techniques.processes.order import GangOrder
    from ringmaster.techniques.processes.ranks import RankContext
    from ringmaster.techniques.processes.reporter import Reporter
    from ringmaster.techniques.technique import Config, Technique
    from ringmaster.techniques.training.bound_loss import BoundLoss
    from ringmaster.techniques.training.reference_model import ReferenceModel


class StepPart(NamedTuple):
    """One of the equal parts into which the samples of a step are divided: its number, and how many there are.

    By default each data-parallel rank computes one.
    """

    number: int
    num_parts: int


class LossSums(NamedTuple):
    """Sums over samples: of their losses, of what the loss counts (labels or rows), and of their tokens."""

    loss: float
    loss_count: float
    num_tokens: float


class JobContext(Protocol):
    """A job on a rank, as its callbacks see it: trained alone or in a group, or made without training.

    job: that of the order, as it is trained now.
    technique: of a job that is trained alone; None otherwise.
    """

    order: GangOrder
    job: Job
    ranks: RankContext
    prepared: PreparedData
    technique: Technique | None
    next_step: int


class TrainerContext(JobContext, Protocol):
    """A job that is trained alone, with its model.

    model: as the technique has laid it out. parameters: those that are trained.
    optimizer: a callback may replace it by another one of `build_optimizer`, before the first step.
    reference: what the loss compares the model with, if anything; a callback sets a teacher in `change_model`.
    own_part: of the samples of a step. micro_batch: the rows of a forward pass.
    """

    model: nn.Module
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    build_optimizer: Callable[..., torch.optim.Optimizer]
    reference: ReferenceModel | None
    own_part: StepPart
    micro_batch: int
    beat: Callable[[], None]

    @property
    def unwrapped(self) -> nn.Module:
        """The module whose parameters have the names of the model as it was built."""

    @property
    def updated_parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank's optimizer updates."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the autocast context of the job's precision."""

    def compute_gradients(self, part: StepPart) -> LossSums:
        """Computes the gradients of a part of the next step's samples; returns its sums."""

    def update(self, optimizer: torch.optim.Optimizer, count: float) -> None:
        """Takes an optimizer step with the gradients of a loss of the given count."""

    def model_state(self) -> dict[str, Tensor]:
        """Returns the tensors of the model that checkpoints store."""

    def own_tensors(self) -> Iterator[Tensor]:
        """Yields what this rank holds of parameters and optimizer state, in one order."""


class TrainerCallback:
    """What a feature does in the training of one job on one rank. By default a method does nothing.

    may_end_job: whether an evaluation may end the job before its last step.
    is_interrupted: whether an evaluation of a part of the rows has ended before its end, so that another gang goes on.
    """

    may_end_job: ClassVar[bool] = False
    is_interrupted = False

    def __init__(self, context: JobContext) -> None:
        """Creates the callback before the model is built."""

    @classmethod
    def is_for(cls, context: JobContext) -> bool:
        """Returns whether the callback is called in the job's training. All ranks of a gang must agree."""
        return False

    @classmethod
    def further_configs(cls, job: Job, technique: Technique, *, device_kind: str) -> Iterator[tuple[Config, str]]:
        """Yields keys to add to a plain config for the search, each with the reason why it cannot be; "" if it can."""
        yield from ()

    @classmethod
    def check_weights(cls, job: Job, data: PreparedData, folders: Mapping[str, str]) -> None:
        """Raises StepError, before a job is planned, where weights do not suit it that it reads.

        folders: of its base, by the job's name, and of its other parents, as far as they are there.
        """

    # -- construction, in this order -----------------------------------------------------------------------------------

    @classmethod
    def change_base(cls, order: GangOrder, model: nn.Module, adapter: Adapter | None) -> None:
        """Changes the model of any order in place, before an adapter is attached."""

    def change_model(self, trainer: TrainerContext, model: nn.Module, loss: BoundLoss) -> BoundLoss:
        """Changes the model in place after parameters were frozen, and before its layout; returns the loss to train."""
        return loss

    def after_layout(self, model: nn.Module) -> None:
        """Follows the layout of the model. model: what the technique unwraps."""

    def before_training(self, trainer: TrainerContext) -> None:
        """Follows the construction of the optimizer and of the update rule."""

    # -- a step --------------------------------------------------------------------------------------------------------

    def splits_first(self, step: int) -> bool:
        """Returns whether the ranks exchange the gradients of their first micro-batches by themselves in a step."""
        return False

    def observe_first(self, *, count: float, num_samples: int) -> None:
        """Reads the gradients of the first micro-batches. count: of the loss, here. num_samples: on all ranks."""

    def summed_values(self) -> tuple[float, ...]:
        """Returns values that are summed over the ranks with the loss, always equally many."""
        return ()

    def observe_gradients(self, sums: Sequence[float], *, step: int, count: float, to_mean: float) -> Any:
        """Reads the gradients that all ranks have exchanged; returns a measurement to report, as plain values, or None.

        sums: of `summed_values`. count: of the loss, on all ranks. to_mean: the factor of the mean's gradients.
        """

    def change_gradients(self) -> None:
        """Changes the gradients in place before they are clipped."""

    def after_step(self, trainer: TrainerContext) -> None:
        """Follows a step."""

    # -- an evaluation on the way --------------------------------------------------------------------------------------

    def evaluated_rows(self, loss: BoundLoss, num_rows: int) -> Sequence[int] | None:
        """Returns the numbers of the held-out rows that an evaluation computes now, in their order; None for all.

        The first metric is then a mean, and the loss separates rows. num_rows: of a whole evaluation.
        """

    def observe_rows(self, rows: RowValues | None, num_rows: int) -> None:
        """Follows an evaluation. rows: the values of `evaluated_rows`; None where it has computed all `num_rows`."""

    def change_report(self, report: EvaluationReported) -> EvaluationReported:
        """Returns the report of an evaluation."""
        return report

    def evaluation_votes(self, reporter: Reporter, *, is_leaving: bool) -> tuple[float, ...]:
        """Returns values that are summed over the ranks after an evaluation of a part, equally many on all.

        is_leaving: whether this rank was commanded to end the job's part in the gang.
        """
        return ()

    def continues_evaluation(self, sums: Sequence[float]) -> bool:
        """Returns whether another evaluation follows at once. sums: of `evaluation_votes`, if there are any."""
        return False

    # -- a segment -----------------------------------------------------------------------------------------------------

    def begin_segment(self, context: JobContext, root: str | Path) -> None:
        """Begins a segment after the checkpoint under `root` that was restored, if any."""

    def events(self) -> Iterator[JobEvent]:
        """Yields the events that the segment reports at its beginning."""
        yield from ()

    def after_publish(self, step: int, *, is_last: bool) -> None:
        """Follows the publication of the checkpoint of `step`. Called on rank 0."""

    def ends_job(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether the job ends with these metrics, before its last step."""
        return False

    def final_values(self, metrics: Mapping[str, float]) -> Mapping[str, Any]:
        """Returns what to add to the result of a job that ends with these metrics (`JobResult.extended`)."""
        return {}

    def after_export(self, context: JobContext, reporter: Reporter) -> Mapping[str, Any]:
        """Follows the export of the finished model; returns what to add to the result (`JobResult.extended`)."""
        return {}


def callback_classes() -> Iterator[type[TrainerCallback]]:
    """Returns the callbacks of all features, in the order in which they are called."""
    return features.listed("trainer", "TRAINER_CALLBACKS")


def further_configs(job: Job, technique: Technique, *, device_kind: str) -> list[tuple[Config, str]]:
    """Returns keys that features add to a plain config in the search, each with why it cannot be used; "" if it can."""
    further = (each.further_configs(job, technique, device_kind=device_kind) for each in callback_classes())
    return [*chain.from_iterable(further)]


def change_base(order: GangOrder, model: nn.Module, adapter: Adapter | None) -> None:
    """Changes the model of an order in place, before an adapter is attached."""
    for feature in order.job.features if adapter is not None else ():
        feature.change_base(model, adapter)
    for callback in callback_classes():
        callback.change_base(order, model, adapter)


def callbacks_of(context: JobContext) -> tuple[TrainerCallback, ...]:
    """Returns the callbacks of a job, in the order in which they are called."""
    return tuple(callback(context) for callback in callback_classes() if callback.is_for(context))
