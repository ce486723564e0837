"""What kind of failure an exception is: what another option would mend, a person, or another try."""

from __future__ import annotations

import torch

# How allocators say it: CUDA's, the CPU's, and those inside cuBLAS and cuDNN.
OUT_OF_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "alloc_failed")


def failure_kind(error: Exception) -> str:
    """Tells apart what another option would mend, what only the user can mend, and what another try may mend."""
    text = str(error).lower()
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "out_of_memory"
    if isinstance(error, RuntimeError) and any(sign in text for sign in OUT_OF_MEMORY_SIGNS):
        return "out_of_memory"
    if isinstance(error, (ValueError, TypeError, ImportError, AttributeError, KeyError)):
        return "invalid"
    return "crashed"
