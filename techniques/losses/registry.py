"""Registry of losses: the built-in ones, and those of installed distributions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringmaster.techniques.dotted_names import resolve
from ringmaster.techniques.loss import LossFunction, option_faults
from ringmaster.techniques.registry import find, installed

ENTRY_POINT_GROUP = "ringmaster.losses"

BUILTIN: dict[str, str] = {
    "cross-entropy": "ringmaster.techniques.losses.cross_entropy:CrossEntropy",
    "mse": "ringmaster.techniques.losses.mse:MeanSquaredError",
    "dpo": "ringmaster.techniques.losses.dpo:Dpo",
    "orpo": "ringmaster.techniques.losses.orpo:Orpo",
    "simpo": "ringmaster.techniques.losses.simpo:Simpo",
    "grpo": "ringmaster.techniques.losses.grpo:Grpo",
    "contrastive": "ringmaster.techniques.losses.contrastive:Contrastive",
}


def loss_names() -> tuple[str, ...]:
    """Returns the names of all losses, built-in ones first."""
    return tuple(_every())


def is_named(loss: str | None) -> bool:
    """Returns whether a job's loss is the name of one, and not a dotted name or None."""
    return loss is not None and ":" not in loss


def loss_class(name: str) -> type[LossFunction]:
    """Returns the class of a loss. Raises ValueError where no loss, or a faulty one, has the name."""
    # Entry points are searched for other names only: that takes a tenth of a second, in each rank.
    path = BUILTIN[name] if name in BUILTIN else find("loss", name, _every())
    found = resolve(path)
    if not (isinstance(found, type) and issubclass(found, LossFunction)):
        raise ValueError(f"{path} is not a subclass of {LossFunction.__module__}.{LossFunction.__qualname__}")
    if found.name != name:
        raise ValueError(f"entry point {name!r} has the loss {found.name!r} ({path}). To fix: give both one name")
    return found


def loss_named(name: str, options: Mapping[str, Any]) -> LossFunction:
    """Returns a loss with options. Raises ValueError on an unknown loss, an unknown option or a wrong value."""
    found = loss_class(name)
    faults = list(option_faults(found, options))
    if faults:
        raise ValueError("; ".join(f"loss: {fault}" for fault in faults))
    return found(**{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})


def class_of(loss: str | None) -> type[LossFunction] | None:
    """Returns the class of a job's loss where the job names one; None for its model's own loss and dotted names."""
    return loss_class(loss) if loss is not None and is_named(loss) else None


def loss_function_of(loss: str | None, options: Mapping[str, Any]) -> LossFunction | None:
    """Returns a job's loss with its options where the job names one. Raises ValueError as `loss_named`."""
    return loss_named(loss, options) if loss is not None and is_named(loss) else None


def source_of(loss: str | None) -> str | None:
    """Returns the dotted name whose source code computes a job's loss; None where it is one of Ringmaster's."""
    if loss is None or loss in BUILTIN:
        return None
    return find("loss", loss, _every()) if is_named(loss) else loss


def reward_names(loss: str | None, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the dotted names of the reward functions of a job's loss; () for losses without any."""
    function = loss_function_of(loss, options)
    return () if function is None or function.generation is None else function.generation.rewards


def _every() -> dict[str, str]:
    # Built-in losses come first, and cannot be shadowed.
    return {**BUILTIN, **installed(ENTRY_POINT_GROUP), **BUILTIN}
