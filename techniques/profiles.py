"""What was measured of a job: seconds and bytes under one technique, config and number of devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

from ringmaster.techniques.turns import AT_ONCE, num_steps_of_gang


@dataclass(frozen=True, kw_only=True)
class Fellow:
    """A job that a gang trains beside another, on one base.

    num_steps: of the whole job. step_s: by which a step of the gang takes longer while it is there. end_s: for its last
    checkpoint, evaluation and export.
    """

    job: str
    num_steps: int
    step_s: float
    end_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One measured (technique, config, gang size) of a job.

    num_ranks: worker processes of the gang. num_nodes: over which its devices are spread evenly.
    step_s: median seconds of a step after warm-up, taken while the neighbouring devices were busy.
    peak_bytes: the most memory that one device (one rank's process, for CPU slots) held.
    startup_s, save_s, evaluate_s, export_s: seconds from the lease to the first step, of one checkpoint, of one
        evaluation on held-out data, and of writing the finished model.
    stall_s: for which a checkpoint that is written while training goes on holds it up; None: as long as it takes.
    source: "measured" by a trial, or "predicted".
    fellows: the jobs that are trained beside this one, none but under `shared_base`. All other seconds are then those
        of this job among them: a step takes `step_s`, and `Fellow.step_s` for each fellow that is there.
    own_step_s: of `step_s`, by which a step of the gang takes longer while this job is there.
    device_type: the kind of devices that it holds for, where a pool has several; empty where it holds for all.
    """

    technique: str
    config: Mapping[str, Any] = field(default_factory=dict)
    num_devices: int
    num_ranks: int
    step_s: float
    peak_bytes: int
    startup_s: float = 0.0
    save_s: float = 0.0
    evaluate_s: float = 0.0
    export_s: float = 0.0
    stall_s: float | None = None
    source: str = "measured"
    device_type: str = ""
    num_nodes: int = 1
    fellows: tuple[Fellow, ...] = ()
    own_step_s: float = 0.0

    @property
    def at_once(self) -> int | None:
        """How many of the gang's jobs are trained at a time, as `ringmaster.techniques.turns` says; None for all."""
        return self.config.get(AT_ONCE)

    @property
    def together_s(self) -> float:
        """Seconds of a step of the gang, with as many fellows in it as there may be."""
        beside = islice(self.fellows, None if self.at_once is None else self.at_once - 1)
        return self.step_s + sum(fellow.step_s for fellow in beside)

    def runtime_s(
        self,
        *,
        num_steps: int,
        num_evaluations: int = 1,
        num_saves: int = 1,
        fellows_left: Mapping[str, int] | None = None,
    ) -> float:
        """Planned seconds of `num_steps` steps to a job's end: start, steps, checkpoints, evaluations and export.

        fellows_left: steps that fellows have left, by job; all of theirs by default. The gang goes on until all are
        through.
        """
        left = {fellow.job: fellow.num_steps for fellow in self.fellows} | dict(fellows_left or {})
        every = [num_steps, *(left[fellow.job] for fellow in self.fellows)]
        num_in_all = num_steps_of_gang(every, at_once=self.at_once)
        training_s = num_in_all * self.step_s - (num_in_all - num_steps) * self.own_step_s + num_saves * self.save_s
        beside_s = sum(left[fellow.job] * fellow.step_s + fellow.end_s for fellow in self.fellows)
        return self.startup_s + training_s + beside_s + num_evaluations * self.evaluate_s + self.export_s

    def at_pace(self, ratio: float) -> Self:
        """The same with steps that take `ratio` times as long."""
        fellows = tuple(replace(fellow, step_s=fellow.step_s * ratio) for fellow in self.fellows)
        return replace(self, step_s=self.step_s * ratio, own_step_s=self.own_step_s * ratio, fellows=fellows)

    def beside(self, jobs: Collection[str]) -> Self:
        """The same with only those of its fellows that are among `jobs`."""
        return replace(self, fellows=tuple(fellow for fellow in self.fellows if fellow.job in jobs))

    def is_like(self, other: Profile) -> bool:
        """Whether both are of one option, whoever is trained beside its job by now."""
        return self._option == other._option

    @property
    def _option(self) -> tuple[Any, ...]:
        return self.technique, dict(self.config), self.num_devices, self.device_type, self.num_nodes
