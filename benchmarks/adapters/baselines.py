"""Whole processes that train the same adapters: peft with Hugging Face's Trainer, and Ringmaster's gangs.

    python -m benchmarks.adapters.baselines WORK.json      # trains one process's share, and prints the result

Both use the same base, row order, initial values, learning rates, clipping, optimizer kernel and steps. All end in the
same weights up to floating-point order, which is checked. The Trainer neither reports nor saves during training; every
adapter is saved at its end, and Ringmaster's adapters are also evaluated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.adapters.jobs import Size, jobs_on, order_of, save_base
from ringmaster.techniques import Job

ROOT = Path(__file__).resolve().parents[2]
PEFT, PEFT_BESIDE = "peft + Trainer, one after another", "peft + Trainer, a process a core"
SINGLE, SINGLE_BESIDE = "gangs of one, one after another", "gangs of one, side by side"
FUSED, FUSED_BESIDE = "one group", "a group a core"
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a process: `who` is "peft" or "gangs"; `shares` has a share of adapters for each core of `cores`."""

    who: str
    folder: str
    cache: str
    base: str
    size: Size
    shares: tuple[tuple[int, ...], ...]
    cores: tuple[int, ...]
    num: int
    steps: int
    ranks: tuple[int, ...]
    threads: int = 1
    fused: bool = False

    def jobs(self, share: Sequence[int]) -> list[Job]:
        every = jobs_on(Path(self.base), self.size, num=self.num, steps=self.steps, ranks=self.ranks)
        return [every[i] for i in share]


def shared_out(num: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """Deals the numbers below `num` in turn, as evenly as possible: (0, 2, 4), (1, 3)."""
    return tuple(tuple(range(part, num, parts)) for part in range(parts))


# -- the measuring side ------------------------------------------------------------------------------------------------


def measure_processes(
    folder: Path, size: Size, *, num: int, steps: int, rounds: int, ranks: tuple[int, ...], say: Callable[[str], None]
) -> dict:
    """Returns the seconds of whole processes by contender and round, and the largest differences of weights."""
    from ringmaster.techniques.data import prepare

    base = save_base(folder, size)
    prepare(jobs_on(base, size, num=1, steps=1)[0].data, cache_dir=folder)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    plain = Work(
        who="gangs",
        folder=str(folder),
        cache=str(folder),
        base=str(base),
        size=size,
        shares=shared_out(num, 1),
        cores=cores[-1:],
        num=num,
        steps=steps,
        ranks=ranks,
    )
    beside = {"shares": shared_out(num, len(cores)), "cores": cores}
    peft = replace(plain, who="peft", cores=cores)
    peft = replace(peft, threads=_best_threads(peft, len(cores), say))
    contenders = {
        PEFT: [peft],
        PEFT_BESIDE: [
            replace(peft, shares=(share,), cores=(core,), threads=1)
            for share, core in zip(beside["shares"], cores, strict=True)
        ],
        SINGLE: [plain],
        SINGLE_BESIDE: [replace(plain, **beside)],
        FUSED: [replace(plain, fused=True)],
        FUSED_BESIDE: [replace(plain, fused=True, **beside)],
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, works in contenders.items():
            into = folder / f"{number}-{list(contenders).index(name)}"
            found[name].append(seconds_of([replace(work, folder=str(into)) for work in works]))
            say(f"round {number + 1}: {name}: {found[name][-1]:.1f} s")
    first = {name: folder / f"0-{number}" for number, name in enumerate(contenders)}
    apart = {name: largest_difference(first[SINGLE], into, num=num) for name, into in first.items()}
    assert apart[FUSED] == apart[FUSED_BESIDE] == apart[SINGLE_BESIDE] == 0, apart
    assert apart[PEFT] < LARGEST_DIFFERENCE, apart
    return {"seconds": found, "apart": apart, "adapters": num, "steps": steps, "threads": peft.threads}


LARGEST_DIFFERENCE = 1e-2  # AdamW divides by the size of gradients, including those near zero


def _best_threads(peft: Work, most: int, say: Callable[[str], None]) -> int:
    """Returns the number of threads that trains the first adapter fastest."""
    if most == 1:
        return 1
    seconds = {}
    for threads in (1, most):
        alone = replace(peft, shares=((0,),), threads=threads, folder=f"{peft.folder}/threads-{threads}")
        seconds[threads] = seconds_of([alone])
        say(f"peft + Trainer, one adapter on {threads} threads: {seconds[threads]:.1f} s")
    return min(seconds, key=seconds.__getitem__)


def seconds_of(works: Sequence[Work]) -> float:
    """Returns the seconds until the last of several processes, started together, has ended."""
    started_s = time.perf_counter()
    processes = [_start(work) for work in works]
    for process in processes:
        if process.wait():
            raise RuntimeError(f"{' '.join(map(str, process.args))} ended with exit status {process.returncode}")
    return time.perf_counter() - started_s


def _start(work: Work) -> subprocess.Popen:
    file = Path(work.folder) / f"work-{min(work.shares)[0]}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**vars(work), "size": vars(work.size)}))
    command = [sys.executable, "-m", "benchmarks.adapters.baselines", str(file)]
    quiet = {"OMP_NUM_THREADS": str(work.threads), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **quiet}, stdout=sys.stderr)


def largest_difference(one: Path, other: Path, *, num: int) -> float:
    """Returns the largest difference between the adapters' weights in two folders."""
    from safetensors.torch import load_file

    worst = 0.0
    for i in range(num):
        weights = [load_file(folder / f"adapter-{i}" / "model" / WEIGHTS) for folder in (one, other)]
        assert weights[0].keys() == weights[1].keys(), i
        worst = max([worst, *(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])])
    return worst


