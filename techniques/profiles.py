"""What was measured of a job: seconds and bytes under one technique, config and number of devices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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

    def runtime_s(self, *, num_steps: int, num_evaluations: int = 1, num_saves: int = 1) -> float:
        """Planned seconds of `num_steps` steps to a job's end: start, steps, checkpoints, evaluations and export."""
        training_s = num_steps * self.step_s + num_saves * self.save_s
        return self.startup_s + training_s + num_evaluations * self.evaluate_s + self.export_s
