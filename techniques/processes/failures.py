"""The kinds of failures of a rank, by their remedies, and whether its code or its machine is the cause."""

import torch

from ringmaster.errors import PERMANENT_ERRORS
from ringmaster.techniques.processes.gang_events import OutcomeStatus

# Messages of allocators: CUDA's, the CPU's, and those inside cuBLAS and cuDNN.
OUT_OF_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "alloc_failed")

# Parts of messages whose cause is the machine, its devices, its network or its disk, and not the job.
MACHINE_SIGNS = (
    *("cuda", "cudnn", "cublas", "nccl", "gloo", "hip error", "device-side"),
    *("connect", "network", "socket", "peer", "timed out", "timeout", "unavailable", "address already in use"),
    *("memory", "alloc", "no space left", "quota", "input/output error", "too many open files", "killed", "status -"),
)


def is_of_code(error: Exception) -> bool:
    """Returns whether a failure is that of the job's code or libraries, and not of the machine.

    Errors of files that name no system call, RuntimeErrors, and exceptions that a user has defined are of code. What
    derives from OSError and from torch's RuntimeErrors are disks, networks, devices and processes.
    """
    text = str(error).lower()
    if any(sign in text for sign in MACHINE_SIGNS):
        return False
    if isinstance(error, OSError):
        return type(error) is OSError and error.errno is None
    return not type(error).__module__.startswith("torch.")


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
