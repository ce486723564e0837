"""Starts the segments that may start: leases their devices, writes them down, gives the order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.course import Course
from ringmaster.tasks.execution.dispatch import DeviceId, PlannedSegment, device_of
from ringmaster.tasks.execution.events import ExecutionEvent, SegmentStarted, Waiting
from ringmaster.tasks.execution.journal import LEADER, RUNNING, SegmentRecord
from ringmaster.tasks.execution.orders import SegmentCall, Submit, called, gang_folder, gang_order
from ringmaster.tasks.execution.progress import RunningSegment
from ringmaster.tasks.execution.roster import Roster
from ringmaster.techniques import Profile
from ringmaster.techniques.engine.gang import Event, Outcome
from ringmaster.techniques.engine.order import GangOrder
from ringmaster.techniques.turns import steps_taken

LEASE_RETRY_S = 1.0  # other processes give devices back without telling us


class Leases(Protocol):
    """A ledger of devices, named "node:kind:number": each serves one holder at a time."""

    def take(self, devices: Sequence[str], *, holder: str) -> bool:
        """Leases all of them, or none; returns which."""

    def give_back(self, devices: Sequence[str]) -> None:
        """Ends leases."""

    def held(self) -> dict[str, str]:
        """The holder of each device that is leased."""


class Starter:
    """Starts segments for one executor, whose thread calls it.

    post: takes what a segment's gang says, and at last its outcome, by the segment's number. held_nodes, vacated: where
    nothing new starts.
    """

    def __init__(
        self,
        roster: Roster,
        course: Course,
        *,
        leases: Leases,
        holder: str,
        submit: Submit,
        post: Callable[[int, Event | Future[Outcome]], None],
        clock: Callable[[], float],
    ) -> None:
        self._roster, self._course, self._leases, self._holder = roster, course, leases, holder
        self._submit, self._post, self._clock = submit, post, clock
        self.held_nodes: set[str] = set()
        self.vacated: set[DeviceId] = set()
        self._not_before_s: dict[str, float] = {}
        self._waited_for: set[str] = set()

    def hold_back(self, job: str, seconds: float) -> None:
        """Keeps a job from starting for a while."""
        self._not_before_s[job] = self._clock() + seconds

    def start_what_can(self, cluster: Cluster, *, tell: Callable[[ExecutionEvent], None]) -> float:
        """Starts every segment that may; returns seconds until there may be more to start without any news."""
        now_s = self._clock()
        self._not_before_s = {job: at_s for job, at_s in self._not_before_s.items() if at_s > now_s}
        again_s = min(self._not_before_s.values(), default=math.inf) - now_s
        lease_names = cluster.lease_names()
        holders: set[str] = set()
        for segment in self._startable():
            names = tuple(lease_names[device] for device in segment.devices)
            if self._leases.take(names, holder=self._holder):
                self._start(segment, cluster=cluster, names=names, tell=tell)
            else:
                held = self._leases.held()
                holders |= {held[name] for name in names if name in held}
                again_s = min(again_s, LEASE_RETRY_S)
        if holders and holders != self._waited_for:
            tell(Waiting(holders=tuple(sorted(holders))))
        self._waited_for = holders
        return again_s

    def awaited(self) -> set[DeviceId]:
        """The devices of the segments that may start."""
        return {device for segment in self._startable() for device in segment.devices}

    def watch(
        self,
        number: int,
        segment: PlannedSegment,
        profile: Profile,
        *,
        names: tuple[str, ...],
        first_step: int,
        beside: Mapping[str, int] | None = None,
    ) -> None:
        """Has a segment among those that run."""
        folder = gang_folder(self._roster.place_of(segment.job), number=number, job=self._local(segment.job))
        self._course.running[number] = RunningSegment(
            segment,
            profile,
            names,
            first_step,
            folder=str(folder),
            ordered_step=segment.last_step,
            step=first_step,
            beside=beside or {},
        )

    def _startable(self) -> list[PlannedSegment]:
        steps = {name: record.step for name, record in self._roster.records.items()}
        found = self._course.startable(done_jobs=self._roster.done(), steps=steps)
        return [
            segment
            for segment in found
            if segment.job not in self._not_before_s
            and self.vacated.isdisjoint(segment.devices)
            and self.held_nodes.isdisjoint(node for node, _ in segment.devices)
        ]

    def _start(
        self,
        segment: PlannedSegment,
        *,
        cluster: Cluster,
        names: tuple[str, ...],
        tell: Callable[[ExecutionEvent], None],
    ) -> None:
        job = segment.job
        profile = self._roster.profiles[job][segment.option]
        first_step = self._roster.records[job].step
        fellows = self._fellows(segment)
        beside = {name: self._roster.records[name].step for name in fellows}
        what = _what(segment, profile, names=names, first_step=first_step)
        if fellows:
            what["fellows"] = {self._local(name): step for name, step in beside.items()}
        number = self._roster.journal.start_segment(job, what)
        self._roster.write(job, status=RUNNING)
        for name in fellows:
            self._roster.write(name, status=RUNNING, details={LEADER: self._local(job)})
        self._course.planned.remove(segment)
        self.watch(number, segment, profile, names=names, first_step=first_step, beside=beside)
        tell(
            SegmentStarted(
                number=number,
                segment=segment,
                technique=profile.technique,
                num_devices=profile.num_devices,
                first_step=first_step,
                attempt=self._roster.attempts.get(job, 0) + 1,
                fellows=tuple(fellows),
            )
        )
        call = SegmentCall(
            label=f"{called(job, fellows)} [{profile.technique} x{profile.num_devices}]"
            f" steps {first_step}-{segment.last_step}",
            order=self._order(segment, profile, cluster=cluster, number=number, fellows=fellows),
            num_ranks=profile.num_ranks,
            on_event=lambda event: self._post(number, event),
            number=number,
            job=job,
            batch=self._roster.entries[job].batch,
            devices=segment.devices,
        )
        self._submit(call).add_done_callback(lambda future: self._post(number, future))

    def _local(self, job: str) -> str:
        """What a job is called within its batch."""
        return self._roster.entries[job].local_job.name

    def _fellows(self, segment: PlannedSegment) -> dict[str, int]:
        """Up to which step each fellow that has anything left is trained: as far as it comes while the leader takes its
        steps, or to its end. Without those whose turn does not come.
        """
        leader, roster = segment.job, self._roster
        fellows = [name for name in roster.groups.fellows(leader) if not roster.rests(name)]
        left = {name: max(0, roster.totals[name] - roster.records[name].step) for name in (leader, *fellows)}
        if segment.last_step >= roster.totals[leader]:
            return {name: roster.totals[name] for name in fellows}
        num_steps = segment.last_step - roster.records[leader].step
        at_once = roster.profiles[leader][segment.option].at_once
        taken = dict(zip(left, steps_taken(list(left.values()), at_once=at_once, after=num_steps), strict=True))
        return {name: roster.records[name].step + taken[name] for name in fellows if taken[name] or not left[name]}

    def _order(
        self,
        segment: PlannedSegment,
        profile: Profile,
        *,
        cluster: Cluster,
        number: int,
        fellows: Mapping[str, int],
    ) -> GangOrder:
        devices = [cluster.device(*device) for device in segment.devices]

        def order_of(job: str, last_step: int) -> GangOrder:
            entries, parents = self._roster.entries, self._roster.after.get(job, ())
            order = gang_order(
                entries[job].local_job,
                replace(segment, job=job, last_step=last_step),
                profile,
                place=entries[job].place,
                devices=devices,
                number=number,
                listed={entries[parent].local_job.name for parent in parents},
            )
            return replace(order, known_step=self._roster.records[job].step)

        order = order_of(segment.job, segment.last_step)
        return replace(order, fellows=tuple(order_of(name, end) for name, end in fellows.items()))


def _what(segment: PlannedSegment, profile: Profile, *, names: tuple[str, ...], first_step: int) -> dict[str, Any]:
    """What the journal keeps of a segment: enough to go on with it."""
    return {
        "technique": profile.technique,
        "config": dict(profile.config),
        "num_devices": profile.num_devices,
        "device_type": profile.device_type,
        "num_nodes": profile.num_nodes,
        "devices": list(names),
        "first_step": first_step,
        "last_step": segment.last_step,
        "planned_s": [segment.start_s, segment.end_s],
    }


def is_known(record: SegmentRecord, *, profiles: Sequence[Profile]) -> bool:
    """Whether a segment ran under one of these options."""
    return bool(_options(record, profiles))


def segment_of(record: SegmentRecord, *, profiles: Sequence[Profile]) -> PlannedSegment:
    """The segment that the journal tells of, by the options that are known now; its devices may be gone."""
    what, options = record.what, _options(record, profiles)
    assert options, f"segment {record.id} of {record.job} ran under an option that is not known: {what}"
    return PlannedSegment(
        job=record.job,
        option=options[0],
        last_step=what["last_step"],
        devices=tuple(device_of(name) for name in what["devices"]),
        start_s=what["planned_s"][0],
        end_s=what["planned_s"][1],
    )


def _options(record: SegmentRecord, profiles: Sequence[Profile]) -> list[int]:
    """The numbers of the options that are what a segment ran under."""
    what = record.what
    kind = (what.get("device_type", ""), what.get("num_nodes", 1))
    wanted = (what["technique"], dict(what["config"]), what["num_devices"], *kind)
    known = [(p.technique, dict(p.config), p.num_devices, p.device_type, p.num_nodes) for p in profiles]
    return [k for k, option in enumerate(known) if option == wanted]
