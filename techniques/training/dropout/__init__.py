"""Dropout that does not depend on how a batch is divided.

Whether an element is dropped is a hash of (seed, step, position of its sample in the global batch, module, number of
the draw in that module, indices of the element). So ranks, micro-batches and recomputed layers draw the same as an
undivided batch.
"""

from ringmaster.techniques.training.dropout.draws import (
    Draws,
    NoSample,
    current,
    name_modules,
    resumed,
    seed_generators,
    use,
)
from ringmaster.techniques.training.dropout.functions import drawing
from ringmaster.techniques.training.dropout.sites import DrawSites, find_sites

__all__ = [
    "DrawSites",
    "Draws",
    "NoSample",
    "current",
    "drawing",
    "find_sites",
    "name_modules",
    "resumed",
    "seed_generators",
    "use",
]
