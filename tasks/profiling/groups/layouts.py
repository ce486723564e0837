"""Layouts of a group on its gang: number of devices, base whole or sharded, activations stored or recomputed.

On several devices each job's batch is divided, so that a group behaves like its jobs alone under data parallelism. The
jobs' own profiles under data parallelism therefore predict the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringmaster.techniques import Job, Profile
from ringmaster.techniques.preflight import Candidate, Preflight
from ringmaster.techniques.technique import GRADIENT_BYTES, OPTIMIZER_STATE_BYTES, WEIGHT_BYTES

WHOLE, SHARDED = "whole", "sharded"
KEPT, AGAIN = "none", "full"
# The usual slowdown of a step by recomputation: of three passes of equal work, one is computed twice.
LONGER = 4 / 3
# The techniques that train a job alone as a group would on several devices: batch divided, base whole or sharded.
LIKE = {WHOLE: ("ddp", "zero1", "zero2"), SHARDED: ("fsdp", "fsdp_static")}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A number of devices, and how the base is stored on them: `whole` on each, or `sharded` by layers.

    recompute: "none" if the layers' activations are stored, or "full" if they are recomputed.
    """

    num_devices: int = 1
    base: str = WHOLE
    recompute: str = KEPT

    @property
    def config(self) -> dict[str, Any]:
        """The config of the technique `shared_base` for this layout."""
        return {"recompute": self.recompute} | ({} if self.num_devices == 1 else {"base": self.base})

    def profile(self, job: Job, preflight: Preflight, profiles: Sequence[Profile]) -> Profile | None:
        """Returns the fastest of a job's own profiles that is like this layout; None if the job cannot run alone on it.

        If only other techniques were measured on as many devices, it is the fastest of those, with the step time
        predicted for a technique like this layout. If only stored activations were measured, the step is longer by the
        predicted factor.
        """
        if self.recompute == AGAIN:
            return self._computed_again(job, preflight, profiles)
        here = [p for p in profiles if p.num_devices == self.num_devices and p.num_nodes == 1]
        alike = [p for p in here if self._is_like(p.technique)]
        if alike or not here:
            return min(alike, key=_step_s, default=None)
        fastest, foretold_s = min(here, key=_step_s), self._foretold_s(job, preflight)
        return fastest if foretold_s is None else replace(fastest, step_s=foretold_s)

    def _computed_again(self, job: Job, preflight: Preflight, profiles: Sequence[Profile]) -> Profile | None:
        measured = [p for p in profiles if p.num_nodes == 1 and self.is_of(p.config, job)]
        alike = [p for p in measured if p.num_devices == self.num_devices and self._is_like(p.technique)]
        kept = replace(self, recompute=KEPT)
        if alike or (fastest := kept.profile(job, preflight, profiles)) is None:
            return min(alike, key=_step_s, default=None)
        again_s, kept_s = self._foretold_s(job, preflight), kept._foretold_s(job, preflight)
        longer = max(again_s / kept_s, 1.0) if again_s and kept_s else LONGER
        return replace(fastest, step_s=fastest.step_s * longer)

    def _is_like(self, technique: str) -> bool:
        return technique in LIKE[self.base] if self.num_devices > 1 else True

    def _foretold_s(self, job: Job, preflight: Preflight) -> float | None:
        candidate = self._candidate(job, preflight)
        return None if candidate is None else candidate.step_s

    def base_bytes(self, facts: Mapping[str, Any]) -> int:
        """Returns the bytes of the base's weights on each device.

        A sharded base needs its share, and the layers that are gathered.

        facts: the JSON form of ModelFacts, whose parameters include those of an adapter.
        """
        whole = int(facts["parameter_bytes"])
        if self.base == WHOLE:
            return whole
        return whole // self.num_devices + min(2 * int(facts["largest_layer_bytes"]), whole)

    def own_bytes(self, job: Job, preflight: Preflight) -> int | None:
        """Returns the bytes on each device beside the base; None if a device has too little memory.

        They are those of the adapter, its training state and the activations of the job's batch. The batch is divided
        over the devices and no further.
        """
        if (candidate := self._candidate(job, preflight)) is None:
            return None
        needed = candidate.least_bytes if candidate.forecast is None else candidate.forecast.device_bytes
        own = needed - self.base_bytes(preflight.facts)
        if self.base == SHARDED:  # a job that runs alone has its adapter sharded too
            state = WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_STATE_BYTES[job.optimizer.name]
            own += int(preflight.facts.get("num_trained") or 0) * state * (self.num_devices - 1) // self.num_devices
        return max(own, 1)

    def is_of(self, config: Mapping[str, Any], job: Job) -> bool:
        """Returns whether a job's own config matches this layout.

        Such a config computes its share of the batch at once, and treats the activations and the base as this layout
        does.
        """
        if config.get("recompute", KEPT) != self.recompute or "micro_batch" not in config:
            return False
        if self.base == SHARDED and (not config.get("reshard") or {"num_replicas", "offload"} & set(config)):
            return False
        return bool(config["micro_batch"] * self.num_devices == job.global_batch_size)

    def _candidate(self, job: Job, preflight: Preflight) -> Candidate | None:
        return next(
            (
                each
                for each in preflight.candidates
                if each.num_devices == self.num_devices
                and self._is_like(each.technique)
                and self.is_of(each.config, job)
            ),
            None,
        )

    def __str__(self) -> str:
        """Returns a description for people."""
        devices = "one device" if self.num_devices == 1 else f"{self.num_devices} devices"
        divided = ", the base divided" if self.base == SHARDED else ""
        return devices + divided + (", activations computed again" if self.recompute == AGAIN else "")


ONE_DEVICE = Layout()


def layouts(num_devices: int) -> list[Layout]:
    """Returns the layouts to try on a node of so many devices: 1, 2, 4, ... devices, and all.

    Layouts with the least communication come first. Layouts that recompute activations come last, as they are used only
    if memory requires it.
    """
    sizes = sorted({2**power for power in range(num_devices.bit_length())} | {num_devices})
    several = [Layout(num_devices=size, base=base) for size in sizes if size > 1 for base in (WHOLE, SHARDED)]
    kept = [ONE_DEVICE, *several]
    return [*kept, *(replace(layout, recompute=AGAIN) for layout in kept)]


def _step_s(profile: Profile) -> float:
    return profile.step_s
