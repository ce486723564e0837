"""Trials on the real devices, run side by side so that each is measured while its neighbours are as busy as later."""

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from ringmaster.errors import DevicesBusy
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.profiling.machine_load import QuietTimes, without_load
from ringmaster.tasks.profiling.preflight_runs import MAX_ATTEMPTS, GangEnvironment, slots_of
from ringmaster.tasks.profiling.profile_store import ProfileStore
from ringmaster.tasks.profiling.search import (
    FAILED,
    KILLED,
    OUT_OF_MEMORY,
    REFUSED,
    TIMED_OUT,
    ConfigSearch,
    ProfilingFailure,
    Result,
    worthwhile,
)
from ringmaster.techniques import Job, Profile, registry
from ringmaster.techniques.preflight_result import Candidate, Preflight
from ringmaster.techniques.processes import gang_events
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.order import TRIAL, GangOrder
from ringmaster.techniques.processes.reporter import MEASURE, STOP
from ringmaster.techniques.profiles import ProfileKey
from ringmaster.techniques.technique import KERNELS
from ringmaster.text import Notice

_Device = TypeVar("_Device")

READY_SHARE = 0.75  # of a trial's time limit, after which a gang that has not begun to train is killed
STOPPING_S = 5.0  # after the limit, for gangs to end
MAX_TRIAL_S = 20.0  # of one trial, from its start: then it is killed, and the prediction of its option remains
MIN_TRIAL_S = 3.0  # of a trial of a small model; less time is not begun


@dataclass(frozen=True, kw_only=True)
class DevicesWanted:
    """The number of devices that are requested on one node.

    least: the fewest devices that are of use.
    most: the most devices that are of use.
    fills: whether all idle devices are of use while no other job needs them, so that the trials' neighbours are as busy
        as they will be later.
    presses: whether gangs write checkpoints and stop if too few devices are idle.
    """

    least: int
    most: int
    fills: bool = False
    presses: bool = False

    def of(self, idle: Sequence[_Device], *, are_others_at_work: bool) -> tuple[_Device, ...]:
        """Returns the idle devices to lend; none if there are too few."""
        if len(idle) < self.least:
            return ()
        return tuple(idle if self.fills and not are_others_at_work else idle[: self.most])


Lend = Callable[[DevicesWanted], AbstractContextManager[tuple[Device, ...]]]
"""Lends devices while the context is open, and waits until they are idle. Raises DevicesBusy after too long a wait."""


@dataclass(frozen=True, kw_only=True)
class ProfilingTrial:
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
        """Returns a readable description of the trial."""
        config = " ".join(f"{key}={value}" for key, value in self.candidate.config.items())
        others = f" and {len(self.members)} more" if self.members else ""
        return f"{self.job.name}{others}: {self.candidate.technique} x{self.candidate.num_devices} ({config})"


def run_wave(
    environment: GangEnvironment, wave: Sequence[ProfilingTrial], *, limit_s: float = math.inf
) -> dict[str, Result]:
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
            _RunningTrial(environment, trial, position, Path(folder) / str(i))
            for i, (trial, position) in enumerate(zip(crowd, positions, strict=True))
        ]
        outcomes = _TrialWave(runs, QuietTimes(environment.cache_dir), limit_s=limit_s).conduct()
    return {trial.fingerprint: outcomes[i] for i, trial in enumerate(wave)}


class _RunningTrial:
    """One running trial."""

    def __init__(
        self, environment: GangEnvironment, trial: ProfilingTrial, devices: Sequence[Device], folder: Path
    ) -> None:
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
        order = replace(order, members=tuple(replace(order, job=job, data=data) for job, data in trial.members))
        self.gang = Gang(environment.server, order, num_ranks=trial.candidate.num_ranks)


class _TrialWave:
    """Starts the measurements of a wave together, and keeps all of its gangs busy until the last one is done.

    A gang that is not ready after `READY_SHARE` of the limit is killed, so that the others are measured.
    """

    def __init__(self, runs: Sequence[_RunningTrial], quiet_times: QuietTimes, *, limit_s: float) -> None:
        self._runs, self._quiet_times, self._limit_s = runs, quiet_times, limit_s
        self._began_s = time.monotonic()
        self._heard: queue.Queue[tuple[int, gang_events.Event | gang_events.Outcome]] = queue.Queue()
        self._ready: set[int] = set()
        self._measured: dict[int, gang_events.TrialMeasured] = {}
        self._timed: dict[int, list[gang_events.ReferenceTimed]] = {}
        self._ended: dict[int, gang_events.Outcome] = {}
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
            if isinstance(heard, gang_events.Outcome):
                self._ended[index] = heard
            elif isinstance(heard, gang_events.JobReady):
                self._ready.add(index)
            elif isinstance(heard, gang_events.TrialMeasured):
                self._measured[index] = heard
            elif isinstance(heard, gang_events.ReferenceTimed):
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
            return ProfilingFailure(kind=TIMED_OUT, message=f"it took more than {self._limit_s:.0f} s")
        outcome = self._ended[index]
        is_refused = (
            outcome.status == gang_events.OutcomeStatus.INVALID and KERNELS in self._runs[index].trial.candidate.config
        )
        return ProfilingFailure(kind=REFUSED if is_refused else _kind(outcome), message=outcome.message)


