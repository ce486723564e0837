"""Base class of techniques that have a loop of their own in place of `Trainer`, and are observed by what they report.

Commands are such, and groups of jobs, rewriting and encoding. (`Job.is_black_box` is true of commands alone.) They
correspond to techniques in Saturn, which have a `search` and an `execute` method (Nagrecha and Kumar,
arXiv:2309.01226).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ringmaster.codec import from_json
from ringmaster.techniques.job import Job
from ringmaster.techniques.processes.gang_events import JobResult, OutcomeStatus
from ringmaster.techniques.technique import Config, GangShape, Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.model_facts import ModelFacts
    from ringmaster.techniques.processes.order import GangOrder
    from ringmaster.techniques.processes.reporter import Reporter

ENDS = ("done", "preempted", "invalid")


class BlackBox(Technique):
    """Trains a job with a loop of its own on all devices of a gang.

    By default, one worker process supervises the loop, or the program that has it.

    rank: rank of this process in the gang, set by the worker before `profile` and `run`; 0 for a single process.
    prints_itself: whether the log is the program's own output, to which the worker adds no lines about its events.
    """

    rank: int = 0
    prints_itself = False
    whole_tensors = True  # the trainer has an optimizer of its own

    @abstractmethod
    def profile(self, order: GangOrder, reporter: Reporter) -> JobResult:
        """Runs a trial. Sends the events and returns the result of `techniques.training.trial.trial`."""

    @abstractmethod
    def run(self, order: GangOrder, reporter: Reporter) -> JobResult:
        """Runs a segment. Sends the events and returns the result of `techniques.training.segment_loop.train_segment`.

        `checked_result` lists the fields of the result that are required.
        """

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields one config, without knobs."""
        yield {}

    def num_ranks(self, gang: GangShape) -> int:
        """Returns 1: the process that supervises the trainer."""
        return 1

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Returns 0, as the memory is unknown until a trial measures it."""
        return 0

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Raises NotImplementedError: the trainer builds and lays out the model itself."""
        raise NotImplementedError(f"{self.name} lays out no model")


def checked_trial(result: Any) -> JobResult:
    """Returns `result`, the value that `profile` returned, or whose JSON form it is; see `checked_result`."""
    return _checked_form(result, method="profile", statuses=tuple(OutcomeStatus))


def checked_result(result: Any, job: Job) -> JobResult:
    """Returns `result`, the value that `run` returned, after checking the fields that the executor relies on.

    A technique of others may return the JSON form of its result.

    status: one of `ENDS`.
    step: the step up to which the job is trained and saved, unless the status is "invalid".
    metrics: a mapping, where the status is "done" at the job's last step.

    Raises ValueError where one of these is missing or wrong.
    """
    ended = _checked_form(result, method="run", statuses=ENDS)
    step, status = ended.step, ended.status
    if status != "invalid" and not (type(step) is int and 0 <= step <= job.total_steps):
        raise ValueError(f"its run was {status} at step {step!r}. To fix: a step from 0 to {job.total_steps}")
    if (status, step) == ("done", job.total_steps) and ended.metrics is None:
        raise ValueError("its run was done with the last step and returned no metrics. To fix: metrics: {name: number}")
    return ended


def _checked_form(result: Any, *, method: str, statuses: Collection[str]) -> JobResult:
    fault = ""
    if isinstance(result, Mapping) and result.get("status") in statuses:
        try:
            result = from_json(JobResult, result)
        except ValueError as error:
            fault = f": {error}"
    if not isinstance(result, JobResult) or result.status not in statuses:
        remedy = f"a JobResult whose status is one of {', '.join(statuses)}"
        raise ValueError(f"its {method} returned {result!r}{fault}. To fix: {remedy}")
    return result
