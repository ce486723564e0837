"""`precision: fp8` in batch files."""

from collections.abc import Iterator, Sequence
from typing import Any

from ringmaster.extras import missing_extra
from ringmaster.features.fp8.job import Float8
from ringmaster.findings import Finding, Raw, as_mapping, findings_where
from ringmaster.tasks.batch.file_hooks import BatchFileHook, PlacedJob
from ringmaster.techniques.job import FP8, Job
from ringmaster.techniques.job_features import is_black_box

COMPUTED_IN = "bf16"


class Float8InFiles(BatchFileHook):
    """The precision fp8, which is stored as bf16 with a feature."""

    def job_findings(self, job: Raw) -> Iterator[Finding]:
        """Yields why a job cannot compute in fp8."""
        precision = job.get("precision", Job.precision)
        if precision != FP8:
            yield from findings_where(
                (
                    job.get(Float8.key) is not None,
                    (Float8.key,),
                    "is for precision: fp8",
                    "set precision to fp8, or leave it out",
                ),
            )
            return
        place, other = ("precision",), f"set precision to {COMPUTED_IN}"
        missing, _, install = (missing_extra("torchao", feature="fp8") or "").partition(". To fix: ")
        yield from findings_where(
            (missing, place, missing, f"{install}, or {other}"),
            (
                job.get("adapter") is not None,
                place,
                "fp8 is for models of which all weights are trained, and the job has an adapter",
                other,
            ),
            (is_black_box(job), place, "fp8 is for a model that is built here, and the job has a command", other),
        )

    def batch_findings(self, batch: Raw, jobs: Sequence[PlacedJob]) -> Iterator[Finding]:
        """Yields a fault for each job in fp8 that trains a component with others."""
        in_fp8 = {as_mapping(raw).get("name") for _, raw in jobs if as_mapping(raw).get("precision") == FP8}
        for component, section in as_mapping(batch.get("shared_components")).items():
            for name in as_mapping(as_mapping(section).get("jobs")):
                if name in in_fp8:
                    place = ("shared_components", component, "jobs", name)
                    remedy = f"set its precision to {COMPUTED_IN}"
                    yield Finding(place, "has precision: fp8, which is not trained with a shared component", remedy)

    def job_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of a job in fp8 as they are stored."""
        if fields.get("precision") != FP8:
            return fields
        return {**fields, "precision": COMPUTED_IN, Float8.key: fields.get(Float8.key) or {}}

    def entry_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of a job's entry, with the precision that files name."""
        return fields if fields.get(Float8.key) is None else {**fields, "precision": FP8}


BATCH_FILE_HOOKS = (Float8InFiles(),)
