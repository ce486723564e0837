"""The trackers of a batch as listeners of its records: a thread each, so that none delays MLflow, training or another.

A tracker that fails is reported once, and gets nothing more. MLflow has everything.
"""

import importlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ringmaster.features.trackers.job import TRACKERS, TrackersKey
from ringmaster.features.trackers.tracker import Scalar, TrackedJob, Tracker, plain_params, tracker_folder
from ringmaster.findings import as_list, as_mapping
from ringmaster.model_lineage.records import MetricPoint
from ringmaster.tasks.batch import Batch, document
from ringmaster.tasks.recording.record_hooks import RecordedRun, RecordHook, RunListener
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.text import Notice, message_of, shortened

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000  # groups of points to hold while a tracker is slow
MAX_MESSAGE = 300  # characters of what a library says of its fault
END_TIMEOUT_S = 30.0  # for what waits when a batch has ended
CLASSES = {"tensorboard": "TensorBoardTracker", "trackio": "TrackioTracker", "wandb": "WandbTracker"}


def tracker_of(name: str) -> Tracker:
    """Returns a tracker by its name. Its library is imported when the first run is opened."""
    module = importlib.import_module(f"ringmaster.features.trackers.{name}_tracker")
    tracker: Tracker = getattr(module, CLASSES[name])(tracker_folder() / name)
    return tracker


class TrackerListener(RunListener):
    """Passes the records of a batch to a tracker, on a thread of its own. Its methods return at once.

    max_waiting: how many groups of points wait at most; those that come then are dropped.
    """

    def __init__(self, tracker: Tracker, *, name: str, notice: Notice, max_waiting: int = MAX_WAITING) -> None:
        self._tracker, self._name, self._notice, self._max_waiting = tracker, name, notice, max_waiting
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_dropped = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def open_run(self, run: RecordedRun) -> None:
        """Begins the run of a job."""
        job = TrackedJob(
            batch=run.batch, job=run.job, run_id=run.run_id, params=plain_params(run.params), tags=run.tags
        )
        self._todo.put(partial(self._tracker.open_run, job))

    def add_points(self, job: str, points: Sequence[MetricPoint]) -> None:
        """Adds the points that MLflow has as numbers: those that are finite."""
        if self._todo.qsize() >= self._max_waiting:
            self._num_dropped += not self._has_failed
            return
        now_s = time.time()
        scalars = [
            Scalar(each.key, float(each.value), each.step, now_s if (at := each.timestamp_ms) is None else at / 1000)
            for each in points
            if math.isfinite(each.value)
        ]
        self._todo.put(partial(self._tracker.add, job, scalars))

    def end_run(self, record: JobRecord) -> None:
        """Ends the run of a job with its final metrics."""
        metrics = {key: value for key, value in record.metrics.items() if math.isfinite(value)}
        end = partial(self._tracker.end_run, record.name, metrics, step=record.step, status=str(record.status))
        self._todo.put(end)

    def close(self, *, timeout_s: float = END_TIMEOUT_S) -> None:
        """Waits until all is written, but not longer than `timeout_s`, and reports what is not."""
        self._todo.put(None)
        self._thread.join(timeout_s)
        if self._has_failed:
            return
        if self._thread.is_alive():
            self._notice(f"{self._name} has not taken all records within {timeout_s:g} s; MLflow has them")
        if self._num_dropped:
            self._notice(f"{self._name} was too slow for {self._num_dropped} groups of points; MLflow has them")

    def _work(self) -> None:
        try:
            while (action := self._todo.get()) is not None:
                action()
            self._tracker.close()
        except Exception as error:
            self._has_failed = True
            logger.exception("a tracker ends here")
            reason = shortened(f"{type(error).__name__}: {message_of(error)}", MAX_MESSAGE)
            self._notice(f"{self._name} gets no more records of this run, MLflow has them: {reason}")


class TrackerReport(RecordHook):
    """Follows the records of a batch that names trackers."""

    def listeners(self, batch: Batch, *, notice: Notice) -> Iterator[RunListener]:
        """Yields a listener for each tracker."""
        (key,) = TrackersKey.job_keys()
        file = document.read(batch.text).data if key in batch.text else None  # reading a long file takes seconds
        for name in as_list(as_mapping(file).get(key)):
            if name in TRACKERS:
                yield TrackerListener(tracker_of(name), name=name, notice=notice)


RECORD_HOOKS = (TrackerReport(),)
