"""Classification of exceptions: out of memory, invalid input, or a crash."""

from __future__ import annotations

import torch

# Messages of allocators: CUDA's, the CPU's, and those inside cuBLAS and cuDNN.
OUT_OF_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "alloc_failed")


def failure_kind(error: Exception) -> str:
    """Returns the kind of a failure, by its remedy.

    "out_of_memory": another option may succeed.
    "invalid": the user has to correct something.
    "crashed": another try may succeed.
    """
    text = str(error).lower()
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "out_of_memory"
    if isinstance(error, RuntimeError) and any(sign in text for sign in OUT_OF_MEMORY_SIGNS):
        return "out_of_memory"
    if isinstance(error, (ValueError, TypeError, ImportError, AttributeError, KeyError)):
        return "invalid"
    return "crashed"
