"""Predicted seconds of a segment beside its steps: its start, a checkpoint, an evaluation and the export of the model.

With W and S the bytes of the stored weights and of the whole stored state, w and r the bytes that this machine's disk
writes and reads per second through the runtime's own writer (with checksums, synced):

    save = fixed + S / w      export = fixed + S / r + W / w      start = process + model + S / r
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ringmaster.codec import digest
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.checkpoints.state import HostCopies, piece_writer, read_whole
from ringmaster.techniques.estimates.device_rates import undisturbed_s
from ringmaster.techniques.estimates.isolated_calls import keep, kept
from ringmaster.techniques.job import Job
from ringmaster.techniques.model_facts import ModelFacts
from ringmaster.techniques.technique import OPTIMIZER_STATE_BYTES, WEIGHT_BYTES

VERSION = 2
LARGE = 1 << 20  # elements of the state that is written to measure the disk; far shorter than a time slice
REPEATS = 6  # of which the fastest counts, as other processes disturb it least
PROCESS_S, RANKS_S = 0.15, 0.35  # of a fork from a process that has torch imported; of several ranks that meet
EXPORT_S = 0.05  # of a model's config, tokenizer and checksums
FIRST_STEPS = 0.5  # steps by which the first ones together take longer than later ones
INITIALIZED_BYTES_PER_S = 4e8  # of random weights


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """How fast checkpoints are written and read on this machine.

    fixed_s: seconds of a checkpoint of next to nothing.
    write_bytes_per_s, read_bytes_per_s: of the bytes beyond that.
    copy_bytes_per_s: of a copy in memory, from which a checkpoint is written while training continues.
    """

    fixed_s: float
    write_bytes_per_s: float
    read_bytes_per_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class SegmentCosts:
    """Predicted seconds beside the steps of a job under an option; the fields are those of a `Candidate`."""

    startup_s: float
    save_s: float
    stall_s: float
    evaluate_s: float
    export_s: float


def segment_costs(
    job: Job,
    *,
    facts: ModelFacts,
    num_held_out: int,
    num_ranks: int,
    step_s: float,
    forward_share: float,
    disk: DiskRates,
) -> SegmentCosts:
    """Returns the predicted seconds of a job beside its steps.

    step_s: predicted seconds of a step; 0 where they are unknown.
    forward_share: the part of a step that a batch of an evaluation takes.
    """
    trained = facts.num_updated * WEIGHT_BYTES
    weights = trained if job.adapter is not None else facts.parameter_bytes
    state = weights + facts.num_updated * OPTIMIZER_STATE_BYTES[job.optimizer.name]
    writing_s = state / disk.write_bytes_per_s
    size = job.global_batch_size
    num_batches = min(-(-num_held_out // size), job.evaluation.max_batches)
    building_s = facts.parameter_bytes / INITIALIZED_BYTES_PER_S
    return SegmentCosts(
        startup_s=PROCESS_S + (RANKS_S if num_ranks > 1 else 0.0) + building_s + FIRST_STEPS * step_s,
        save_s=disk.fixed_s + writing_s,
        # A background save of a CPU slot takes time of the cores that train.
        stall_s=state / disk.copy_bytes_per_s + writing_s / 2,
        evaluate_s=num_batches * forward_share * step_s,
        export_s=EXPORT_S + state / disk.read_bytes_per_s + weights / disk.write_bytes_per_s,
    )


@cache
def disk_rates(cache_dir: Path) -> DiskRates:
    """Returns the rates of the disk that `cache_dir` lies on, which are measured once for each machine."""
    file = cache_dir / f"disk-{digest([os.uname().nodename, VERSION])}.json"
    if (known := kept(DiskRates, file)) is not None:
        return known
    cache_dir.mkdir(parents=True, exist_ok=True)
    measured = _measured(cache_dir)
    keep(measured, file)
    return measured


def _measured(folder: Path) -> DiskRates:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        small_s, _ = _fastest_s(Path(scratch) / "small", 1)
        large_s, read_s = _fastest_s(Path(scratch) / "large", LARGE)
    state, copies = {"model/weight": torch.ones(LARGE)}, HostCopies(is_pinned=False)
    seconds = []
    for _ in range(REPEATS):
        started_s = undisturbed_s()
        copies.take(state)
        seconds.append(undisturbed_s() - started_s)
    num_bytes = LARGE * WEIGHT_BYTES
    return DiskRates(
        fixed_s=small_s,
        write_bytes_per_s=num_bytes / max(large_s - small_s, 1e-4),
        read_bytes_per_s=num_bytes / max(read_s, 1e-4),
        copy_bytes_per_s=num_bytes / max(min(seconds), 1e-5),
    )


def _fastest_s(folder: Path, num_elements: int) -> tuple[float, float]:
    """Seconds in which a state of this size is written, and read."""
    state, written_s, read_s = {"model/weight": torch.ones(num_elements)}, [], []
    for i in range(REPEATS):
        store, started_s = CheckpointStore(folder / str(i)), undisturbed_s()
        store.save(1, piece_writer(state), {})
        written_s.append(undisturbed_s() - started_s)
        started_s = undisturbed_s()
        checkpoint = store.newest()
        assert checkpoint is not None
        read_whole(checkpoint, prefix="model/")
        read_s.append(undisturbed_s() - started_s)
    return min(written_s), min(read_s)
