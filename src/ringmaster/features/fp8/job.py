"""`precision: fp8` of a job, in its stored form: `precision: bf16`, and the feature `fp8`."""

from dataclasses import dataclass
from typing import Annotated, Any

from ringmaster.techniques.job_features import Description, Effect, JobFeature

WHY_NOT_ON_CPU = (
    "precision: fp8 is for GPUs of compute capability 8.9 or more, as CPUs have no units for fp8; "
    "fp8: {emulate: true} computes them in fp32"
)


@dataclass(frozen=True, kw_only=True)
class Float8(JobFeature):
    """The products of linear layers in fp8 (torchao's recipe `rowwise_with_gw_hp`), everything else in bf16.

    Outputs and the gradients of inputs are products of e4m3 values, with a scale for each row of the activations, and
    for each row or the whole of the weights. The gradients of weights are products in bf16. So no value depends on how
    a batch is divided, as it would with one scale for a tensor of activations.

    emulate: whether the products of the rounded values are computed in fp32, on any device.
    """

    key = "fp8"
    description = "how products in fp8 are computed, such as {emulate: true}, for `precision: fp8`"
    effects = Effect.WEIGHTS | Effect.STEP | Effect.TIME | Effect.MODEL
    group_obstacle = "computes in fp8"

    emulate: Annotated[
        bool, Description("true to compute the products of the rounded values in fp32 on any device, else false")
    ] = False

    def why_not(self, technique: Any) -> str | None:
        """Requires whole weights, from whose rows the scales are computed."""
        if technique.whole_layers:
            return None
        return f"precision: fp8 scales the rows of whole weights, which {technique.name} divides"

    def why_not_on(self, device_kind: str) -> str | None:
        """Requires a GPU, unless products are emulated; the trainer reads the GPU's compute capability."""
        return None if self.emulate or device_kind == "gpu" else WHY_NOT_ON_CPU


JOB_FEATURES = (Float8,)
