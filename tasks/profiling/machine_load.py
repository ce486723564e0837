"""The load of a machine by other work.

The load is how many times as long as on a quiet machine a computation takes. Before a plan and during trials, the
reference kernel measures it: its mean seconds over its seconds on a quiet machine. These are the fewest seconds that a
repetition took on this machine lately: repetitions are shorter than a time slice, so some of them are undisturbed on a
busy machine, too. While a batch runs, its gangs measure it (`techniques/processes/core_load.py`).

Loads change. The logarithm x of the load is taken to be the mean m and a sum of Ornstein-Uhlenbeck processes. They have
equal shares w of its variance s^2, and return to 0 with the time constants c. Given x now, its mean over the next T
seconds is normal (Gillespie, Physical Review E 54, 1996), where a = T / c,

    mean  m + (x - m) r         variance  s^2 (sum of w 2 (a - 1 + exp(-a)) / a^2  -  r^2)
    with  r = sum of w (1 - exp(-a)) / a

m and s are those of x, of what earlier runs have seen, and of a quiet machine; one that was never seen busy stays
quiet.
"""

from __future__ import annotations

import json
import math
import platform
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.codec import digest
from ringmaster.errors import ChannelClosed
from ringmaster.files import write_atomically
from ringmaster.tasks.cluster import Device
from ringmaster.techniques import Profile
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.forkserver_client import ForkServerClient
from ringmaster.techniques.processes.gang_events import RankExited, ReferenceTimed, TrialMeasured, event_from_json

TARGET = "ringmaster.techniques.estimates.device_rates:main"
VERSION = 1  # incremented when the kernel changes
BUSY_LOAD = 1.15
"""The load above which a machine counts as busy with other work, which is reported."""
LOAD_ERROR = 0.1  # of the logarithm of a load, by which measured seconds are divided
CHANGES_S = (120.0, 3600.0)  # the time constants with which a load changes
LATELY_S = 30.0  # over which what gangs report of the load is averaged
MAX_SEEN = 40
NUM_KEPT = 100  # measurements by which a quiet machine is known; older ones may be of another state of it


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """The load of a machine by other work.

    ratio: how many times as long as on a quiet machine a computation takes.
    spread: the standard error of the ratio, relative to it.
    """

    ratio: float = 1.0
    spread: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether other work slows the machine down noticeably."""
        return self.ratio > BUSY_LOAD


def load_ahead(now: MachineLoad, earlier: Sequence[float], *, seconds: float) -> MachineLoad:
    """Returns the mean load over the next seconds; `spread` is what its logarithm may be off by, for that it changes.

    earlier: loads at which this machine was seen.
    """
    log_now = math.log(now.ratio)
    known = [0.0, log_now, *map(math.log, earlier)]
    mean = sum(known) / len(known)
    variance = sum((each - mean) ** 2 for each in known) / (len(known) - 1)
    shares = [max(seconds / time_s, 1e-3) for time_s in CHANGES_S]  # small ones are differences of nearly equal numbers
    stays = sum(-math.expm1(-a) / a for a in shares) / len(shares)
    of_mean = sum(2 * (a + math.expm1(-a)) / a**2 for a in shares) / len(shares)
    ratio = math.exp(mean + (log_now - mean) * stays)
    return MachineLoad(ratio=ratio, spread=math.sqrt(variance * max(of_mean - stays**2, 0.0)))


class QuietTimes:
    """The seconds of the reference kernel on this machine while it is quiet, by kind of device; kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, timed: Sequence[ReferenceTimed]) -> MachineLoad:
        """Returns the mean load at some timings of the kernel, and learns from them; no load without timings."""
        if not timed:
            return MachineLoad()
        ratios = [max(1.0, each.mean_s / self._quiet_s(each)) for each in timed]
        ratio = math.exp(sum(map(math.log, ratios)) / len(ratios))
        drift = math.log(max(ratios) / min(ratios)) / 2
        return MachineLoad(ratio=ratio, spread=max(drift, *(each.spread for each in timed)))

    def _quiet_s(self, timed: ReferenceTimed) -> float:
        """Returns the fewest seconds of a repetition, of those that are kept and the one that is timed."""
        file = self._folder / f"reference-{digest([platform.node(), timed.kind, VERSION])}.json"
        try:
            kept: list[float] = json.loads(file.read_text())
        except (OSError, ValueError):  # there is none; a power failure may leave an empty one
            kept = []
        kept = [*kept, timed.fastest_s][-NUM_KEPT:]
        write_atomically(file, json.dumps(kept).encode())
        return min(kept)


