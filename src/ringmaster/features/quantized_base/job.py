"""`quantize_base` of a job: the format of the frozen weights below its adapter."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any

from ringmaster.extras import missing_extra
from ringmaster.findings import Finding, Raw, findings_where
from ringmaster.techniques.job_features import Choices, Description, Effect, JobFeature

NF4 = "nf4"


@dataclass(frozen=True, kw_only=True)
class QuantizedBase(JobFeature):
    """The linear layers of the frozen base in 4 bits (QLoRA: Dettmers et al., arXiv:2305.14314), below an adapter.

    quantize_base: "nf4"; None for the weights as they are.
    """

    effects = Effect.WEIGHTS | Effect.STEP | Effect.TIME | Effect.MODEL
    changes_base = True

    quantize_base: Annotated[
        Annotated[str, Choices((NF4,))] | None,
        Description("nf4, for the base of an adapter in 4 bits, or leave the key out"),
    ] = None

    def change_base(self, model: Any, adapter: Any) -> None:
        """Replaces the linear layers in place."""
        from ringmaster.features.quantized_base.layers import quantize_base  # which imports torch

        if self.quantize_base is not None:
            quantize_base(model, adapter)

    def why_not(self, technique: Any) -> str | None:
        """Requires that rows of weights are neither divided nor moved."""
        if self.quantize_base is None or technique.takes_packed_weights:
            return None
        torch = f"under torch {version('torch')}"
        return f"the base's weights are packed, 4 bits each, and {technique.name} divides or moves their rows {torch}"

    @classmethod
    def findings(cls, job: Raw) -> Iterator[Finding]:
        """Yields why a job's base cannot be in 4 bits."""
        if job.get("quantize_base") is None:
            return
        place, adapter = ("quantize_base",), job.get("adapter")
        starts_as = adapter.get("initialization") if isinstance(adapter, Mapping) else None
        problem, _, remedy = (missing_extra("quantization", feature="a base in 4 bits") or "").partition(". To fix: ")
        yield from findings_where(
            (
                not isinstance(adapter, Mapping),
                place,
                "is for a base that stays frozen below an adapter",
                "give an adapter, or leave it out",
            ),
            (
                starts_as not in (None, "default"),
                ("adapter", "initialization"),
                "subtracts from the base's weights, which are in 4 bits",
                "leave it out",
            ),
            (
                job.get("compile"),
                ("compile",),
                "compiles layers, and those of 4 bits are not compiled",
                "leave it out",
            ),
            (problem, place, problem, remedy),
        )


JOB_FEATURES = (QuantizedBase,)
