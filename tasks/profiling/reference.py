"""The load of a machine by other work, as the reference kernel measures it beside trials and before a plan.

The load is the kernel's mean seconds over its seconds on a quiet machine. These are the fewest seconds that a
repetition took on this machine lately: repetitions are shorter than a time slice, so some of them are undisturbed on a
busy machine, too.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.codec import digest
from ringmaster.errors import ChannelClosed
from ringmaster.tasks.cluster import Device
from ringmaster.techniques import Profile
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.events import Measured, RankExited, ReferenceTimed, event_from_json
from ringmaster.techniques.processes.forkserver_client import ForkServerClient

TARGET = "ringmaster.techniques.estimates.reference_kernel:main"
VERSION = 1  # incremented when the kernel changes
BUSY_LOAD = 1.15
"""The load above which a machine counts as busy with other work, and its user is told."""
NUM_KEPT = 100  # measurements by which a quiet machine is known; older ones may be of another state of it


@dataclass(frozen=True, kw_only=True)
class Load:
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


class QuietTimes:
    """The seconds of the reference kernel on this machine while it is quiet, by kind of device; kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, timed: Sequence[ReferenceTimed]) -> Load:
        """Returns the mean load at some timings of the kernel, and learns from them; no load without timings."""
        if not timed:
            return Load()
        ratios = [max(1.0, each.mean_s / self._quiet_s(each)) for each in timed]
        ratio = math.exp(sum(map(math.log, ratios)) / len(ratios))
        drift = math.log(max(ratios) / min(ratios)) / 2
        return Load(ratio=ratio, spread=max(drift, *(each.spread for each in timed)))

    def _quiet_s(self, timed: ReferenceTimed) -> float:
        """Returns the fewest seconds of a repetition, of those that are kept and the one that is timed."""
        file = self._folder / f"reference-{digest([platform.node(), timed.kind, VERSION])}.json"
        try:
            kept: list[float] = json.loads(file.read_text())
        except (OSError, ValueError):  # there is none; a power failure may leave an empty one
            kept = []
        kept = [*kept, timed.fastest_s][-NUM_KEPT:]
        self._folder.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(kept))
        scratch.replace(file)  # a reader sees the old or the new list
        return min(kept)


def without_load(measured: Measured, load: Load) -> dict[str, Any]:
    """Returns the measured fields of a `Profile` as they would be on a quiet machine.

    The mean of the steps contains the time slices of other work, as the load does, and is divided by it. Of steps that
    are shorter than a time slice most are undisturbed: then the median is less, and nearer to the truth.
    """
    seconds: Mapping[str, Any] = {k: v / load.ratio for k, v in measured.profile.items() if _is_divided(k, v)}
    step_s = measured.profile["step_s"]
    if measured.mean_step_s is not None:
        step_s = min(step_s, measured.mean_step_s / load.ratio)
    return {**measured.profile, **seconds, "step_s": step_s}


def at_load(profiles: Mapping[str, Sequence[Profile]], load: Load) -> dict[str, tuple[Profile, ...]]:
    """Returns the profiles of each job on a machine with this load."""
    return {job: tuple(profile.under_load(load.ratio) for profile in mine) for job, mine in profiles.items()}


def present_load(devices: Sequence[Device], *, server: ForkServerClient, cache_dir: Path) -> Load:
    """Returns the load of a machine's CPU slots now, timed on all of them at once in half a second.

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


def _is_divided(name: str, value: Any) -> bool:
    return name.endswith("_s") and name != "step_s" and value is not None
