"""Event files of TensorBoard: `tensorboard --logdir .ringmaster/trackers/tensorboard`.

They are written by the package tensorboard alone, without torch. A value has 32 bits in these files.
"""

import itertools
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ringmaster.features.trackers.tracker import Scalar, TrackedJob, Tracker

TAGS = "ringmaster/tags"
_COUNTER = itertools.count()


class TensorBoardTracker(Tracker):
    """A folder of event files for each job."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files: dict[str, EventFile] = {}

    def open_run(self, job: TrackedJob) -> None:
        """Begins an event file, with the hyperparameters and the tags. An earlier one of the run stays."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        file = self._files[job.job] = EventFile(self.folder / job.batch / job.name)
        file.add(hparams_pb({**job.params, **job.tags}, trial_id=job.run_id), time_s=time.time())
        file.add(text_pb(TAGS, json.dumps(dict(job.tags))), time_s=time.time())
        file.flush()

    def add(self, job: str, scalars: Sequence[Scalar]) -> None:
        """Adds scalars, which `EventAccumulator.Scalars` and TensorBoard read."""
        file = self._files[job]
        for each in scalars:
            file.add_scalar(each)
        file.flush()

    def end_run(self, job: str, metrics: Mapping[str, float], *, step: int, status: str) -> None:
        """Adds the final metrics as scalars `final/NAME`, and closes the file."""
        self.add(job, [Scalar(f"final/{key}", value, step, time.time()) for key, value in metrics.items()])
        self._files.pop(job).close()

    def close(self) -> None:
        """Closes the files of jobs that did not end."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class EventFile:
    """One event file, whose name differs from those of other processes and earlier runs."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010}.{platform.node()}.{os.getpid()}.{next(_COUNTER)}"
        self._file: BinaryIO = (folder / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")

    def add(self, summary: Any, *, time_s: float, step: int = 0) -> None:
        """Adds a summary."""
        self._write(summary=summary, step=step, wall_time=time_s)

    def add_scalar(self, scalar: Scalar) -> None:
        """Adds a value of a curve."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        value = Summary.Value(tag=scalar.key, simple_value=scalar.value)
        self.add(Summary(value=[value]), time_s=scalar.time_s, step=scalar.step)

    def flush(self) -> None:
        """Hands what was added to the system."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, *, wall_time: float | None = None, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time() if wall_time is None else wall_time, **fields)
        self._writer.write(event.SerializeToString())
