"""Dropout that does not depend on how a batch is divided.

Whether an element is dropped is a hash of (seed, step, position of its sample in the global batch, module, number of
the draw in that module, indices of the element). So ranks, micro-batches and recomputed layers draw what an undivided
batch would.
"""

from ringmaster.techniques.engine.dropout.draws import (
    Draws,
    NoSample,
    current,
    drawing,
    name_modules,
    resumed,
    seed_generators,
    use,
)
from ringmaster.techniques.engine.dropout.sites import Sites, find_sites

__all__ = [
    "Draws",
    "NoSample",
    "Sites",
    "current",
    "drawing",
    "find_sites",
    "name_modules",
    "resumed",
    "seed_generators",
    "use",
]
