"""Trials on the real devices, run side by side so that each is measured while its neighbours are as busy as later."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.profiling.reference import QuietTimes, without_load
from ringmaster.tasks.profiling.search import FAILED, KILLED, OUT_OF_MEMORY, TIMED_OUT, Failure, Result
from ringmaster.techniques import Job, Profile, registry
from ringmaster.techniques.preflight import Candidate, Preflight
from ringmaster.techniques.processes.events import Event, Measured, OutcomeStatus, Ready, ReferenceTimed
from ringmaster.techniques.processes.forkserver_client import ForkServerClient
from ringmaster.techniques.processes.gang import Gang, Outcome
from ringmaster.techniques.processes.order import TRIAL, GangOrder, Slot
from ringmaster.techniques.processes.reporter import MEASURE, STOP
from ringmaster.techniques.profile import ProfileKey
from ringmaster.techniques.technique import GangShape

READY_SHARE = 0.75  # of a trial's time limit, after which a gang that has not begun to train is killed
STOPPING_S = 5.0  # after the limit, for gangs to end


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One candidate of one job, to be measured on its prepared `data`.

    key: under which the result is stored.
    members: the other jobs that the same gang trains, each with its data.
    """

    key: ProfileKey
    job: Job
    data: Mapping[str, Any]
    candidate: Candidate
    members: tuple[tuple[Job, Mapping[str, Any]], ...] = ()

    @property
    def fingerprint(self) -> str:
        """The fingerprint of what it measures."""
        return self.key.fingerprint

    def __str__(self) -> str:
        """Returns a description of the trial for people."""
        config = " ".join(f"{key}={value}" for key, value in self.candidate.config.items())
        beside = f" and {len(self.members)} more" if self.members else ""
        return f"{self.job.name}{beside}: {self.candidate.technique} x{self.candidate.num_devices} ({config})"


@dataclass(frozen=True, kw_only=True)
class TrialEnvironment:
    """The environment of trials and segments: fork server, the devices of one node, and the folders of workers.

    weights: the folders of models that jobs adapt, by the keys of `PreflightOrder.weights`.
    preflight_ahead: `PreflightAhead.result` of a preflight that was begun before the run was opened.
    """

    server: ForkServerClient
    devices: tuple[Device, ...]
    cache_dir: Path
    import_paths: tuple[str, ...] = ()
    weights: Mapping[str, Path] = field(default_factory=dict)
    preflight_ahead: Callable[..., tuple[dict[str, Preflight], dict[str, str]] | None] | None = None


def slots_of(devices: Sequence[Device]) -> tuple[Slot, ...]:
    """Converts devices into the form that workers use."""
    return tuple(
        Slot(kind=d.kind, index=d.index, uuid=d.uuid, cores=d.cores, memory_bytes=d.memory_bytes) for d in devices
    )


def gang_shape(devices: Sequence[Device]) -> GangShape:
    """Converts devices of one node into the form that techniques use."""
    return GangShape(kind=devices[0].kind, num_devices=len(devices), memory_bytes=min(d.memory_bytes for d in devices))


