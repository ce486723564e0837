"""Rules of quantization-aware training in batch files."""

from collections.abc import Iterator

from ringmaster.extras import missing_extra
from ringmaster.findings import Finding, Raw, as_mapping, findings_where
from ringmaster.tasks.batch.file_hooks import BatchFileHook
from ringmaster.techniques.job import FP8, QUANTIZATION_AWARE
from ringmaster.techniques.job_features import is_exact


class QuantizationAwareInFiles(BatchFileHook):
    """Jobs whose model learns with the rounding of 4 bits."""

    def job_findings(self, job: Raw) -> Iterator[Finding]:
        """Yields why a job cannot be trained so."""
        if as_mapping(job.get("adaptation")).get("kind") != QUANTIZATION_AWARE:
            return
        place = ("adaptation", "kind")
        missing, _, install = (missing_extra("torchao", feature=QUANTIZATION_AWARE) or "").partition(". To fix: ")
        yield from findings_where(
            (missing, place, missing, install),
            (
                job.get("precision") == FP8,
                ("precision",),
                f"fp8 has layers of its own, and those of a {QUANTIZATION_AWARE} job round to 4 bits",
                "set precision to bf16",
            ),
            (job.get("compile"), ("compile",), f"does not go with a {QUANTIZATION_AWARE} job", "leave it out"),
            (
                is_exact(job),
                ("exact",),
                "does not go with rounded weights, whose last digits decide a rounding",
                "leave it out",
            ),
        )


BATCH_FILE_HOOKS = (QuantizationAwareInFiles(),)
