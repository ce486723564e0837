"""The start of segments: leases their devices, writes them into the journal and starts them on an engine."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ringmaster.tasks.cluster import Cluster, Device
from ringmaster.tasks.execution.dispatch import DeviceId, PlannedSegment, device_of
from ringmaster.tasks.execution.engine import Engine, SegmentCall
from ringmaster.tasks.execution.execution_events import DeviceWait, ExecutionEvent, SegmentStarted
from ringmaster.tasks.execution.job_rules import job_rules
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.progress import PlanProgress, RunningSegment
from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.profiling.preflight_runs import slots_of
from ringmaster.tasks.storage.journal import JobStatus, SegmentRecord, SegmentSpec
from ringmaster.techniques import Job, Profile, registry
from ringmaster.techniques.processes.gang_events import Event, Outcome
from ringmaster.techniques.processes.order import TRAIN, GangOrder
from ringmaster.techniques.profiles import MEASURED
from ringmaster.techniques.training.fused.group_requirements import steps_taken

MAX_OVERHEAD = 0.02  # the largest share of the time that saving may take
MEAN_TIME_BETWEEN_FAILURES_S = 24 * 3600.0  # a device's

LEASE_RETRY_S = 1.0  # other processes return devices without notice

OptionKey = tuple[str, str, int, str, int]


def checkpoint_interval_s(stall_s: float, *, num_devices: int, mtbf_s: float = MEAN_TIME_BETWEEN_FAILURES_S) -> float:
    """Returns the seconds of training between checkpoints that minimize the expected loss of time.

    C = `stall_s` is the time for which writing a checkpoint in the background holds up training. M = `mtbf_s` /
    `num_devices` is the gang's mean time between failures, as the failure of any device ends the gang. The first-order
    optimum is sqrt(2 C M) (Young, CACM 1974; Daly, FGCS 2006). The interval is never so short that saving takes more
    than 2 % of the time.
    """
    optimum_s = math.sqrt(2 * stall_s * mtbf_s / num_devices)
    return max(optimum_s, stall_s / MAX_OVERHEAD)


class Leases(Protocol):
    """The register of leases of devices, named "node:kind:number". Each device has at most one holder at a time."""

    def take_each(self, gangs: Sequence[Sequence[str]], *, holder: str) -> list[bool]:
        """Leases, for each gang, all of its devices or none. Returns for which it did."""

    def give_back(self, devices: Sequence[str]) -> None:
        """Ends leases."""

    def held(self) -> dict[str, str]:
        """Returns the holder of each leased device."""


class Starter:
    """Starts segments for one executor, on whose thread all methods are called.

    leases, holder: the register of leases, and the name under which the executor leases them.
    engine: runs the segments.
    post: receives the events of a segment's gang, and at last its outcome, by the segment's number.
    notify: receives execution events.
    held_nodes, vacated: nodes and devices on which no segment starts.
    outcome_of: adds to the outcome of a running segment, by its number, what features need.
    """

    def __init__(
        self,
        job_table: JobTable,
        plan_progress: PlanProgress,
        *,
        leases: Leases,
        holder: str,
        engine: Engine,
        post: Callable[[int, Event | Future[Outcome]], None],
        notify: Callable[[ExecutionEvent], None],
        clock: Callable[[], float],
        outcome_of: Callable[[int, Future[Outcome]], Future[Outcome]],
    ) -> None:
        self._outcome_of = outcome_of
        self._job_table, self._plan_progress, self._leases, self._holder = job_table, plan_progress, leases, holder
        self._engine, self._post, self._notify, self._clock = engine, post, notify, clock
        self.held_nodes: set[str] = set()
        self.vacated: set[DeviceId] = set()
        self._not_before_s: dict[str, float] = {}
        self._waited_for: set[str] = set()

    def hold_back(self, job: str, seconds: float) -> None:
        """Keeps a job from starting for some seconds."""
        self._not_before_s[job] = self._clock() + seconds

    def start_what_can(self, cluster: Cluster, *, out: Collection[DeviceId] = ()) -> float:
        """Starts all segments that may start. Returns the seconds until a retry may start more.

        out: devices of `cluster` that must not be used.
        """
        self._plan_progress.drop_passed({name: record.step for name, record in self._job_table.records.items()})
        now_s = self._clock()
        self._not_before_s = {job: at_s for job, at_s in self._not_before_s.items() if at_s > now_s}
        again_s = min(self._not_before_s.values(), default=math.inf) - now_s
        again_s = min(again_s, self._plan_progress.seconds_to_wait())
        startable, holders = self._startable(), set[str]()
        if self._move_apart(startable, cluster, out=out):
            startable = self._startable()
        if startable:
            lease_names = cluster.lease_names()
            gangs = [tuple(lease_names[device] for device in segment.devices) for segment in startable]
            are_taken = self._leases.take_each(gangs, holder=self._holder)
            attempts = list(zip(startable, gangs, are_taken, strict=True))
            for call in self._begin([(s, names) for s, names, is_taken in attempts if is_taken], cluster):
                future = self._outcome_of(call.number, self._engine.start(call))
                future.add_done_callback(partial(self._post, call.number))
            if missing := {name for _, names, is_taken in attempts if not is_taken for name in names}:
                held = self._leases.held()
                if self._exchange(held, cluster, out=out):
                    return 0.0
                holders = {holder for name, holder in held.items() if name in missing}
                again_s = min(again_s, LEASE_RETRY_S)
        if holders and holders != self._waited_for:
            self._notify(DeviceWait(holders=tuple(sorted(holders))))
        self._waited_for = holders
        return again_s

    def _move_apart(self, startable: Sequence[PlannedSegment], cluster: Cluster, *, out: Collection[DeviceId]) -> bool:
        """Plans segments for others than the nodes on which their jobs must not run; returns whether it has."""
        has_changed = False
        for segment in startable:
            record = self._job_table.records[segment.job]
            barred = {node for rule in job_rules() for node in rule.barred_nodes(record)}
            if segment.devices[0][0] not in barred:
                continue
            kind = cluster.device(*segment.devices[0]).device_kind()
            for node in cluster.nodes:
                devices = [(node.name, k) for k, each in enumerate(node.devices) if each.device_kind() == kind]
                usable = [each for each in devices if each not in out and node.name not in self.held_nodes]
                if node.name not in barred and len(usable) >= len(segment.devices):
                    self._plan_progress.exchange(dict(zip(segment.devices, usable, strict=False)))
                    has_changed = True
                    break
        return has_changed

    def _exchange(self, held: Mapping[str, str], cluster: Cluster, *, out: Collection[DeviceId]) -> bool:
        """Plans what waits for devices that another process holds for idle ones of the same kind and node.

        held: the holders of the leased devices, by name.

        Returns whether a segment may start now that could not before.
        """
        lease_names, startable, has_changed = cluster.lease_names(), self._startable(), False
        running = (running.segment for running in self._plan_progress.running.values())
        taken = {device for segment in (*running, *startable) for device in segment.devices} | {*out} | self.vacated
        idle = [
            device
            for device, name in lease_names.items()
            if name not in held and device not in taken and device[0] not in self.held_nodes
        ]
        for segment in startable:
            pairs: dict[DeviceId, DeviceId] = {}
            lacking = [device for device in segment.devices if lease_names[device] in held]
            for device in lacking:
                wanted_kind = (device[0], cluster.device(*device).device_kind())
                alike = (each for each in idle if (each[0], cluster.device(*each).device_kind()) == wanted_kind)
                if (replacement := next(alike, None)) is not None:
                    pairs[device] = replacement
                    idle.remove(replacement)
            if lacking and len(pairs) == len(lacking):
                self._plan_progress.exchange(pairs)
                has_changed = True
            else:
                idle += pairs.values()
        return has_changed

    def awaited(self) -> set[DeviceId]:
        """Returns the devices of the segments that may start."""
        return {device for segment in self._startable() for device in segment.devices}

    def add_running(
        self,
        number: int,
        segment: PlannedSegment,
        profile: Profile,
        *,
        names: tuple[str, ...],
        first_step: int,
        first_steps: Mapping[str, int] | None = None,
    ) -> None:
        """Adds a segment to the running ones."""
        ordered_step = segment.last_step
        for rule in job_rules():
            job = self._job_table.entries[segment.job].job
            ordered_step = rule.last_step(job, profile, first_step=first_step, last_step=ordered_step)
        self._plan_progress.running[number] = RunningSegment(
            segment,
            profile,
            names,
            first_step,
            number=number,
            ordered_step=ordered_step,
            step=first_step,
            first_steps=first_steps or {},
        )

    def _startable(self) -> list[PlannedSegment]:
        return [
            segment
            for segment in self._plan_progress.startable(done_jobs=self._job_table.done())
            if segment.job not in self._not_before_s
            and self.vacated.isdisjoint(segment.devices)
            and self.held_nodes.isdisjoint(node for node, _ in segment.devices)
        ]

    def _begin(
        self,
        leased: Sequence[tuple[PlannedSegment, tuple[str, ...]]],
        cluster: Cluster,
    ) -> list[SegmentCall]:
        """Records the start of segments with the names of their leases, and returns the calls that start them."""
        if not leased:
            return []
        starts = [(segment, names, self._members(segment)) for segment, names in leased]
        numbers = self._job_table.journal.start_segments(
            [(segment.job, self._spec(segment, names, members, cluster)) for segment, names, members in starts]
        )
        changes: dict[str, dict[str, Any]] = {}
        for segment, _, members in starts:
            led = {"status": JobStatus.RUNNING, "lead_job": self._local(segment.job)}
            changes |= {segment.job: {"status": JobStatus.RUNNING}, **dict.fromkeys(members, led)}
        self._job_table.write_all(changes)
        self._job_table.groups.note_started(changes)
        self._plan_progress.remove_started([segment for segment, _ in leased])
        return [
            self._call(number, segment, cluster=cluster, names=names, members=members)
            for number, (segment, names, members) in zip(numbers, starts, strict=True)
        ]

    def _call(
        self,
        number: int,
        segment: PlannedSegment,
        *,
        cluster: Cluster,
        names: tuple[str, ...],
        members: Mapping[str, int],
    ) -> SegmentCall:
        """Adds a segment whose start is recorded to the running ones, reports it, and returns the call."""
        job = segment.job
        profile = self._job_table.profiles[job][segment.option]
        first_step = self._job_table.records[job].step
        first_steps = {name: self._job_table.records[name].step for name in members}
        self.add_running(number, segment, profile, names=names, first_step=first_step, first_steps=first_steps)
        self._notify(
            SegmentStarted(
                number=number,
                segment=segment,
                technique=profile.technique,
                num_devices=profile.num_devices,
                first_step=first_step,
                attempt=self._job_table.attempts.get(job, 0) + 1,
                members=tuple(members),
                num_steps=tuple(self._job_table.totals[name] for name in (job, *members)),
                predicted_bytes=_comparable_bytes(profile, segment, cluster),
            )
        )
        devices = [cluster.device(*device) for device in segment.devices]
        last_steps = {job: self._plan_progress.running[number].ordered_step, **members}
        order, *of_members = [
            self._gang_order(replace(segment, job=name, last_step=last_step), profile, devices, number=number)
            for name, last_step in last_steps.items()
        ]
        return SegmentCall(
            label=f"{label_of(job, members)} [{profile.technique} x{profile.num_devices}]"
            f" steps {first_step}-{segment.last_step}",
            order=replace(order, members=tuple(of_members)),
            num_ranks=profile.num_ranks,
            on_event=partial(self._post, number),
            number=number,
            job=job,
            batch=self._job_table.entries[job].batch,
            devices=segment.devices,
        )

    def _spec(
        self, segment: PlannedSegment, names: tuple[str, ...], members: Collection[str], cluster: Cluster
    ) -> SegmentSpec:
        records, profile = self._job_table.records, self._job_table.profiles[segment.job][segment.option]
        return SegmentSpec(
            technique=profile.technique,
            config=profile.config,
            num_devices=profile.num_devices,
            device_type=profile.device_type,
            num_nodes=profile.num_nodes,
            devices=names,
            first_step=records[segment.job].step,
            last_step=segment.last_step,
            planned_s=(segment.start_s, segment.end_s),
            predicted_bytes=_comparable_bytes(profile, segment, cluster),
            members={self._local(name): records[name].step for name in members},
        )

    def _local(self, job: str) -> str:
        """Returns the name of a job within its batch."""
        return self._job_table.entries[job].job_in_batch.name

    def _members(self, segment: PlannedSegment) -> dict[str, int]:
        """Returns the step up to which each member is trained by a segment.

        If the segment reaches the lead job's goal, members are trained completely. Else a member advances as far
        as it comes while the lead job takes its steps; members whose turn does not come are omitted.
        """
        lead, job_table = segment.job, self._job_table
        members = [name for name in job_table.groups.members(lead) if not job_table.rests(name)]
        left = {name: max(0, job_table.totals[name] - job_table.records[name].step) for name in (lead, *members)}
        if segment.last_step >= job_table.totals[lead]:
            return {name: job_table.totals[name] for name in members}
        num_steps = segment.last_step - job_table.records[lead].step
        at_once = job_table.profiles[lead][segment.option].at_once
        taken = dict(zip(left, steps_taken(list(left.values()), at_once=at_once, after=num_steps), strict=True))
        return {name: job_table.records[name].step + taken[name] for name in members if taken[name] or not left[name]}

    def _below(self, job: str) -> Iterator[str]:
        """Yields the jobs whose models the adapter of a job is on, down to a whole model."""
        if self._job_table.entries[job].job_in_batch.adapter is not None:
            for base in self._job_table.after.get(job, ()):
                yield base
                yield from self._below(base)

    def _gang_order(
        self, segment: PlannedSegment, profile: Profile, devices: Sequence[Device], *, number: int
    ) -> GangOrder:
        """Returns the order to train the job of a segment, without the members of its group."""
        entry, parents = self._job_table.entries[segment.job], self._job_table.after.get(segment.job, ())
        order = gang_order(
            entry.job_in_batch,
            segment,
            profile,
            paths=entry.paths,
            devices=devices,
            number=number,
            listed={self._local(parent) for parent in parents},
            below={self._local(each) for parent in parents for each in self._below(parent)},
        )
        record = self._job_table.records[segment.job]
        for rule in job_rules():
            order = rule.order(entry.job, record, order)
        return replace(order, known_step=record.step)


def option_key(profile: Profile) -> OptionKey:
    """Returns the identity of a job's option, which is the same in every process."""
    config = str(sorted(profile.config.items()))
    return profile.technique, config, profile.num_devices, profile.device_type, profile.num_nodes