def waves(trials: Sequence[Trial], *, num_devices: int) -> list[list[Trial]]:
    """Divides trials into waves of equal gang size that fill the node, the smallest gangs first.

    Trials of one wave belong to different searches, so that none depends on another's result.
    """
    by_size = sorted(trials, key=lambda trial: trial.candidate.num_devices)
    result = []
    for size, group in itertools.groupby(by_size, key=lambda trial: trial.candidate.num_devices):
        members, width = list(group), max(num_devices // size, 1)
        result += [members[first : first + width] for first in range(0, len(members), width)]
    return result


def run_wave(environment: TrialEnvironment, wave: Sequence[Trial], *, limit_s: float = math.inf) -> dict[str, Result]:
    """Measures the trials of one wave at the same time; free devices run copies of them, as busy neighbours.

    limit_s: the seconds after which what is not measured is killed.

    Returns a profile or a failure by fingerprint.
    """
    size = wave[0].candidate.num_devices
    positions = [environment.devices[i : i + size] for i in range(0, len(environment.devices) - size + 1, size)]
    crowd = [trial for trial, _ in zip(itertools.cycle(wave), positions, strict=False)]
    # The folder is on the disk where checkpoints will be written, so that the measured cost of a save holds there.
    with TemporaryDirectory(prefix="trials-", dir=environment.cache_dir) as folder:
        runs = [
            _Run(environment, trial, position, Path(folder) / str(i))
            for i, (trial, position) in enumerate(zip(crowd, positions, strict=True))
        ]
        outcomes = _Wave(runs, QuietTimes(environment.cache_dir), limit_s=limit_s).conduct()
    return {trial.fingerprint: outcomes[i] for i, trial in enumerate(wave)}


class _Run:
    """One running trial."""

    def __init__(self, environment: TrialEnvironment, trial: Trial, devices: Sequence[Device], folder: Path) -> None:
        self.trial = trial
        order = GangOrder(
            purpose=TRIAL,
            job=trial.job,
            technique=registry.dotted_path(trial.candidate.technique),
            config=trial.candidate.config,
            slots=slots_of(devices),
            folder=str(folder),
            cache_dir=str(environment.cache_dir),
            data=trial.data,
            import_paths=environment.import_paths,
            ordered_at_s=time.monotonic(),
        )
        members = tuple(replace(order, job=job, data=data) for job, data in trial.members)
        order = replace(order, members=members)
        self.gang = Gang(environment.server, order, num_ranks=trial.candidate.num_ranks)


class _Wave:
    """Starts the measurements of a wave together, and keeps all of its gangs busy until the last one is done.

    A gang that is not ready after `READY_SHARE` of the limit is killed, so that the others are measured.
    """

    def __init__(self, runs: Sequence[_Run], quiet_times: QuietTimes, *, limit_s: float) -> None:
        self._runs, self._quiet_times, self._limit_s = runs, quiet_times, limit_s
        self._began_s = time.monotonic()
        self._heard: queue.Queue[tuple[int, Event | Outcome]] = queue.Queue()
        self._ready: set[int] = set()
        self._measured: dict[int, Measured] = {}
        self._timed: dict[int, list[ReferenceTimed]] = {}
        self._ended: dict[int, Outcome] = {}
        self._killed: set[int] = set()  # as they took too long

    def conduct(self) -> list[Result]:
        with ExitStack() as stack:
            for i in range(len(self._runs)):
                thread = threading.Thread(target=self._wait, args=(i,), name=f"trial-{i}")
                thread.start()
                stack.callback(thread.join)
            for run in self._runs:
                stack.callback(run.gang.kill)
            self._listen(until_in=self._ready, limit_s=READY_SHARE * self._limit_s)
            self._tell(MEASURE)
            self._listen(until_in=self._measured, limit_s=self._limit_s)
            self._tell(STOP)
            self._listen(until_in=self._ended, limit_s=self._limit_s + STOPPING_S)
        return [self._result(i) for i in range(len(self._runs))]

    def _wait(self, index: int) -> None:
        outcome = self._runs[index].gang.wait(lambda event: self._heard.put((index, event)))
        self._heard.put((index, outcome))

    def _tell(self, command: str) -> None:
        for run in self._runs:
            run.gang.send(command)

    def _listen(self, *, until_in: Collection[int], limit_s: float) -> None:
        """Handles events until each run is in a collection or has ended; kills those that are not after `limit_s`."""
        while left := {*range(len(self._runs))}.difference(until_in, self._ended):
            left_s = self._began_s + limit_s - time.monotonic()
            try:
                index, heard = self._heard.get(timeout=max(left_s, 0.0) if left_s < math.inf else None)
            except queue.Empty:
                self._killed |= left
                for number in left:
                    self._runs[number].gang.kill()
                limit_s = math.inf  # they end now
                continue
            if isinstance(heard, Outcome):
                self._ended[index] = heard
            elif isinstance(heard, Ready):
                self._ready.add(index)
            elif isinstance(heard, Measured):
                self._measured[index] = heard
            elif isinstance(heard, ReferenceTimed):
                self._timed.setdefault(index, []).append(heard)

    def _result(self, index: int) -> Result:
        if index in self._measured:
            candidate = self._runs[index].trial.candidate
            load = self._quiet_times.load(self._timed.get(index, ()))
            quiet = Profile(
                technique=candidate.technique,
                config=candidate.config,
                num_devices=candidate.num_devices,
                num_ranks=candidate.num_ranks,
                predicted_step_s=candidate.step_s,
                key=self._runs[index].trial.key,
                **without_load(self._measured[index], load),
            )
            return quiet.under_load(load.ratio)
        if index in self._killed:
            return Failure(kind=TIMED_OUT, message=f"it took more than {self._limit_s:.0f} s")
        outcome = self._ended[index]
        return Failure(kind=_kind(outcome), message=outcome.message)


def _kind(outcome: Outcome) -> str:
    if outcome.status == OutcomeStatus.OUT_OF_MEMORY:
        return OUT_OF_MEMORY
    return KILLED if outcome.was_killed else FAILED
