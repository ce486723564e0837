"""Jobs of the cluster tests: they take time but hardly any processor, and write a trace of every step.

The trace is a ground truth that is independent of the pool's databases: which process trained which job where, and
when. A job sleeps in each step until a test lets it hurry.
"""

import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from select import select

import torch
import torch.distributed as dist
from torch import nn

from ringmaster.tasks.process_identity import ProcessId
from ringmaster.techniques.black_box import BlackBox
from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.processes.gang_events import JobReady, Steps
from ringmaster.techniques.processes.reporter import STOP

NODE = "RINGMASTER_TEST_NODE"  # set by the tests for every process on a node
TELL_EVERY_S = 0.2


def write_down(trace, job, *, rank=0):
    """Appends a line to the trace; short appends by several processes do not mix."""
    pid = os.getpid()
    line = {"s": time.monotonic(), "node": os.environ[NODE], "pid": pid, "born": born(pid), "job": job, "rank": rank}
    with Path(trace).open("a") as file:
        file.write(json.dumps(line) + "\n")


@cache
def born(pid):
    """Returns the start time of a living process: Linux reuses the ids of ended processes."""
    return ProcessId.of(pid).born


def leave_to_hurry(trace, job):
    """Returns the file whose existence lets a job train without sleeps."""
    return Path(f"{trace}.{job}.hurry")


def is_looked_at():
    """Returns whether this process evaluates or runs a preflight, for which no device is leased."""
    return not torch.is_grad_enabled() or "ringmaster.techniques.estimates.job_preflight" in sys.modules


class Slow(nn.Module):
    """A linear layer whose training steps each sleep for `step_s`, until the job may hurry.

    ballast: number of additional parameters, which make checkpoints larger.
    """

    def __init__(self, *, job, trace, step_s, ballast):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.ballast = nn.Parameter(torch.randn(ballast)) if ballast else None
        self.job, self.trace, self.step_s = job, trace, step_s

    def forward(self, points):
        if self.training and self.trace and not is_looked_at():
            write_down(self.trace, self.job, rank=dist.get_rank() if dist.is_initialized() else 0)
            if not leave_to_hurry(self.trace, self.job).exists():
                time.sleep(self.step_s)  # simulates work
        weighed = self.layer(points)
        return weighed if self.ballast is None else weighed + self.ballast.square().mean()


def slow(*, job, trace="", step_s=0.0, ballast=0):
    return Slow(job=job, trace=trace, step_s=step_s, ballast=ballast)


class Points(torch.utils.data.Dataset):
    num_labels = 3

    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        self.points = torch.randn(size, 4, generator=draw)
        self.labels = (self.points.sum(dim=1) > 0).long() + (self.points[:, 0] > 0).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"points": self.points[index], "labels": self.labels[index]}


def points():
    return Points(512, 0), Points(64, 1)


def cross_entropy(logits, batch):
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


class Waits(BlackBox):
    """Sleeps `step_s` seconds a step, and handles commands meanwhile. Its checkpoint is the number of steps done."""

    name = "waits"
    summary = "waits"

    def supports(self, job, gang, facts):
        return None

    def profile(self, order, reporter):
        raise NotImplementedError("its profiles are given")

    def run(self, order, reporter):
        step_s, trace = order.job.model.kwargs["step_s"], order.job.model.kwargs.get("trace")
        kept = Path(order.checkpoint_dir, "step")
        first = step = int(kept.read_text()) if kept.exists() else 0
        startup_s = time.monotonic() - order.ordered_at_s
        reporter.phase("waiting", timeout_s=60.0 + 20 * step_s)
        reporter.send(JobReady(step=step, startup_s=startup_s))
        told, said_s = step, time.monotonic()
        while step < max(order.last_step, reporter.commanded_until()) and not reporter.has_command(STOP):
            if trace:
                write_down(trace, order.job.name)
            began_s = time.monotonic()
            while not reporter.has_command(STOP) and (left_s := began_s + step_s - time.monotonic()) > 0:
                select([reporter], [], [], left_s)
            if time.monotonic() - began_s < step_s:
                break
            step += 1
            if time.monotonic() - said_s >= TELL_EVERY_S:
                self._tell(reporter, told, step, step_s)
                told, said_s = step, time.monotonic()
        self._tell(reporter, told, step, step_s)
        kept.parent.mkdir(parents=True, exist_ok=True)
        aside = kept.with_name(f"step-{os.getpid()}")
        aside.write_text(str(step))
        aside.rename(kept)
        is_done = step >= max(order.last_step, reporter.commanded_until())
        result = {"status": "done" if is_done else "preempted", "first_step": first, "step": step}
        if step == order.job.total_steps:
            with publish(Path(order.model_dir)) as folder:
                (folder / "model.json").write_text(json.dumps({"steps": step}))
            result["metrics"] = {"loss": 1.0}
        return {**result, "startup_s": startup_s}

    def _tell(self, reporter, first, step, step_s):
        if step > first:
            number = step - first
            losses, seconds = (1.0,) * number, (step_s,) * number
            reporter.send(Steps(first_step=first, losses=losses, seconds=seconds, wall_s=time.time()))
