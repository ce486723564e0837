"""The cost of checkpoints in training: written in the background and synchronously, against none, in alternation.

    python -m benchmarks.checkpoints [--rounds 5] [--steps 6]

One model trains in one process on one core, which the writing thread shares: a CPU slot, and the worst case. A round
consists of steps without a save; then one background save, from its copy to the first step after it is published; then
one synchronous save. The cost of a background save is the time of its steps beyond the same number without one. The
cost of continuous saving (the next save begins when one is published) is the ratio of the two. The executor's interval
follows from a trial's measurements (the copy, and on a CPU the seconds of the core that writes); a save's cost over
that interval is its share of the time. Writes benchmarks/results/checkpoints.json and the section of docs/benchmarks.md
between the markers `<!-- checkpoints -->`.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

from benchmarks.page import write_section

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "checkpoints.json"
GOAL = 0.02
# (name, hidden size, layers, tokens a row, rows a step)
SIZES = [("9 M", 320, 6, 128, 2)]


class Silent:
    """A reporter that discards its events, except the last one."""

    def beat(self):
        pass

    def send(self, event, **details):
        self.last = (event, details)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="without a save, a round")
    arguments = parser.parse_args()
    scratch = ROOT / ".ringmaster"  # a run stores checkpoints there too; the temporary folder may be in memory
    scratch.mkdir(exist_ok=True)
    rows = []
    for name, *size in SIZES:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            rows.append(measure(name, *size, folder=Path(folder), rounds=arguments.rounds, steps=arguments.steps))
        print(json.dumps(rows[-1]), flush=True)
    record(rows)


def measure(name, hidden_size, num_layers, seq_len, batch_size, *, folder, rounds, steps):
    """Measures one model; returns the medians over the rounds."""
    from benchmarks.trainers import Ours, llama
    from ringmaster.tasks.execution.starter import checkpoint_interval_s
    from ringmaster.techniques.checkpoints.saving import Saver, SaveVotes
    from ringmaster.techniques.training.trial import _copy_s

    cores = sorted(os.sched_getaffinity(0))
    trainer = Ours(llama(hidden_size, num_layers, seq_len, batch_size), folder, cores=cores[-1:]).trainer
    root = folder / "checkpoints"
    saver = Saver(trainer, trainer.store(root), Silent(), ranks=trainer.ranks)

    def plain():
        started = clock()
        for _ in range(steps):
            trainer.step()
        return elapsed(started) / steps

    def on_the_way():
        started, num_steps = clock(), 0
        saver.begin()
        while not saver.is_idle:
            saver.follow(SaveVotes(*trainer.step(tuple(saver.votes())).requests))
            num_steps += 1
        return elapsed(started), num_steps

    plain(), on_the_way(), trainer.save(root)  # warms up buffers and caches
    found = []
    for _ in range(rounds):
        step = plain()
        saved, num_steps = on_the_way()
        working_s = time.thread_time()
        at_once_s = trainer.save(root)
        working_s = time.thread_time() - working_s
        found.append(
            {
                "step_s": step.wall_s,
                "stall_s": _copy_s(trainer),
                "cost_s": saved.wall_s - num_steps * step.wall_s,
                "cost_cpu_s": saved.cpu_s - num_steps * step.cpu_s,
                "continuous": saved.wall_s / num_steps / step.wall_s,
                "steps_until_published": num_steps,
                "at_once_s": at_once_s,
                "working_s": working_s,
            }
        )
    row = {key: statistics.median(one[key] for one in found) for key in found[0]}
    num_bytes = sum(f.stat().st_size for f in next(root.glob("step-*")).iterdir())
    interval_s = checkpoint_interval_s(row["stall_s"] + row["working_s"], num_devices=1)
    share, share_cpu = (max(row[key], 0.0) / interval_s for key in ("cost_s", "cost_cpu_s"))
    at_once_every_s = checkpoint_interval_s(row["at_once_s"], num_devices=1)
    more = {"interval_s": interval_s, "share": share, "share_cpu": share_cpu, "at_once_every_s": at_once_every_s}
    return {"name": name, "num_bytes": num_bytes, **row, **more, "rounds": found}


class Elapsed:
    """Wall seconds, and CPU seconds of all threads of this process."""

    def __init__(self, wall_s, cpu_s):
        self.wall_s, self.cpu_s = wall_s, cpu_s

    def __truediv__(self, num):
        return Elapsed(self.wall_s / num, self.cpu_s / num)


def clock():
    return time.perf_counter(), time.process_time()


def elapsed(started):
    now = clock()
    return Elapsed(now[0] - started[0], now[1] - started[1])


def line(row):
    at_once = row["at_once_s"] / row["at_once_every_s"]
    return (
        f"| {row['name']} | {row['num_bytes'] / 1e6:.0f} MB | {row['step_s']:.2f} s | {row['at_once_s']:.2f} s | "
        f"{row['stall_s']:.3f} s | {row['cost_s']:.2f} s | {row['cost_cpu_s']:.2f} s | {row['continuous']:.2f} | "
        f"{row['interval_s']:.0f} s | {row['share']:.2%} | {at_once:.2%} |"
    )


def record(rows):
    """Writes the figures, and the section of the page between the markers."""
    said = {"date": str(date.today()), "processor": platform.machine(), "cores": os.cpu_count(), "goal": GOAL}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({**said, "load": os.getloadavg()[0], "rows": rows}, indent=1) + "\n")
    table = [
        f"Saves of a Llama with AdamW in fp32 under `single` on {said['cores']} cores, {said['date']}, with a load of",
        f"{os.getloadavg()[0]:.1f} by all that ran; medians of {len(rows[0]['rounds'])} rounds in alternation.",
        "",
        "| parameters | checkpoint | a step | a save at once | the copy of one on the way | all that it costs "
        "| on the core | saving without a pause, times as slow | the executor's interval | share of the time "
        "| at once |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *map(line, rows),
        "",
        "The share is what a save costs over the interval; at once, over the interval that its whole time gives. The",
        f"goal is a share below {GOAL:.0%}.",
    ]
    write_section("checkpoints", table)


if __name__ == "__main__":
    main()
