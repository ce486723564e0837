"""Steps of adapters that share a base, against sequential steps, Ringmaster's and peft's: seconds and memory."""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.adapters.jobs import HEAD_DIM, Size, jobs_on, order_of, save_base
from benchmarks.adapters.peft import PeftLoop
from ringmaster.techniques import Job
from ringmaster.techniques.data import prepare
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase
from ringmaster.techniques.processes.ranks import RankContext
from ringmaster.techniques.single import Single
from ringmaster.techniques.training.fused.group import FusedGroup
from ringmaster.techniques.training.fused.member import GroupMember
from ringmaster.techniques.training.trainer import Trainer

RANKS = RankContext(rank=0, num_ranks=1, device=torch.device("cpu"), mesh=None)
WARM_UP_STEPS = 2
ORDER = 1e-3  # tolerance of weights after some steps of AdamW with another order of operations
ENDLESS = 100_000
MIB = 2**20


def measure_engine(sizes: Sequence[Size], counts: Sequence[int], *, rounds: int, steps: int) -> Iterator[dict]:
    """Yields a row for each base and number of adapters: milliseconds of a step of all by each contender, and ratios.

    All contenders run in this process, on one thread, and take turns step by step. Raises AssertionError where the
    contenders' weights differ: Ringmaster's are compared bit by bit, peft's up to floating-point order.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            base = save_base(Path(folder), size)
            for count in counts:
                jobs = jobs_on(base, size, num=count, steps=ENDLESS)
                yield {"base": size.name, "adapters": count, **_compare(jobs, Path(folder), rounds=rounds, steps=steps)}


def _compare(jobs: Sequence[Job], folder: Path, *, rounds: int, steps: int) -> dict[str, float]:
    group, members = grouped(jobs, folder)
    trainers = [Trainer(order_of(job, folder), Single(), RANKS, beat=lambda: None) for job in jobs]
    loops = [PeftLoop(job, folder) for job in jobs]

    def turn() -> Turn:
        by_peft_s = cpu_seconds(lambda: [loop.step() for loop in loops])
        alone_s = cpu_seconds(lambda: [trainer.step() for trainer in trainers])
        return by_peft_s, alone_s, cpu_seconds(group.step)

    for _ in range(WARM_UP_STEPS):
        turn()
    found = [medians([turn() for _ in range(steps)]) for _ in range(rounds)]
    for member, trainer, loop in zip(members, trainers, loops, strict=True):
        trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        assert all(torch.equal(p, trained[name]) for name, p in member.tree.named_parameters()), member.name
        assert all(torch.allclose(p, trained[name], rtol=0, atol=ORDER) for name, p in loop.state().items())
    return ratios_of(found)


Turn = tuple[float, float, float]
"""CPU seconds of a step of all adapters: by peft, by Ringmaster one after another, and together."""


def medians(turns: Sequence[Turn]) -> Turn:
    """Returns each contender's median over some turns."""
    by_peft, alone, together = (statistics.median(column) for column in zip(*turns, strict=True))
    return by_peft, alone, together


def ratios_of(rounds: Sequence[Turn]) -> dict[str, float]:
    """Returns medians in milliseconds, and the rounds' ratios to `together` (median, least, most)."""
    found = {f"{name}_ms": 1e3 * s for name, s in zip(("peft", "alone", "together"), medians(rounds), strict=True)}
    for name, column in (("peft", 0), ("alone", 1)):
        ratios = [turn[column] / turn[-1] for turn in rounds]
        found |= {f"{name}_ratio": statistics.median(ratios), f"{name}_least": min(ratios), f"{name}_most": max(ratios)}
    return found


def grouped(jobs: Sequence[Job], folder: Path, *, recompute: str = "none") -> tuple[FusedGroup, list[GroupMember]]:
    """Returns the jobs as a group on their base, and its members."""
    data = prepare(jobs[0].data, cache_dir=folder)
    group = FusedGroup(MultiAdapterBase(build_model(jobs[0].model, data=data, seed=0), recompute=recompute))
    members = [GroupMember(order_of(job, folder), group.stem.model, device=RANKS.device) for job in jobs]
    for member in members:
        group.join(member)
    return group, members


def cpu_seconds(action: Callable[[], object]) -> float:
    """Returns the CPU seconds of the only thread, which other processes do not affect."""
    started_s = time.process_time()
    action()
    return time.process_time() - started_s


# -- memory ------------------------------------------------------------------------------------------------------------


def measure_memory(
    sizes: Sequence[Size], counts: Sequence[int], *, steps: int, recomputes: Sequence[str] = ("none", "full")
) -> Iterator[dict]:
    """Yields a row for each base, recomputation and number of adapters: the memory of a process beyond imports, in MiB.

    Each row is measured in a fresh process, forked from one that has imported everything.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        prepare(jobs_on(Path(folder), sizes[0], num=1, steps=1)[0].data, cache_dir=Path(folder))
        for size in sizes:
            save_base(Path(folder), size)
            for recompute in recomputes:
                for count in counts:
                    with context.Pool(1) as pool:  # with one fresh process
                        peak_mib = pool.apply(peak_of, (folder, size, count, recompute, steps))
                    yield {"base": size.name, "recompute": recompute, "adapters": count, "peak_mib": peak_mib}


def peak_of(folder: str, size: Size, count: int, recompute: str, steps: int) -> float:
    """Returns the peak MiB of this process while it trains `count` adapters together, beyond its previous memory.

    The process first trains a tiny model, so that memory that libraries allocate at their first use is not counted.
    """
    torch.set_num_threads(1)
    tiny = Size(hidden=HEAD_DIM, layers=1, tokens=size.tokens)
    _train(Path(folder), tiny, 2, recompute, steps=1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
    before = _status_mib("VmRSS")
    _train(Path(folder), size, count, recompute, steps=steps)
    return _status_mib("VmHWM") - before


def _train(folder: Path, size: Size, count: int, recompute: str, *, steps: int) -> None:
    group, _ = grouped(jobs_on(save_base(folder, size), size, num=count, steps=ENDLESS), folder, recompute=recompute)
    for _ in range(steps):
        group.step()


def _status_mib(key: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024 / MIB
