"""The reference kernel: a short fixed computation whose seconds say how busy a device is with other work.

A repetition is two matrix products and two copies of memory, far shorter than a time slice of the scheduler. Its
fastest repetition is therefore undisturbed even on a busy machine. The mean contains the slices that other processes
took, so it is the mean, not the median, that is compared with an undisturbed one.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.events import ReferenceTimed, event_to_json
from ringmaster.techniques.processes.ranks import Ranks

WARM_UP = 3  # repetitions
# By type of device: the side of the matrices, the length of the vectors, and the least total of the measured seconds.
SIZES = {"cpu": (256, 1 << 19, 0.25), "cuda": (1024, 1 << 20, 0.01)}
SLOT_S = 0.5  # of a measurement without a trial, which only the forecast of a plan depends on


def time_reference(device: torch.device, *, least_s: float | None = None) -> ReferenceTimed:
    """Times the reference kernel on a device. It draws no random numbers, and keeps no memory.

    least_s: the least total of the measured seconds; by default that of the device's type.
    """
    side, length, usual_s = SIZES[device.type]
    matrix, vector = torch.ones(side, side, device=device), torch.ones(length, device=device)
    product, copy = torch.empty_like(matrix), torch.empty_like(vector)
    seconds: list[float] = []
    while len(seconds) < WARM_UP + 2 or sum(seconds[WARM_UP:]) < (least_s or usual_s):
        started_s = time.perf_counter()
        for _ in range(2):
            torch.mm(matrix, matrix, out=product)
            copy.copy_(vector)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    measured = seconds[WARM_UP:]
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"
    return ReferenceTimed(
        kind=kind, mean_s=statistics.fmean(measured), fastest_s=min(measured), spread=standard_error(measured)
    )


def time_on_ranks(ranks: Ranks) -> ReferenceTimed:
    """Times the reference kernel on the devices of a gang at once. Its slowest rank counts: the others wait for it."""
    mine = time_reference(ranks.device)
    return ReferenceTimed(
        kind=mine.kind,
        mean_s=ranks.max(mine.mean_s),
        fastest_s=-ranks.max(-mine.fastest_s),
        spread=ranks.max(mine.spread),
    )


def standard_error(seconds: Sequence[float]) -> float:
    """Returns the standard error of the mean of measured seconds, relative to the mean; 0 for a single one."""
    if len(seconds) < 2:
        return 0.0
    return statistics.stdev(seconds) / math.sqrt(len(seconds)) / statistics.fmean(seconds)


def main(channel: Channel, argument: dict[str, Any]) -> int:
    """Times the reference kernel on one CPU slot; the entry point of a worker process. argument: `cores`."""
    cores = argument["cores"]
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(max(len(cores), 1))
    channel.send(event_to_json(time_reference(torch.device("cpu"), least_s=SLOT_S)))
    return 0
