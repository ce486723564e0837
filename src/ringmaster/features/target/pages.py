"""What was chosen on the way to a target, and whether it was reached, in the records of a job and its model."""

from collections.abc import Mapping
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.features.target.noise_scale import GradientNoise, noise_blocks
from ringmaster.tasks.recording.record_hooks import RecordHook
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.techniques.processes.gang_events import ENDED_EARLY, Steps

NOISE_SCALE = "noise_scale"


class TargetReport(RecordHook):
    """Shows the noise of gradients, and what was chosen for a job."""

    def metrics(self, steps: Steps) -> Mapping[str, float]:
        """Returns the noise scale of one report: a mean over many is near the truth."""
        noise = [from_json(GradientNoise, each) for each in steps.measurements]
        return {f"train/{NOISE_SCALE}": block.scale for block in noise_blocks(noise, most=1)}

    def params(self, record: JobRecord) -> Mapping[str, Any]:
        """Returns what the job has changed on its way, why, and whether it has reached its target."""
        values = {"phases": to_json(record.phases) or None, "choice": record.choice, ENDED_EARLY: record.ended_early}
        return {key: value for key, value in values.items() if value is not None}


RECORD_HOOKS = (TargetReport(),)
