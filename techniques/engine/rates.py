"""How fast a machine's devices compute, read and send: a trial of a second, kept for the machine."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from techniques.engine.children import in_children
from techniques.values import digest, from_json, to_json

VERSION = 1
MATRIX, VECTOR, SMALL = 512, 1 << 22, 64  # sides and lengths of what is multiplied, added and sent
REPEATS = 5
LINK_BYTES, TIMEOUT_S = 1 << 22, 30.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one device: operations, bytes and operators a second. Of the link between two: bytes a second, and seconds
    that a message takes at the least. parallel: how many times as fast two devices driven by one process are.
    """

    flops_s: float
    bytes_s: float
    operators_s: float
    link_bytes_s: float
    message_s: float
    parallel: float = 1.0

    def with_devices(self, number: int) -> Rates:
        """As one process sees `number` devices (CPU slots: threads); operators are begun by one of them."""
        times = 1 + (self.parallel - 1) * (number - 1)
        return replace(self, flops_s=self.flops_s * times, bytes_s=self.bytes_s * min(times, 2.0))


def rates(cores: tuple[tuple[int, ...], ...], *, cache_dir: Path) -> Rates:
    """The rates of CPU slots with these cores each, measured once a machine in processes of their own."""
    file = cache_dir / f"rates-{digest([os.uname().nodename, cores, torch.__version__, VERSION])}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(to_json(_measured(cores))))
    return from_json(Rates, json.loads(file.read_text()))


def _measured(cores: tuple[tuple[int, ...], ...]) -> Rates:
    alone = in_children([lambda: _device(cores[0])])[0]
    every = tuple(sorted({core for slot in cores for core in slot}))
    both = in_children([lambda: _device(every)])[0] if len(cores) > 1 else alone
    link = {"link_bytes_s": 1e9, "message_s": 1e-4}
    if len(cores) > 1:
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"file://{folder}/meeting"
            link = in_children([lambda r=r: _link(r, meeting, cores[r]) for r in (0, 1)])[0]  # type: ignore[misc]
    parallel = both["flops_s"] / alone["flops_s"]
    return Rates(**alone, **link, parallel=1 + max(parallel - 1, 0.0) / max(len(cores) - 1, 1))


def _device(cores: tuple[int, ...]) -> dict[str, float]:
    _pin(cores)
    matrix, vector, small = torch.ones(MATRIX, MATRIX), torch.ones(VECTOR), torch.ones(SMALL)
    other = torch.ones(VECTOR)
    return {
        "flops_s": 2 * MATRIX**3 / _best_s(lambda: matrix @ matrix),
        "bytes_s": 3 * 4 * VECTOR / _best_s(lambda: torch.add(vector, vector, out=other)),
        "operators_s": 1000 / _best_s(lambda: [small + small for _ in range(1000)]),
    }


def _link(rank: int, meeting: str, cores: tuple[int, ...]) -> dict[str, float]:
    _pin(cores)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
    large, small = torch.ones(LINK_BYTES // 4), torch.ones(1)
    message_s = _best_s(lambda: dist.all_reduce(small))
    # An all-reduce of n = 2 moves 2 (n - 1) / n of the tensor.
    return {"link_bytes_s": LINK_BYTES / _best_s(lambda: dist.all_reduce(large)), "message_s": message_s}


def _pin(cores: tuple[int, ...]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(max(len(cores), 1))


def _best_s(work: Callable[[], Any]) -> float:
    """The quickest of some: what the machine can do while nobody disturbs it."""
    seconds = []
    for _ in range(REPEATS + 1):
        started_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds[1:])