def without_load(measured: TrialMeasured, load: MachineLoad) -> dict[str, Any]:
    """Returns the measured fields of a `Profile` as they would be on a quiet machine.

    The mean of the steps contains the time slices of other work, as the load does, and is divided by it. Of steps that
    are shorter than a time slice most are undisturbed: then the median is less, and nearer to the truth.
    """
    seconds: Mapping[str, Any] = {
        k: v / load.ratio for k, v in measured.profile.items() if k.endswith("_s") and k != "step_s" and v is not None
    }
    step_s = measured.profile["step_s"]
    if measured.mean_step_s is not None:
        step_s = min(step_s, measured.mean_step_s / load.ratio)
    return {**measured.profile, **seconds, "step_s": step_s}


def at_load(profiles: Mapping[str, Sequence[Profile]], load: MachineLoad) -> dict[str, tuple[Profile, ...]]:
    """Returns the profiles of each job on a machine with this load."""
    return {
        job: tuple(profile.under_load(load.ratio) for profile in job_profiles) for job, job_profiles in profiles.items()
    }


def present_load(devices: Sequence[Device], *, server: ForkServerClient, cache_dir: Path) -> MachineLoad:
    """Returns the load of a machine's CPU slots now, timed on all of them at once in a fifth of a second.

    GPUs have no load: nothing else may compute on a leased GPU, and another process on it would need its own context.
    """
    slots = [device for device in devices if device.kind == "cpu"]
    cache_dir.mkdir(parents=True, exist_ok=True)
    log = cache_dir / "reference.log"
    channels = [server.spawn(target=TARGET, argument={"cores": list(slot.cores)}, log=log) for slot in slots]
    timed = [event for channel in channels if (event := _timed(channel)) is not None]
    return QuietTimes(cache_dir).load(timed)


def _timed(channel: Channel) -> ReferenceTimed | None:
    """Returns what a worker process measures; None where it, or the fork server, ends without an answer."""
    with closing(channel):
        while True:
            try:
                event = event_from_json(channel.receive())
            except ChannelClosed:
                return None
            if isinstance(event, ReferenceTimed):
                return event
            if isinstance(event, RankExited):
                return None


class CurrentLoad:
    """The load of a machine while a batch runs, as the mean of what its gangs have reported lately.

    first: before any report.
    seen: the load so far, twice a minute.
    """

    def __init__(self, first: float = 1.0) -> None:
        self._log, self._heard_s = math.log(first), 0.0
        self._quiet_s = 0.0  # that the time so far would have taken without load
        self.seen: deque[float] = deque(maxlen=MAX_SEEN)
        self._seen_s = 0.0

    @property
    def ratio(self) -> float:
        """The load now."""
        return math.exp(self._log)

    @property
    def mean(self) -> float | None:
        """The mean load so far; None before a report."""
        return self._heard_s / self._quiet_s if self._quiet_s else None

    @property
    def error(self) -> float:
        """The standard error of the ratio of two speeds that are measured at this load, relative to it."""
        return math.sqrt(2.0) * LOAD_ERROR * self._log

    def note(self, load: float, *, now_s: float) -> None:
        """Takes in the load of the time since the last report."""
        share = -math.expm1(-(now_s - self._heard_s) / LATELY_S)
        self._log += share * (math.log(load) - self._log)
        self._quiet_s += (now_s - self._heard_s) / load
        if now_s - self._seen_s >= LATELY_S:
            self.seen.append(self.ratio)
            self._seen_s = now_s
        self._heard_s = now_s