# -- the process that trains -------------------------------------------------------------------------------------------


def main() -> None:
    """Trains the adapters of the work file."""
    told: Mapping = json.loads(Path(sys.argv[1]).read_text())
    shares = tuple(tuple(share) for share in told["shares"])
    work = Work(**{**told, "size": Size(**told["size"]), "shares": shares, "ranks": tuple(told["ranks"])})
    os.sched_setaffinity(0, set(work.cores))
    if work.who == "peft":
        train_by_peft(work)
    else:
        train_by_gangs(work)


def train_by_gangs(work: Work) -> None:
    """Trains a gang for each job of a core's share, or one for the share as a group; the cores run in parallel."""
    from ringmaster.techniques.processes.forkserver_client import ForkServer
    from ringmaster.techniques.processes.gang import Gang

    server = ForkServer()
    try:
        waiting = [list(_orders(work, share, core)) for share, core in zip(work.shares, work.cores, strict=True)]
        while any(waiting):
            gangs = [
                Gang(server, replace(queue.pop(0), ordered_at_s=time.monotonic()), num_ranks=1)
                for queue in waiting
                if queue
            ]
            for gang in gangs:
                outcome = gang.wait(lambda event: None)
                assert outcome.status == "done", outcome
    finally:
        server.close()


def _orders(work: Work, share: Sequence[int], core: int) -> Iterator:
    orders = [order_of(job, Path(work.folder), cores=(core,), cache=Path(work.cache)) for job in work.jobs(share)]
    if not work.fused:
        yield from orders
        return
    lead, *members = orders  # all have the same number of steps
    technique = "ringmaster.techniques.shared_base:SharedBase"
    yield replace(lead, technique=technique, config={"recompute": "none"}, members=tuple(members))


def train_by_peft(work: Work) -> None:
    """Trains the adapters of the share, one after another."""
    import torch

    from benchmarks.adapters.peft import train_by_trainer

    torch.set_num_threads(work.threads)
    for job in work.jobs(work.shares[0]):
        train_by_trainer(job, Path(work.folder), Path(work.cache))


if __name__ == "__main__":
    main()
