"""Attention implementations, and the reasons why a model or device cannot use one."""

from importlib.util import find_spec

from ringmaster.techniques.job import Job, ModelSpec
from ringmaster.techniques.technique import GangShape

# Our names, and those of transformers.
IMPLEMENTATIONS = {"sdpa": "sdpa", "flash": "flash_attention_2", "flex": "flex_attention"}
FLASH_PACKAGE = "flash_attn"


def check_attention(spec: ModelSpec) -> None:
    """Raises ValueError where a model on this machine cannot compute attention as `spec` says."""
    if spec.attention not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(
            f"model: attention {spec.attention!r} is unknown. To fix: take auto, {', '.join(IMPLEMENTATIONS)}"
        )
    if spec.attention != "auto" and (spec.factory is not None or spec.command is not None):
        raise ValueError("model: attention is chosen for Hugging Face's models. To fix: leave it out")
    if spec.attention != "auto" and "attn_implementation" in spec.config:
        raise ValueError("model: attention and config.attn_implementation say it twice. To fix: leave one out")
    if spec.attention == "flash" and find_spec(FLASH_PACKAGE) is None:
        raise ValueError(
            "model: attention: flash needs the package flash-attn, which is not installed. To fix: install it, or take "
            "sdpa, which on a GPU runs PyTorch's own build of FlashAttention"
        )


def why_no_attention(job: Job, gang: GangShape) -> str | None:
    """Returns why devices of this kind cannot compute attention as the job says, or None."""
    attention = job.model.attention
    if attention in ("flash", "flex") and gang.kind != "gpu":
        reason = "is a GPU's" if attention == "flash" else "has no backward on CPUs"
        return f"attention: {attention} {reason}; sdpa is for every device"
    if attention == "flash" and job.precision == "fp32":
        return "attention: flash computes in bf16 only, and the job's precision is fp32"
    return None
