"""The preflight of jobs in worker processes, which prepares their data and lists the options that could train them."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ringmaster.codec import digest, from_json, to_json
from ringmaster.errors import ChannelClosed, ForkServerError, InterpreterError
from ringmaster.tasks.cluster import Cluster, Device
from ringmaster.techniques import Job, registry
from ringmaster.techniques.data.tokenizer_folders import have_other_tokens
from ringmaster.techniques.data_source import LANGUAGE_MODELING, PreparedData
from ringmaster.techniques.job_features import Effect
from ringmaster.techniques.job_specs import Adapter
from ringmaster.techniques.preflight_result import Preflight, PreflightOrder
from ringmaster.techniques.processes import gang_events
from ringmaster.techniques.processes.forkserver_client import ForkServerClient
from ringmaster.techniques.processes.gang import was_killed
from ringmaster.techniques.processes.order import Slot
from ringmaster.techniques.technique import GangShape
from ringmaster.text import Notice

PREFLIGHT_TARGET = "ringmaster.techniques.estimates.job_preflight:main"
# The attempts of a trial, or of a job's preflight, that is killed from outside.
MAX_ATTEMPTS = 3
ReportFailure = Callable[[str, str], None]
"""Takes the name of a job that cannot be trained, and the cause, as soon as it is known."""


@dataclass(frozen=True, kw_only=True)
class GangEnvironment:
    """The environment of trials and segments: fork server, the devices of one node, and the folders of workers.

    weights: the folders of models that jobs adapt, by the keys of `PreflightOrder.weights`.
    preflight_ahead: a preflight that was begun before the run was opened.
    """

    server: ForkServerClient
    devices: tuple[Device, ...]
    cache_dir: Path
    import_paths: tuple[str, ...] = ()
    weights: Mapping[str, Path] = field(default_factory=dict)
    preflight_ahead: PreflightAhead | None = None


def slots_of(devices: Sequence[Device]) -> tuple[Slot, ...]:
    """Converts devices into the form that workers use."""
    return tuple(
        Slot(kind=d.kind, index=d.index, uuid=d.uuid, cores=d.cores, memory_bytes=d.memory_bytes) for d in devices
    )


def gang_shape(devices: Sequence[Device]) -> GangShape:
    """Converts devices of one node into the form that techniques use."""
    return GangShape(kind=devices[0].kind, num_devices=len(devices), memory_bytes=min(d.memory_bytes for d in devices))


def ignore_failure(job: str, why: str) -> None:
    """Ignores the failure of a job; the caller reads it from the faults."""


def preflight_jobs(
    jobs: Sequence[Job],
    *,
    environment: GangEnvironment,
    cluster: Cluster,
    notice: Notice,
    shapes: Sequence[GangShape] | None = None,
    evaluated: Sequence[str] = (),
    failed: ReportFailure = ignore_failure,
) -> tuple[dict[str, Preflight], dict[str, str]]:
    """Prepares data and estimates memory in worker processes; returns preflights and faults, by job name.

    Jobs that no preflight can distinguish, such as those of a grid of learning rates and seeds, have one.
    One process handles all jobs. If a job ends the process, another process continues with the jobs after that one.

    shapes: the shapes of gangs; by default the first n devices of one node, for every n.
    evaluated: the names of jobs whose data is only evaluated on.
    """
    order = preflight_order(jobs, environment=environment, cluster=cluster, shapes=shapes, evaluated=evaluated)
    if environment.preflight_ahead is not None:
        ahead = environment.preflight_ahead.result(order, notice=notice, failed=failed)
        if ahead is not None:
            return ahead
    return run_preflight(order, server=environment.server, notice=notice, failed=failed)


def preflight_order(
    jobs: Sequence[Job],
    *,
    environment: GangEnvironment,
    cluster: Cluster,
    shapes: Sequence[GangShape] | None = None,
    evaluated: Sequence[str] = (),
) -> PreflightOrder:
    """Returns the order for the preflight of jobs on one node; the arguments are those of `preflight_jobs`."""
    node = cluster.nodes[0]
    return PreflightOrder(
        jobs=tuple(jobs),
        shapes=tuple(shapes or (gang_shape(node.devices[:n]) for n in range(1, len(node.devices) + 1))),
        techniques=registry.dotted_paths(),
        cache_dir=str(environment.cache_dir),
        cores=tuple(sorted({core for device in node.devices for core in device.cores})),
        import_paths=environment.import_paths,
        weights={name: str(folder) for name, folder in environment.weights.items()},
        evaluated=tuple(evaluated),
        slots=slots_of(node.devices),
    )


class PreflightAhead:
    """A preflight that runs in a thread while the run of its batch is still being opened.

    notice: shows progress until the result is requested; it can be replaced meanwhile.
    """

    def __init__(self, order: PreflightOrder, *, server: ForkServerClient, notice: Notice) -> None:
        self._order, self._server, self.notice = order, server, notice
        self._result: tuple[dict[str, Preflight], dict[str, str]] | None = None
        self._thread = threading.Thread(target=self._run, name="preflight", daemon=True)
        self._thread.start()

    def result(
        self, order: PreflightOrder, *, notice: Notice, failed: ReportFailure
    ) -> tuple[dict[str, Preflight], dict[str, str]] | None:
        """Waits for the result of `order`; None where another one was carried out, or where that was not possible."""
        if order != self._order:
            return None
        self.notice = notice
        self._thread.join()
        for job, why in (self._result or ({}, {}))[1].items():
            failed(job, why)
        return self._result

    def _run(self) -> None:
        with suppress(OSError, RuntimeError):  # whoever needs the result carries the order out, and gets the error
            self._result = run_preflight(self._order, server=self._server, notice=lambda text: self.notice(text))


def run_preflight(
    order: PreflightOrder, *, server: ForkServerClient, notice: Notice, failed: ReportFailure = ignore_failure
) -> tuple[dict[str, Preflight], dict[str, str]]:
    """Carries out a preflight order in worker processes; returns preflights and faults, by job name."""
    Path(order.cache_dir).mkdir(parents=True, exist_ok=True)
    preflights: dict[str, Preflight] = {}
    faults: dict[str, str] = {}
    alike: dict[tuple[str, bool], list[str]] = {}
    for each in order.jobs:
        key = preflight_key(each, weights=order.weights), each.name in order.evaluated
        alike.setdefault(key, []).append(each.name)
    names_of = {names[0]: names for names in alike.values()}  # by the job whose preflight is that of all of them

    def fail(job: str, why: str) -> None:
        faults[job] = why
        failed(job, why)

    def fail_all(first: str, why: str) -> None:
        for name in names_of[first]:
            fail(name, why)

    num_kills = Counter[str]()
    for own_server, left in _by_server(order, names_of, server=server, notice=notice, fail=fail_all):
        while left:
            part = replace(order, jobs=tuple(left))
            status = _preflight(part, preflights, fail_all, names_of=names_of, server=own_server, notice=notice)
            left = [job for job in left if job.name not in preflights and job.name not in faults]
            if left:
                num_kills[left[0].name] += was_killed(status)
                if not was_killed(status) or num_kills[left[0].name] == MAX_ATTEMPTS:
                    fail_all(left.pop(0).name, f"the process of its preflight {_how_it_ended(status)}")
    preflights = {
        name: replace(preflights[first], job=name)
        for first, names in names_of.items()
        if first in preflights
        for name in names
    }
    for name, why in _foreign_tokens(order.jobs, preflights):
        del preflights[name]
        fail(name, why)
    return preflights, faults


def _by_server(
    order: PreflightOrder, names: Collection[str], *, server: ForkServerClient, notice: Notice, fail: ReportFailure
) -> Iterable[tuple[ForkServerClient, list[Job]]]:
    """Returns the jobs with these names by the server of their Python; those without a Python fail."""
    result: dict[int, tuple[ForkServerClient, list[Job]]] = {}
    for job in order.jobs:
        if job.name not in names:
            continue
        own = server
        if job.runs_elsewhere:
            notice(f"preparing the environment of {job.name}")
            try:
                own = server.server_for(job, cache_dir=order.cache_dir)
                if own is not server:
                    own.start()
            except (InterpreterError, ForkServerError) as error:
                fail(job.name, str(error))
                continue
        result.setdefault(id(own), (own, []))[1].append(job)
    return result.values()


@dataclass(frozen=True, kw_only=True)
class EquivalentJobs:
    """Jobs of which a preflight has found the same. preflight: without the options, whose times may change."""

    names: tuple[str, ...]
    preflight: Preflight


def distinct(preflights: Mapping[str, Preflight]) -> list[EquivalentJobs]:
    """Returns each distinct result of a preflight with its jobs."""
    names: dict[int, list[str]] = {}
    for name, preflight in preflights.items():
        names.setdefault(id(preflight.facts), []).append(name)
    return [
        EquivalentJobs(names=tuple(alike), preflight=replace(preflights[alike[0]], candidates=()))
        for alike in names.values()
    ]


def preflight_key(job: Job, *, weights: Mapping[str, str]) -> str:
    """Returns a key that is equal for jobs of which a preflight finds the same.

    All of the job counts that has an effect on a step, but not the sizes of numbers that only scale it: of a clipped
    gradient, of a weight decay, of a LoRA's product. The data counts by its spec: the same path at two moments is one
    preflight, two paths are two.

    weights: the folders of models that jobs adapt, as in `PreflightOrder.weights`.
    """
    adapter, optimizer = job.adapter, job.optimizer
    if adapter is not None:
        adapter = replace(adapter, alpha=Adapter.alpha)
    decay = optimizer.options.get("weight_decay")
    if isinstance(decay, float) and 0 < decay < math.inf:  # else the optimizer may refuse it
        optimizer = replace(optimizer, options={**optimizer.options, "weight_decay": 1.0})
    job_spec = replace(job, adapter=adapter, optimizer=optimizer, clip_grad_norm=job.clip_grad_norm and 1.0)
    base = job.base and weights.get(job.name, "a job of the batch")
    return digest([job_spec.fields_with(Effect.STEP), job.trains, base], length=32)


def _foreign_tokens(jobs: Sequence[Job], preflights: Mapping[str, Preflight]) -> list[tuple[str, str]]:
    """Returns the jobs whose base, another job of the batch, reads text by another tokenizer, and why they cannot
    train."""

    def tokenizer(name: str) -> Path | None:
        return from_json(PreparedData, preflights[name].data).tokenizer_dir

    why = (
        "model: its base {} is trained with another tokenizer than its own data's. To fix: set data.tokenizer of both "
        "jobs to one folder or hub name"
    )
    return [
        (job.name, why.format(job.base))
        for job in jobs
        if job.base is not None and job.base in preflights and job.name in preflights
        if have_other_tokens(tokenizer(job.base), tokenizer(job.name))
    ]


def _how_it_ended(status: int | None) -> str:
    if was_killed(status):
        return f"was killed {MAX_ATTEMPTS} times: the machine may have too little memory for the model"
    return f"ended with status {status}"


def _preflight(
    order: PreflightOrder,
    preflights: dict[str, Preflight],
    fail: ReportFailure,
    *,
    names_of: Mapping[str, Sequence[str]],
    server: ForkServerClient,
    notice: Notice,
) -> int | None:
    """Inspects jobs in order in one worker process; returns its exit status, None if it vanished."""
    log = Path(order.cache_dir) / "preflight.log"
    channel = server.spawn(target=PREFLIGHT_TARGET, argument=to_json(order), log=log)
    try:
        while True:
            match gang_events.event_from_json(channel.receive()):
                case gang_events.PreflightStarted(job=str(job)):
                    num_done = sum(len(names) for name, names in names_of.items() if name in preflights)
                    num_jobs = sum(map(len, names_of.values()))
                    notice(f"in preflight: {_few(names_of[job])} (done: {num_done} of {num_jobs} jobs)")
                case gang_events.DataProgress(job=job, progress=progress):
                    notice(f"{job}: data: {progress}")
                case gang_events.PreflightDone(preflight=preflight):
                    preflights[preflight.job] = preflight
                case gang_events.PreflightFailed(job=str(job), message=message):
                    fail(job, message)
                case gang_events.RankExited(status=status):
                    return status
    except ChannelClosed:  # the fork server itself has ended; the next call starts another one
        return None
    finally:
        channel.close()


def data_lines(jobs: Sequence[Job], preflights: Mapping[str, Preflight]) -> list[str]:
    """Returns a line for each data set of files or of Hugging Face, with the jobs that read it."""
    readers: dict[str, list[str]] = {}
    for job in jobs:
        is_shown = job.data.kind is not None or job.data.path is not None or job.data.dataset is not None
        if job.name in preflights and is_shown:
            data = from_json(PreparedData, preflights[job.name].data)
            readers.setdefault(
                data.summary(job.data.kind or (LANGUAGE_MODELING if data.kind == "tokens" else "columns")), []
            ).append(job.name)
    return [f"{_few(names)}: {line}" for line, names in readers.items()]


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def resolve_steps(job: Job, preflight: Preflight) -> Job:
    """Returns the job with its epochs converted into steps, and with its chunk."""
    job = preflight.settled(job)
    if job.num_steps is not None:
        return job
    assert job.num_epochs is not None
    num_steps = round(job.num_epochs * preflight.data["num_samples"] / job.global_batch_size)
    return replace(job, num_steps=max(num_steps, 1), num_epochs=None)
