"""The objective time-to-target in batch files."""

from collections.abc import Iterator, Sequence

from ringmaster.findings import Finding, Raw, as_mapping, findings_where
from ringmaster.tasks.batch.file_hooks import BatchFileHook, PlacedJob
from ringmaster.tasks.planning.objectives import TIME_TO_TARGET


class TargetsInFiles(BatchFileHook):
    """The objective needs a target, and `may_vary` needs the objective."""

    def batch_findings(self, batch: Raw, jobs: Sequence[PlacedJob]) -> Iterator[Finding]:
        """Yields the faults between the objective and what jobs list under `may_vary`."""
        entries = [(place, as_mapping(raw)) for place, raw in jobs]
        is_for_targets = batch.get("objective") == TIME_TO_TARGET
        yield from findings_where(
            (
                is_for_targets and not any(job.get("target") is not None for _, job in entries),
                ("objective",),
                "is time-to-target, and no job has a target",
                "give a job a target",
            ),
            *(
                (
                    job.get("may_vary") is not None and not is_for_targets,
                    place(("may_vary",)),
                    "is chosen for the objective time-to-target alone",
                    f"set objective: {TIME_TO_TARGET}, or leave it out",
                )
                for place, job in entries
            ),
        )


BATCH_FILE_HOOKS = (TargetsInFiles(),)
