"""The specification of a sweep: a job, the parameters to vary and how; its trials as jobs of one batch.

The trials are proposed by `ringmaster.tasks.sweeping.sampling`, and stopped early by a
`ringmaster.tasks.sweeping.early_stopping.StoppingPolicy`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ringmaster.errors import BatchFileError
from ringmaster.findings import Finding, as_mapping
from ringmaster.tasks.batch import Batch, Fault, parse_batch
from ringmaster.tasks.batch.document import place_text
from ringmaster.tasks.batch.grid import in_rows, key_findings, with_values
from ringmaster.tasks.sweeping import space as spaces
from ringmaster.tasks.sweeping.early_stopping import StoppingPolicy
from ringmaster.tasks.sweeping.ranking import Ranking
from ringmaster.tasks.sweeping.sampling import GRID, TPE, ProposedTrial, num_startup, propose
from ringmaster.tasks.sweeping.space import MAX_TRIALS, Parameter, Values
from ringmaster.techniques import Job


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """A sweep.

    template: the job to vary, as plain values.
    folder: the folder to which the template's paths are relative.
    space: the parameters to vary.
    sampler: "random", "grid" or "tpe".
    stopping: the policy of early stopping.
    ranking: how trials are compared.
    num_trials: the most trials; None for all of a grid.
    num_parallel: the number of trials that may lack results when TPE proposes the next one.
    deadline_s: the seconds from the sweep's start after which no trial continues.
    batch_keys: keys of optional features for the batch of the trials.
    is_shuffled: whether a grid is tried in random order, so that the trials so far tell of the others.
    """

    name: str
    template: Mapping[str, Any]
    folder: Path
    space: tuple[Parameter, ...]
    sampler: str
    stopping: StoppingPolicy
    ranking: Ranking
    num_trials: int | None = None
    num_parallel: int = 4
    devices: Any = "auto"
    deadline_s: float | None = None
    seed: int = 0
    batch_keys: Mapping[str, Any] = field(default_factory=dict)
    is_shuffled: bool = False

    @property
    def objective(self) -> str:
        """The metric by which trials are compared, or the first of several."""
        return self.ranking.metric

    @property
    def trials(self) -> list[str]:
        """The names of the trials, in order."""
        size = spaces.num_combinations(self.space)
        count = size if self.sampler == GRID and size is not None else self.num_trials or MAX_TRIALS
        width = len(str(count - 1))
        return [f"trial-{number:0{width}}" for number in range(count)]

    @property
    def num_known(self) -> int:
        """The number of trials whose values are known before any training."""
        count = len(self.trials)
        return num_startup(count) if self.sampler == TPE else count

    def known(self) -> list[Values]:
        """Returns the values of those trials."""
        result: list[Values] = []
        for number in range(self.num_known):
            result.append(self.propose(number, [ProposedTrial(values=values) for values in result]))
        return result

    def provisional(self) -> list[Values]:
        """Returns the initial values of all trials: their own if known, else those of some shape.

        Every shape occurs among them, so that all profiles are measured before the first trial begins.
        """
        known = self.known()
        shapes = spaces.shapes(self.space) if len(known) < len(self.trials) else []
        return [*known, *(shapes[i % len(shapes)] for i in range(len(self.trials) - len(known)))]

    def shape(self, values: Values) -> Values:
        """Returns the values of a trial that may affect its speed or size."""
        return spaces.shape_of(self.space, values)

    def propose(self, number: int, earlier: Sequence[ProposedTrial]) -> Values:
        """Returns the values of a trial; see `ringmaster.tasks.sweeping.sampling.propose`."""
        return propose(
            self.space,
            sampler=self.sampler,
            number=number,
            earlier=earlier,
            seed=self.seed,
            num_trials=len(self.trials),
            num_targets=len(self.ranking.objectives),
            is_shuffled=self.is_shuffled,
        )

    def proposed_trial(self, values: Values, metrics: Mapping[str, float] | None) -> ProposedTrial:
        """Returns a trial with its results for the sampler. metrics: None while there are none."""
        if metrics is None:
            return ProposedTrial(values=values)
        targets, violations = self.ranking.targets(metrics), self.ranking.violations(metrics)
        return ProposedTrial(values=values, targets=targets, violations=violations)

    def job(self, name: str, values: Values) -> Job:
        """Returns a trial as a job."""
        return self.stopping.with_rungs(self._parsed([{**self._raw(values), "name": name}]).jobs[0])

    def batch(self) -> Batch:
        """Returns all trials as jobs of one batch; trials that are not proposed yet have provisional values.

        Raises BatchFileError with all faults.
        """
        if faults := self.faults():
            raise BatchFileError(faults)
        trials = zip(self.trials, self.provisional(), strict=True)
        batch = self._parsed([{**self._raw(values), "name": name} for name, values in trials])
        return replace(batch, jobs=tuple(self.stopping.with_rungs(job) for job in batch.jobs))

    def faults(self) -> list[Fault]:
        """Returns all faults of the space, the stopping policy and the resulting jobs."""
        result = spaces.findings(self.space, sampler=self.sampler, num_trials=self.num_trials)
        result += self.stopping.findings(
            self.template,
            varied=[parameter.key for parameter in self.space],
            ranking=self.ranking,
            sampler=self.sampler,
        )
        result += self.ranking.findings()
        result += key_findings(self.template, (parameter.key for parameter in self.space), at=("space",))
        result += [*self._uncovered_shapes(), *self._doubled_keys()]
        placed = {finding.place: finding for finding in reversed(result)}
        faults = [Fault(place_text(f.place), None, f.message, f.remedy) for f in reversed(placed.values())]
        return list({(f.place, f.message): f for f in [*self._faults_of_jobs(), *faults]}.values())

    def _uncovered_shapes(self) -> Iterator[Finding]:
        if self.sampler != TPE or self.num_trials is None:
            return
        if any(isinstance(p, spaces.Range) and spaces.changes_shape(p) for p in self.space):
            return
        num_shapes, num_late = spaces.num_shapes(self.space), self.num_trials - num_startup(self.num_trials)
        if num_late < num_shapes and num_late > 0:
            problem = f"has {num_shapes} shapes, more than the {num_late} trials that are proposed later"
            yield Finding(("space",), problem, "raise num_trials, list fewer values, or use random")

    def _doubled_keys(self) -> Iterator[Finding]:
        """Yields the keys with conditions that the template has, too, so that all trials would have them."""
        for parameter in self.space:
            place: Any = self.template
            for part in parameter.key.split("."):
                place = as_mapping(place).get(part)
            if parameter.when and place is not None:
                problem = "has a condition, and the template has it for all trials"
                yield Finding(("space", parameter.key), problem, "remove it from the template")

    def _faults_of_jobs(self) -> Iterator[Fault]:
        """Yields the faults of the template, and of the template with each extreme value, one key at a time."""
        plain = self._faults_of(self.template, key=None)
        yield from plain
        known = {(fault.place, fault.message) for fault in plain}
        for parameter in self.space:
            for where, value in parameter.extremes().items():
                if isinstance(value, float) and not math.isfinite(value):
                    continue
                values = spaces.example(self.space, parameter, value)
                for fault in self._faults_of(with_values(self.template, values), key=parameter.key):
                    if (fault.place, fault.message) in known:
                        continue
                    is_within = fault.place == parameter.key or fault.place.startswith(f"{parameter.key}.")
                    is_here = is_within or parameter.key.startswith(f"{fault.place}.")
                    is_unknown = "unknown key" in fault.message
                    place = f"space.{parameter.key}" + ("" if is_unknown or not is_here else f".{where}")
                    message = fault.message if is_here else f"{fault.place} {fault.message}"
                    yield replace(fault, place=place, message=message)

    def _faults_of(self, template: Mapping[str, Any], *, key: str | None) -> list[Fault]:
        try:
            self._parsed([{**template, "name": self.name}])
        except BatchFileError as error:
            varied = {parameter.key for parameter in self.space} if key is None else set()
            result = [
                replace(f, place=f.place.removeprefix("jobs[0]").lstrip("."), line=None, file="") for f in error.faults
            ]
            # A key that the template lacks may be one that is varied.
            return [f for f in result if not any(f.place == k or f.place.startswith(f"{k}.") for k in varied)]
        return []

    def _raw(self, values: Values) -> dict[str, Any]:
        """Returns a trial's plain values: the template's, the varied ones, and the metrics of the ranking."""
        raw = in_rows(with_values(self.template, values), template=self.template)
        evaluation = dict(raw.get("evaluation") or {})
        evaluation["metrics"] = list(dict.fromkeys([*self.ranking.metrics, *evaluation.get("metrics", ())]))
        return {**raw, "evaluation": evaluation}

    def _parsed(self, jobs: Sequence[Mapping[str, Any]]) -> Batch:
        raw = {"name": self.name, "devices": self.devices, "jobs": jobs, **self.batch_keys}
        return parse_batch(json.dumps(raw), folder=self.folder, name=self.name)
