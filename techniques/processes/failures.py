"""The kinds of failures of a rank, by their remedies."""

import torch

from ringmaster.errors import PERMANENT_ERRORS
from ringmaster.techniques.processes.events import OutcomeStatus

# Messages of allocators: CUDA's, the CPU's, and those inside cuBLAS and cuDNN.
OUT_OF_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "alloc_failed")


def failure_kind(error: Exception) -> OutcomeStatus:
    """Returns the kind of a failure, by its remedy: out of memory, invalid or crashed."""
    text = str(error).lower()
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return OutcomeStatus.OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and any(sign in text for sign in OUT_OF_MEMORY_SIGNS):
        return OutcomeStatus.OUT_OF_MEMORY
    if isinstance(error, PERMANENT_ERRORS):
        return OutcomeStatus.INVALID
    return OutcomeStatus.CRASHED