def _kind(outcome: gang_events.Outcome) -> str:
    if outcome.status == gang_events.OutcomeStatus.OUT_OF_MEMORY:
        return OUT_OF_MEMORY
    return KILLED if outcome.was_killed else FAILED


@dataclass(frozen=True, kw_only=True)
class ProfilingLimits:
    """The limits of the trials of a batch.

    share: the share of the batch's predicted time that they may take, with all that belongs to them.
    batch_s: returns the batch's time as it is predicted now; None while nothing is known of one of its jobs.
    trial_s: the most seconds of a trial.
    """

    share: float
    batch_s: Callable[[], float | None]
    trial_s: float = MAX_TRIAL_S

    def left_s(self, *, spent_s: float) -> float:
        """Returns the seconds that the next trials may take; none where their share is 0."""
        if not self.share:
            return 0.0
        batch_s = self.batch_s()
        return self.trial_s if batch_s is None else min(self.trial_s, self.share * batch_s - spent_s)

    def __str__(self) -> str:
        """Returns a readable description of the limits."""
        if not self.share:
            return "no time"
        batch_s = self.batch_s()
        share = "" if batch_s is None else f", and {self.share:.3g} of the predicted {batch_s:.0f} s in all"
        return f"at most {self.trial_s:.0f} s each{share}"


