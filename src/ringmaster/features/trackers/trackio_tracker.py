"""Projects of Trackio on this machine: `TRACKIO_DIR=.ringmaster/trackers/trackio trackio show`."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ringmaster.compat.trackio import storage_in
from ringmaster.features.trackers.tracker import Scalar, TrackedJob, Tracker, by_step, project_name


class TrackioTracker(Tracker):
    """A run for each job, in a project for each batch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._jobs: dict[str, TrackedJob] = {}

    def open_run(self, job: TrackedJob) -> None:
        """Notes the job: its run begins with its first values."""
        self._jobs[job.job] = job

    def add(self, job: str, scalars: Sequence[Scalar]) -> None:
        """Adds the values of each step together, with the hyperparameters and the tags."""
        known = self._jobs[job]
        rows = by_step(scalars)
        config: dict[str, Any] = {**known.params, **known.tags}
        storage_in(self.folder).bulk_log(
            project_name(known.batch),
            known.name,
            [*rows.values()],
            steps=[step for step, _ in rows],
            timestamps=[datetime.fromtimestamp(time_s, UTC).isoformat() for _, time_s in rows],
            config=config,
            run_id=known.run_id,
        )

    def end_run(self, job: str, metrics: Mapping[str, float], *, step: int, status: str) -> None:
        """Adds the final metrics as `final/NAME`."""
        self.add(job, [Scalar(f"final/{key}", value, step, time.time()) for key, value in metrics.items()])
        del self._jobs[job]

    def close(self) -> None:
        """Has nothing to close: all is written."""
