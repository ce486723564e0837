"""Runs of Weights & Biases: without a network by default, for `wandb sync`; WANDB_MODE=online sends them at once."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringmaster.features.trackers.tracker import Scalar, TrackedJob, Tracker, by_step, project_name

STEP = "step"


class WandbTracker(Tracker):
    """A run for each job, in a project for each batch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._runs: dict[str, Any] = {}

    def open_run(self, job: TrackedJob) -> None:
        """Begins a run, or continues it where it is sent at once."""
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # one of those that wandb names, which checks it
        run = self._runs[job.job] = wandb.init(
            project=project_name(job.batch),
            name=job.job,
            id=job.run_id[:32],
            group=job.tags.get("mlflow.parent_run_id"),
            config={**job.params, "mlflow": dict(job.tags)},
            tags=[f"mlflow:{job.run_id}"],
            dir=str(self.folder),
            mode=mode,
            resume="allow",
            reinit="create_new",  # several runs at a time
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, save_code=False, x_disable_stats=True
            ),
        )
        # Its own steps only grow. A job that continues from a checkpoint repeats some.
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)

    def add(self, job: str, scalars: Sequence[Scalar]) -> None:
        """Logs the values of each step together."""
        for (step, _), values in by_step(scalars).items():
            self._runs[job].log({**values, STEP: step})

    def end_run(self, job: str, metrics: Mapping[str, float], *, step: int, status: str) -> None:
        """Writes the final metrics to the summary, as `final/NAME`."""
        run = self._runs.pop(job)
        run.summary.update({f"final/{key}": value for key, value in metrics.items()} | {"status": status})
        run.finish(exit_code=0 if status == "done" else 1)

    def close(self) -> None:
        """Ends the runs of jobs that did not end, and the process of wandb, once it has written all files."""
        import wandb

        for run in self._runs.values():
            run.finish(exit_code=1)
        self._runs.clear()
        wandb.teardown()
