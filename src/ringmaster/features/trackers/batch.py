"""Faults of the trackers of a batch, which are found before anything starts."""

from collections.abc import Iterator, Sequence

from ringmaster.extras import install_command, missing_packages
from ringmaster.features.trackers.job import TRACKERS, TrackersKey
from ringmaster.findings import Finding, Raw, as_list
from ringmaster.tasks.batch.file_hooks import BatchFileHook, PlacedJob


class TrackersInFiles(BatchFileHook):
    """The key `trackers` of a batch."""

    def batch_findings(self, batch: Raw, jobs: Sequence[PlacedJob]) -> Iterator[Finding]:
        """Yields the trackers whose packages are not installed."""
        (key,) = TrackersKey.job_keys()
        for number, name in enumerate(as_list(batch.get(key))):
            if name in TRACKERS and (missing := missing_packages(name)):
                yield Finding((key, number), f"{name} needs {missing}, not installed", install_command(name))


BATCH_FILE_HOOKS = (TrackersInFiles(),)