class ProfilingTrialRunner:
    """Makes and counts trials.

    limits: None for no limits. With limits, a trial that is killed or takes too long has no result.
    num_trials: the number of trials that were made.
    spent_s: the seconds that trials took, from the request of their devices to their return.
    is_closed: whether no devices are available, so that no more trials are made.
    """

    def __init__(
        self,
        environment: GangEnvironment,
        profile_store: ProfileStore,
        notice: Notice,
        *,
        lend: Lend,
        limits: ProfilingLimits | None = None,
    ) -> None:
        self._environment, self._profile_store = environment, profile_store
        self._notice, self._lend = notice, lend
        self._limits = limits
        self.num_trials = 0
        self.spent_s = 0.0
        self.is_closed = False

    def measure(self, trials: Sequence[ProfilingTrial]) -> dict[str, Result]:
        """Makes the trials that the limits allow, those of the smallest gangs first; returns results by fingerprint."""
        results_by_name: dict[str, Result] = {}
        left = sorted(trials, key=lambda trial: trial.candidate.num_devices)
        while left and not self.is_closed:
            limit_s = math.inf if self._limits is None else self._limits.left_s(spent_s=self.spent_s)
            if limit_s < MIN_TRIAL_S:
                self._notice(f"not tried: {', '.join(map(str, left))} (trials take {self._limits})")
                break
            try:
                wave, results = self._next_wave(left, limit_s=limit_s)
            except DevicesBusy as error:
                self._notice(f"{error}: the remaining options are planned by predictions")
                self.is_closed = True
                break
            results_by_name |= results
            left = [trial for trial in left if trial not in wave]
        return results_by_name

    def _next_wave(
        self, left: Sequence[ProfilingTrial], *, limit_s: float
    ) -> tuple[list[ProfilingTrial], dict[str, Result]]:
        """Makes the first trials of equal size that fit on idle devices; stores results that other batches may use."""
        size = left[0].candidate.num_devices
        alike = [trial for trial in left if trial.candidate.num_devices == size]
        began_s = time.monotonic()
        with self._lend(DevicesWanted(least=size, most=size * len(alike), fills=True)) as devices:
            wave = alike[: max(len(devices) // size, 1)]
            limits = f"trials so far: {self.num_trials}" if self._limits is None else str(self._limits)
            self._notice(f"trying {', '.join(map(str, wave))} ({limits})")
            results = self._outcomes(replace(self._environment, devices=devices), wave, limit_s=limit_s)
        self.spent_s += time.monotonic() - began_s
        for name, result in results.items():
            self._profile_store.add(name, result)
        usable: dict[str, Result] = {}
        for trial in wave:
            result = results[trial.fingerprint]
            if isinstance(result, Profile):
                usable[trial.fingerprint] = result.under_load(1.0)
            elif self._limits is None or not result.leaves_prediction:
                usable[trial.fingerprint] = result
            else:
                self._notice(f"{trial}: its prediction remains: {result.message}")
        return wave, usable

    def _outcomes(
        self, environment: GangEnvironment, wave: Sequence[ProfilingTrial], *, limit_s: float
    ) -> dict[str, Result]:
        """Makes the trials of a wave. Without limits, repeats those that were killed from outside."""
        outcomes: dict[str, Result] = {}
        for attempt in range(1, MAX_ATTEMPTS + 1):
            outcomes |= run_wave(environment, wave, limit_s=limit_s)
            self.num_trials += len(wave)
            wave = [trial for trial in wave if getattr(outcomes[trial.fingerprint], "kind", None) == KILLED]
            if not wave or self._limits is not None:
                break
            if attempt < MAX_ATTEMPTS:
                names = ", ".join(str(trial) for trial in wave)
                self._notice(f"trying again what was killed (attempt {attempt + 1} of {MAX_ATTEMPTS}): {names}")
        return outcomes


def search_thoroughly(
    searches: Mapping[str, ConfigSearch], jobs: Mapping[str, tuple[Job, Preflight]], *, runner: ProfilingTrialRunner
) -> None:
    """Makes trials in waves until no search wants one."""
    while not runner.is_closed:
        wanted = ((search, search.next_trial()) for search in worthwhile(searches.values()))
        trials = [trial_of_config(search, each[0], jobs) for search, each in wanted if each is not None]
        if not trials:
            return
        measured = runner.measure(trials)
        for search in searches.values():
            search.take(measured)


def needed_trials(
    searches: Mapping[str, ConfigSearch], jobs: Mapping[str, tuple[Job, Preflight]]
) -> list[ProfilingTrial]:
    """Returns the trials without which nothing would be known of a job on some gang size: at most one for each size.

    A job that does not train is not tried, as a trial takes as long as the job.
    """
    groups: dict[tuple[str, int], list[ConfigSearch]] = {}
    for search in searches.values():
        groups.setdefault((search.key, search.num_devices), []).append(search)
    trials = []
    for group in groups.values():
        first = next((search for search in group if search.predicted_s is None and search.untried is not None), None)
        is_known = any(search.profiles or search.predicted_s is not None for search in group)
        if first is not None and not is_known and jobs[first.job][0].trains:
            assert first.untried is not None
            trials.append(trial_of_config(first, first.untried[0], jobs))
    return trials


def of_each_size(trials: Sequence[ProfilingTrial]) -> list[list[ProfilingTrial]]:
    """Divides trials by the size of their gangs, the smallest first."""

    def size(trial: ProfilingTrial) -> int:
        return trial.candidate.num_devices

    return [list(alike) for _, alike in itertools.groupby(sorted(trials, key=size), key=size)]


def predicted_batch_s(
    jobs: Sequence[Job], searches_of: Mapping[str, Sequence[ConfigSearch]], *, num_devices: int
) -> float | None:
    """Returns the seconds that the jobs take if they fill the devices; None if nothing is known of one of them.

    Each job counts with the option that takes the least device time, measured if possible, or else predicted. No batch
    ends before its longest job does under that job's fastest option.
    """
    total_s = longest_s = 0.0
    for job in jobs:
        options = [
            (search.num_devices, step_s)
            for search in searches_of[job.name]
            if (step_s := search.best_s if search.profiles else search.predicted_s) is not None
        ]
        if searches_of[job.name] and not options:
            return None
        total_s += min((size * step_s for size, step_s in options), default=0.0) * job.total_steps
        longest_s = max(longest_s, min((step_s for _, step_s in options), default=0.0) * job.total_steps)
    return max(total_s / num_devices, longest_s) if math.isfinite(total_s) else None


def trial_of_config(
    search: ConfigSearch, fingerprint: str, jobs: Mapping[str, tuple[Job, Preflight]]
) -> ProfilingTrial:
    """Returns the trial of a config of a search."""
    job, preflight = jobs[search.job]
    candidate = search.candidates[list(search.fingerprints).index(fingerprint)]
    return ProfilingTrial(key=search.key_of(fingerprint), job=job, data=preflight.data, candidate=candidate)
