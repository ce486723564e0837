"""A check, before a job trains, that the components which it names exist in its model."""

from __future__ import annotations

from torch import nn

from ringmaster.techniques.interface.job import Job


def check_components(job: Job, model: nn.Module) -> None:
    """Raises ValueError if a prefix in the job's `components` matches no module or parameter of its model.

    Jobs with an adapter are not checked: an adapter's files hold other parameters than the model.
    """
    if not job.components or job.adapter is not None:
        return
    names = {name for name, _ in model.named_parameters()} | set(model.state_dict())
    for component, prefix in job.components.items():
        if not any(name == prefix or name.startswith(f"{prefix}.") for name in names):
            there = ", ".join(sorted({name.partition(".")[0] for name in names})[:8])
            raise ValueError(
                f"components: {component} is {prefix!r}, and no parameter of the model is within it. "
                f"To fix: begin with one of {there}"
            )
