"""The jobs of the cluster tests, and their invariants under disturbances."""

import json
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ringmaster.techniques import DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec, Profile
from tests.cluster.stubs import leave_to_hurry
from tests.integration.workbench import SINGLE, is_bit_equal, weights_in

STUBS = "tests.cluster.stubs"
CONFIG = {"micro_batch": 8, "recompute": "none"}


def torch_job(name, *, trace="", num_steps=400, step_s=0.25, ballast=0, base=None, seed=0):
    """A job that sleeps in its steps, 100 s by default, so that a test can act in time; `hurry` removes the sleeps."""
    return Job(
        name=name,
        model=ModelSpec(
            factory=f"{STUBS}:slow",
            kwargs={"job": name, "trace": str(trace), "step_s": step_s, "ballast": ballast},
        ),
        data=DataSpec(factory=f"{STUBS}:points"),
        loss=f"{STUBS}:cross_entropy",
        optimizer=OptimizerSpec(name="adamw", lr=1e-2),
        global_batch_size=8,
        num_steps=num_steps,
        evaluation=EvaluationSpec(max_batches=1),
        base=base,
        seed=seed,
    )


def waiting_job(name, *, trace="", num_steps=20, step_s=0.5):
    """A job under a technique that only waits."""
    kwargs = {"step_s": step_s, **({"trace": str(trace)} if trace else {})}
    return Job(
        name=name, model=ModelSpec(factory="a:b", kwargs=kwargs), data=DataSpec(factory="a:c"), num_steps=num_steps
    )


def profiles_of(job, *, techniques=("single",)):
    """Returns profiles without a trial. "ddp" uses two nodes with a device each."""
    step_s = job.model.kwargs["step_s"]
    found = []
    for technique in techniques:
        num_devices = 2 if technique == "ddp" else 1
        found.append(
            Profile(
                technique=technique,
                config={} if technique == "waits" else {**CONFIG, "micro_batch": 8 // num_devices},
                num_devices=num_devices,
                num_ranks=num_devices,
                num_nodes=num_devices,
                step_s=step_s,
                peak_bytes=1 << 20,
                startup_s=0.5,
                save_s=0.05,
                stall_s=0.005,
                evaluate_s=0.05,
                export_s=0.05,
            )
        )
    return tuple(found)


def assert_same_weights(bench, job, model_dir, *, layout=SINGLE):
    """Asserts that the model is bit-equal to that of an undisturbed run under the same option.

    Neither the job's name nor how long its steps take changes its weights: many tests share a reference.
    """
    kwargs = {**job.model.kwargs, "job": "", "step_s": 0.0, "trace": ""}
    undisturbed = bench.reference(replace(job, name="undisturbed", model=replace(job.model, kwargs=kwargs)), layout)
    assert is_bit_equal(weights_in(model_dir), undisturbed.weights)


@dataclass
class Trace:
    """The steps of processes (job, rank, node, time), as the jobs wrote them to a file. Seconds of one clock."""

    file: object
    lines: list = field(default_factory=list)
    num_bytes: int = 0  # bytes read so far
    trials: set = field(default_factory=set)  # processes that profiled a job
    cloned: set = field(default_factory=set)  # names of jobs whose clones write their names too

    def read(self):
        """Reads the complete lines that were written since the last call."""
        if self.file.exists():
            with self.file.open("rb") as file:
                file.seek(self.num_bytes)
                whole, newline, _ = file.read().rpartition(b"\n")
            self.lines += [json.loads(line) for line in whole.splitlines()]
            self.num_bytes += len(whole) + len(newline)
        return self

    def hurry(self, *jobs):
        """Lets these jobs train without sleeps from now on."""
        for job in jobs:
            leave_to_hurry(self.file, job).touch()

    def of(self, *, job=None, node=None, after_s=0.0):
        """Returns the steps after `after_s`, of a job or on a node where given."""
        return [
            line
            for line in self.read().lines
            if job in (None, line["job"]) and node in (None, line["node"]) and line["s"] > after_s
        ]

    def note_trials(self, jobs, *, before_s):
        """Marks the jobs' processes before `before_s` (wall clock) as trials; a job may have several trials at once."""
        before_s -= time.time() - time.monotonic()
        names = {job.name for job in jobs}
        self.trials |= {_process(line) for line in self.read().lines if line["job"] in names and line["s"] < before_s}

    def assert_one_owner(self):
        """Asserts that no device served two processes at once, and that no rank of a trained job ran twice at once."""
        self.read()
        trained = [line for line in self.lines if _process(line) not in self.trials and line["job"] not in self.cloned]
        by_node, by_rank = (lambda line: line["node"]), (lambda line: (line["job"], line["rank"]))
        for whose, lines in ((by_node, self.lines), (by_rank, trained)):
            spans = {}
            for line in lines:
                first_s, _ = spans.setdefault((whose(line), _process(line)), (line["s"], line["s"]))
                spans[whose(line), _process(line)] = (first_s, line["s"])
            for thing in {thing for thing, _ in spans}:
                turns = sorted(span for (owner, _), span in spans.items() if owner == thing)
                for (_, ended_s), (began_s, _) in pairwise(turns):
                    assert ended_s < began_s, f"{thing} had two owners for {ended_s - began_s:.2f} s"


def _process(line):
    """Returns the identity of the process that wrote a line."""
    return line["pid"], line["born"]


def batch_file(folder, name, jobs):
    """Writes torch jobs as a batch file, to be trained by `single` on one device."""
    rows = [
        {
            "name": job.name,
            "model": {"factory": job.model.factory, "kwargs": dict(job.model.kwargs)},
            "data": {"factory": job.data.factory},
            "loss": job.loss,
            "optimizer": {"name": job.optimizer.name, "lr": job.optimizer.lr},
            "global_batch_size": job.global_batch_size,
            "num_steps": job.num_steps,
            "evaluation": {"max_batches": job.evaluation.max_batches},
            "seed": job.seed,
            "techniques": ["single"],
            "num_devices": [1],
        }
        for job in jobs
    ]
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"name": name, "jobs": rows}))
    return file
