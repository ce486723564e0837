"""Base class of data-parallel techniques: the division of the batch, and the knobs to try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from ringmaster.techniques.job import Job
from ringmaster.techniques.technique import (
    RECOMPUTE,
    Config,
    GangShape,
    Technique,
    batch_is_divisible,
    micro_batches,
    undivided_batch_only,
)

if TYPE_CHECKING:
    from ringmaster.techniques.model_facts import ModelFacts


class DataParallel(Technique):
    """Divides the global batch over all devices of the gang; subclasses lay out the model.

    Attributes:
        knobs: the technique's own config keys and their values, the presumably cheapest first.
    """

    knobs: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def supports(self, job: Job, gang: GangShape, facts: ModelFacts) -> str | None:
        """Requires two devices or more, and a global batch that may be, and can be, divided over them."""
        if gang.num_devices < 2:
            return "needs two devices or more"
        return undivided_batch_only(job, facts) or batch_is_divisible(job, gang.num_devices)

    def configs(self, job: Job, gang: GangShape, facts: ModelFacts) -> Iterator[Config]:
        """Yields fewer, larger micro-batches first; recomputation comes last, as it only serves to save memory."""
        sizes = micro_batches(job, num_slices=gang.num_devices)
        for recompute, *values, micro_batch in product(RECOMPUTE, *self.knobs.values(), sizes):
            yield {"micro_batch": micro_batch, "recompute": recompute, **dict(zip(self.knobs, values, strict=True))}
