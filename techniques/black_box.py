"""Trainers that are run as they are: nothing is known of what they do inside, only what they say.

The kind of technique that Saturn's `search` and `execute` are (Nagrecha and Kumar, arXiv:2309.01226).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ringmaster.techniques.job import Job
from ringmaster.techniques.technique import Config, GangShape, Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from ringmaster.techniques.engine.models import ModelFacts
    from ringmaster.techniques.engine.order import GangOrder
    from ringmaster.techniques.engine.reporter import Reporter

ENDS = ("done", "preempted", "invalid")


class BlackBox(Technique):
    """Trains by itself, on all devices of a gang, what no other technique can; one worker process watches over it.

    rank: of this process in the gang, set by the harness before `profile` and `run`; 0 where only one watches.
    """

    rank: int = 0

    @abstractmethod
    def profile(self, order: GangOrder, reporter: Reporter) -> dict[str, Any]:
        """A trial, with the events and the result of `ringmaster.techniques.engine.trials.trial`."""

    @abstractmethod
    def run(self, order: GangOrder, reporter: Reporter) -> dict[str, Any]:
        """A segment, with the events and the result of `techniques.engine.training.train`; `checked_result` says which
        parts of that are needed.
        """

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """One, without knobs."""
        yield {}

    def num_ranks(self, gang: GangShape) -> int:
        """The one that watches."""
        return 1

    def estimate_memory(self, job: Job, gang: GangShape, config: Config, facts: ModelFacts) -> int:
        """Nobody knows before it was tried."""
        return 0

    def parallelize(self, model: nn.Module, mesh: DeviceMesh | None, config: Config) -> nn.Module:
        """Never called: the model is inside the box."""
        raise NotImplementedError(f"{self.name} lays out no model")


def checked_result(result: Any, job: Job) -> dict[str, Any]:
    """What `run` returned, as those who decide what follows rely on it: `status`; the `step` up to which the job is
    trained and saved, unless it is invalid; `metrics` where it is done with its last step.

    Raises ValueError where something of that is not there.
    """
    if not isinstance(result, dict) or result.get("status") not in ENDS:
        raise ValueError(f"its run returned {result!r}. To fix: a dict whose status is one of {', '.join(ENDS)}")
    step, status = result.get("step"), result["status"]
    if status != "invalid" and not (type(step) is int and 0 <= step <= job.total_steps):
        raise ValueError(f"its run was {status} at step {step!r}. To fix: a step from 0 to {job.total_steps}")
    if (status, step) == ("done", job.total_steps) and not isinstance(result.get("metrics"), Mapping):
        raise ValueError("its run was done with the last step and returned no metrics. To fix: metrics: {name: number}")
    return result