def option_key_of(record: SegmentRecord) -> OptionKey:
    """Returns the `option_key` of the option that a segment ran under."""
    spec = record.spec
    return spec.technique, str(sorted(spec.config.items())), spec.num_devices, spec.device_type, spec.num_nodes


def is_known(record: SegmentRecord, *, profiles: Iterable[Profile]) -> bool:
    """Whether a segment ran under one of these options."""
    return option_key_of(record) in map(option_key, profiles)


def segment_of(record: SegmentRecord, *, profiles: Sequence[Profile]) -> PlannedSegment:
    """Returns the segment of a journal record, with its option number among `profiles`, else 0.

    Its devices may be gone.
    """
    keys = [option_key(profile) for profile in profiles]
    return PlannedSegment(
        job=record.job,
        option=keys.index(option_key_of(record)) if option_key_of(record) in keys else 0,
        last_step=record.spec.last_step,
        devices=tuple(device_of(name) for name in record.spec.devices),
        start_s=record.spec.planned_s[0],
        end_s=record.spec.planned_s[1],
    )


def gang_order(
    job: Job,
    segment: PlannedSegment,
    profile: Profile,
    *,
    paths: RunPaths,
    devices: Sequence[Device],
    number: int,
    listed: Collection[str] = (),
    below: Collection[str] = (),
) -> GangOrder:
    """Returns the order to train a job on a segment's devices under a profile.

    job, listed: by their names within the batch. `listed` holds those of the job's parents that are jobs of the batch.
    below: the jobs of the batch that make what those parents are adapters of.
    number: the segment's number in the journal.
    """
    parents = {name: paths.model_dir(name) if name in listed else paths.weights.get(name) for name in job.parents}
    if job.base is not None and parents[job.base] is None:
        parents[job.base] = paths.weights.get(job.name)
    weights, store = parents[job.base] if job.base is not None else None, job.data.store
    start = "" if job.started_from is None else job.started_from.checkpoints
    urls = {
        str(folder): paths.model_url(name) if name in listed else paths.weights_url(folder)
        for name, folder in parents.items()
        if folder
    } | {str(paths.model_dir(name)): paths.model_url(name) for name in below}
    stall_s = profile.save_s if profile.stall_s is None else profile.stall_s
    every_s = paths.checkpoint_every_s or checkpoint_interval_s(stall_s, num_devices=profile.num_devices)
    return GangOrder(
        purpose=TRAIN,
        job=job,
        technique=registry.dotted_path(profile.technique),
        config=profile.config,
        slots=slots_of(devices),
        folder=str(paths.folder / "gangs" / f"{number:04d}-{job.name}"),
        cache_dir=str(paths.cache_dir),
        # What the preflight prepared of a store that was not made yet is not what the job reads.
        data=None if store in listed else paths.data.get(job.name),
        checkpoint_dir=paths.checkpoint_dir(job),
        model_dir=str(paths.model_dir(job.name)),
        model_url=paths.model_url(job.name),
        model_urls={folder: url for folder, url in urls.items() if url},
        weights_from=str(weights) if weights else None,
        starts_from=paths.checkpoint_dir(replace(job, name=start)) if start in listed else None,
        # Only an adaptation reads its base among them, which others begin with.
        parents={name: str(p) for name, p in parents.items() if p and (job.adaptation is not None or name != job.base)},
        last_step=segment.last_step,
        checkpoint_every_s=every_s,
        keep_checkpoints=paths.keep_checkpoints,
        import_paths=paths.import_paths,
        ordered_at_s=time.monotonic(),
    )


def label_of(job: str, members: Collection[str]) -> str:
    """Returns a short name for a job and the members that are trained with it."""
    return f"{job} and {len(members)} more" if members else job


def _comparable_bytes(profile: Profile, segment: PlannedSegment, cluster: Cluster) -> int | None:
    """Returns the memory of a profile if the gang's reports can be compared with it.

    A prediction counts tensors. So does the allocator of a GPU, but a rank on CPU slots reports its process.
    """
    is_alike = profile.source == MEASURED or cluster.device(*segment.devices[0]).kind == "gpu"
    return profile.peak_bytes or None if is_alike else None
