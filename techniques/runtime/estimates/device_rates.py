"""Measured rates of a machine's devices: computation, memory, operators and links.

The measurement takes about a second and is cached for the machine.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore  # the source of torch.distributed's, with types
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ringmaster.techniques.interface.values import digest, from_json, to_json
from ringmaster.techniques.runtime.estimates.isolated_calls import in_children
from ringmaster.techniques.runtime.estimates.live_bytes import LiveBytes
from ringmaster.techniques.runtime.training.recomputation import recompute_layers

VERSION = 3
MATRIX, VECTOR, SMALL = 512, 1 << 22, 16  # side of matrices, length of vectors, sizes of a tiny decoder
NUM_LAYERS, NUM_MESSAGES = 4, 8
REPEATS = 12
LINK_BYTES, MESSAGE, TIMEOUT_S = 1 << 22, 1 << 15, 30.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one device, and of the link between two devices.

    flops_per_s: floating-point operations per second.
    bytes_per_s: bytes of memory read and written per second.
    operators_per_s: operators per second, of a decoder so small that launching them takes most of the time.
    link_bytes_per_s: bytes per second over the link.
    message_s: seconds that a message takes at the least.
    watched_operators_per_s: like operators_per_s, where selective recomputation decides for each what to store.
    wrapped_message_s: like message_s, for a message between distributed tensors.
    parallel: how many times as fast as one device two devices are that one process drives.
    """

    flops_per_s: float
    bytes_per_s: float
    operators_per_s: float
    link_bytes_per_s: float
    message_s: float
    watched_operators_per_s: float
    wrapped_message_s: float
    parallel: float = 1.0

    def times_of(self, number: int) -> float:
        """Returns how many times as fast as one device `number` devices are that one process drives with threads."""
        return 1 + (self.parallel - 1) * (number - 1)


def rates(cores: tuple[tuple[int, ...], ...], *, cache_dir: Path) -> Rates:
    """Returns the rates of CPU slots with these cores each.

    The rates are measured once for each machine, in separate processes, and cached under `cache_dir`.
    """
    file = cache_dir / f"rates-{digest([os.uname().nodename, cores, torch.__version__, VERSION])}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(to_json(_measured(cores))))
    return from_json(Rates, json.loads(file.read_text()))


def _measured(cores: tuple[tuple[int, ...], ...]) -> Rates:
    alone = in_children([lambda: _device(cores[0])])[0]
    every = tuple(sorted({core for slot in cores for core in slot}))
    both = in_children([lambda: _device(every)])[0] if len(cores) > 1 else alone
    link = {"link_bytes_per_s": 1e9, "message_s": 1e-4, "wrapped_message_s": 1e-3}
    if len(cores) > 1:
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"{folder}/meeting"
            link = in_children([lambda r=r: _link(r, meeting, cores[r]) for r in (0, 1)])[0]  # type: ignore[misc]
    parallel = both["flops_per_s"] / alone["flops_per_s"]
    return Rates(**alone, **link, parallel=1 + max(parallel - 1, 0.0) / max(len(cores) - 1, 1))


def _device(cores: tuple[int, ...]) -> dict[str, float]:
    _pin(cores)
    matrix, vector, other = torch.ones(MATRIX, MATRIX), torch.ones(VECTOR), torch.ones(VECTOR)
    return {
        "flops_per_s": 2 * MATRIX**3 / _best_s(lambda: matrix @ matrix),
        "bytes_per_s": 3 * 4 * VECTOR / _best_s(lambda: torch.add(vector, vector, out=other)),
        "operators_per_s": _operators_per_s("none"),
        "watched_operators_per_s": _operators_per_s("selective"),
    }


def _operators_per_s(recompute: str) -> float:
    """Operators per second: the operators of a step without recomputation over its seconds with `recompute`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": SMALL, "intermediate_size": SMALL, "vocab_size": SMALL, "num_hidden_layers": NUM_LAYERS}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, use_cache=False)).train()
    tokens = torch.zeros(1, SMALL, dtype=torch.int64)

    def step() -> None:
        model(input_ids=tokens).logits.sum().backward()

    step()
    with LiveBytes() as counted:
        step()
    recompute_layers(model, recompute)
    return counted.num_operators / _best_s(step)


def _link(rank: int, meeting: str, cores: tuple[int, ...]) -> dict[str, float]:
    _pin(cores)
    store, timeout = FileStore(meeting, 2), timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    large = torch.ones(LINK_BYTES // 4)
    message_s = _best_s(lambda: [dist.all_reduce(large[:MESSAGE] * 0.5) for _ in range(NUM_MESSAGES)]) / NUM_MESSAGES
    mesh, mine = init_device_mesh("cpu", (2,)), torch.ones(MESSAGE, requires_grad=True)
    wrapped_message_s = _best_s(lambda: _exchange(mine, mesh)) / NUM_MESSAGES
    # An all-reduce over n = 2 ranks moves 2 (n - 1) / n of the tensor.
    link_bytes_per_s = LINK_BYTES / _best_s(lambda: dist.all_reduce(large))
    return {"link_bytes_per_s": link_bytes_per_s, "message_s": message_s, "wrapped_message_s": wrapped_message_s}


def _exchange(mine: Tensor, mesh: DeviceMesh) -> None:
    """Runs all-reduces one after another, wrapped as in tensor-parallel layers, and their backward."""
    for _ in range(NUM_MESSAGES):
        mine = DTensor.from_local(mine * 0.5, mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local()
    mine.sum().backward()  # type: ignore[no-untyped-call]


def _pin(cores: tuple[int, ...]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(max(len(cores), 1))


def _best_s(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of several runs: the machine's rate when other processes disturb it least."""
    seconds = []
    for _ in range(REPEATS + 1):
        started_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds[1:])
