"""How a group lies on its gang: on how many devices, its base whole on each or divided, its activations kept or not.

Over several devices each job's batch is divided, so that a group there is like its jobs by themselves under data
parallelism: their own profiles under that tell what a group takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringmaster.techniques import Job, Profile
from ringmaster.techniques.surveys import Candidate, Survey
from ringmaster.techniques.technique import GRADIENT_BYTES, OPTIMIZER_STATE_BYTES, WEIGHT_BYTES

WHOLE, SHARDED = "whole", "sharded"
KEPT, AGAIN = "none", "full"
# Of a step whose activations are computed again, as a rule: three passes of equal work, and one of them twice.
LONGER = 4 / 3
# What trains a job by itself as a group would be on several devices: its batch divided, and its base like that.
LIKE = {WHOLE: ("ddp", "zero1", "zero2"), SHARDED: ("fsdp", "fsdp_static")}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A number of devices, and how the base lies on them: `whole` on each, or `sharded` by layers.

    recompute: of the layers' activations; "none": they are kept, or "full": they are computed again.
    """

    num_devices: int = 1
    base: str = WHOLE
    recompute: str = KEPT

    @property
    def config(self) -> dict[str, Any]:
        """Of the technique `shared_base`."""
        return {"recompute": self.recompute} | ({} if self.num_devices == 1 else {"base": self.base})

    def profile(self, job: Job, survey: Survey, profiles: Sequence[Profile]) -> Profile | None:
        """The fastest of a job's own that is like this; None where it cannot run by itself on so many devices.

        Where other techniques alone were measured there: their fastest, with the step that was predicted for one like
        this. Activations are computed again as much longer as was predicted of that.
        """
        if self.recompute == AGAIN:
            return self._computed_again(job, survey, profiles)
        here = [p for p in profiles if p.num_devices == self.num_devices and p.num_nodes == 1]
        alike = [p for p in here if self._is_like(p.technique)]
        if alike or not here:
            return min(alike, key=_step_s, default=None)
        fastest, foretold_s = min(here, key=_step_s), self._foretold_s(job, survey)
        return fastest if foretold_s is None else replace(fastest, step_s=foretold_s)

    def _computed_again(self, job: Job, survey: Survey, profiles: Sequence[Profile]) -> Profile | None:
        measured = [p for p in profiles if p.num_nodes == 1 and self.is_of(p.config, job)]
        alike = [p for p in measured if p.num_devices == self.num_devices and self._is_like(p.technique)]
        kept = replace(self, recompute=KEPT)
        if alike or (fastest := kept.profile(job, survey, profiles)) is None:
            return min(alike, key=_step_s, default=None)
        again_s, kept_s = self._foretold_s(job, survey), kept._foretold_s(job, survey)
        longer = max(again_s / kept_s, 1.0) if again_s and kept_s else LONGER
        return replace(fastest, step_s=fastest.step_s * longer)

    def _is_like(self, technique: str) -> bool:
        return technique in LIKE[self.base] if self.num_devices > 1 else True

    def _foretold_s(self, job: Job, survey: Survey) -> float | None:
        candidate = self._candidate(job, survey)
        return None if candidate is None else candidate.step_s

    def base_bytes(self, facts: Mapping[str, Any]) -> int:
        """Bytes of the base's weights on each device; of a divided one its share, and the layers that are gathered.

        facts: the JSON form of ModelFacts, whose parameters an adapter is counted among.
        """
        whole = int(facts["parameter_bytes"])
        if self.base == WHOLE:
            return whole
        return whole // self.num_devices + min(2 * int(facts["largest_layer_bytes"]), whole)

    def own_bytes(self, job: Job, survey: Survey) -> int | None:
        """Bytes on each device beside the base, of the adapter, its training state and the activations of the job's
        batch, which is divided over the devices and no further. None where a device cannot hold that.
        """
        if (candidate := self._candidate(job, survey)) is None:
            return None
        needed = candidate.least_bytes if candidate.forecast is None else candidate.forecast.device_bytes
        own = needed - self.base_bytes(survey.facts)
        if self.base == SHARDED:  # by itself a job has its adapter divided too
            state = WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_STATE_BYTES[job.optimizer.name]
            own += int(survey.facts.get("num_trained") or 0) * state * (self.num_devices - 1) // self.num_devices
        return max(own, 1)

    def is_of(self, config: Mapping[str, Any], job: Job) -> bool:
        """Whether a job's own config computes its share of the batch at once, and has the activations and the base like
        this.
        """
        if config.get("recompute", KEPT) != self.recompute or "micro_batch" not in config:
            return False
        if self.base == SHARDED and (not config.get("reshard") or {"num_replicas", "offload"} & set(config)):
            return False
        return bool(config["micro_batch"] * self.num_devices == job.global_batch_size)

    def _candidate(self, job: Job, survey: Survey) -> Candidate | None:
        return next(
            (
                each
                for each in survey.candidates
                if each.num_devices == self.num_devices
                and self._is_like(each.technique)
                and self.is_of(each.config, job)
            ),
            None,
        )

    def __str__(self) -> str:
        """For people."""
        devices = "one device" if self.num_devices == 1 else f"{self.num_devices} devices"
        divided = ", the base divided" if self.base == SHARDED else ""
        return devices + divided + (", activations computed again" if self.recompute == AGAIN else "")


ONE_DEVICE = Layout()


def layouts(num_devices: int) -> list[Layout]:
    """Those to look at on a node of so many devices: 1, 2, 4, ... devices, and all.

    What communicates least comes first; activations are computed again only where memory asks for it, so last.
    """
    sizes = sorted({2**power for power in range(num_devices.bit_length())} | {num_devices})
    several = [Layout(num_devices=size, base=base) for size in sizes if size > 1 for base in (WHOLE, SHARDED)]
    kept = [ONE_DEVICE, *several]
    return [*kept, *(replace(layout, recompute=AGAIN) for layout in kept)]


def _step_s(profile: Profile) -> float:
    return profile.step_s
