"""Alarms: events of a batch, a pool or a model that Prefect's automations report to users."""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from ringmaster.tasks.planning.durations import seconds_text
from ringmaster.tasks.pool.nodes import NodeRecord, NodeStatus
from ringmaster.tasks.storage.journal import ENDED
from ringmaster.tasks.timeline.run_timeline import RunTimeline

BATCH_FAILED = "ringmaster.batch.failed"
DEADLINE_IN_DANGER = "ringmaster.deadline.in-danger"
DEVICE_LOST = "ringmaster.device.lost"
PROMOTION_REFUSED = "ringmaster.promotion.refused"
RETRAINING_FAILED = "ringmaster.retraining.failed"
EVENTS = (BATCH_FAILED, DEADLINE_IN_DANGER, DEVICE_LOST, PROMOTION_REFUSED, RETRAINING_FAILED)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """An event that a person should know of.

    event: one of EVENTS.
    resource: the permanent name of the object that is affected, such as "ringmaster.node.alpha".
    name: the same object's name for users.
    message: what happened, in one sentence.
    facts: the content of the message for programs.
    """

    event: str
    resource: str
    name: str
    message: str
    facts: Mapping[str, str | float] = field(default_factory=dict)


def batch_failed(batch: str, *, message: str) -> Alarm:
    """Returns the alarm for a batch with jobs that failed for good. message: the failed jobs and the causes."""
    return Alarm(
        event=BATCH_FAILED,
        resource=f"ringmaster.batch.{batch}",
        name=batch,
        message=f"batch {batch}: {message}",
        facts={"batch": batch},
    )


def promotion_refused(model: str, *, version: int | None, why: str, who: str = "") -> Alarm:
    """Returns the alarm for a version of a registered model that did not become its champion.

    who: the rule, policy or person that refused the promotion.
    """
    label = model if version is None else f"{model} version {version}"
    facts: dict[str, str | float] = {"model": model, "why": why, "who": who}
    return Alarm(
        event=PROMOTION_REFUSED,
        resource=f"ringmaster.model.{model}",
        name=model,
        message=f"{label} is not promoted: {why}",
        facts=facts if version is None else {**facts, "version": version},
    )


def retraining_failed(name: str, *, run_date: str, message: str) -> Alarm:
    """Returns the alarm for a retraining run with models that failed, or that was not performed.

    name: of the file of models. message: the failed models and the causes.
    """
    return Alarm(
        event=RETRAINING_FAILED,
        resource=f"ringmaster.retraining.{name}",
        name=name,
        message=f"retraining of {name}, {run_date}: {message}",
        facts={"retraining": name, "night": run_date},
    )


class NodeAlarms:
    """Compares successive states of a pool's registry: nodes that vanish, and devices that must no longer be used.

    A node whose worker ends in order, or was about to, raises no alarm.
    """

    def __init__(self) -> None:
        self._before: dict[str, NodeRecord] = {}

    def poll(self, records: Iterable[NodeRecord], *, left: Container[str] = ()) -> list[Alarm]:
        """Returns the alarms for nodes and devices that were lost since the last call.

        left: the incarnations whose workers have ended in order.
        """
        now = {record.name: record for record in records}
        result = [
            _node_lost(was)
            for name, was in self._before.items()
            if name not in now and was.status != NodeStatus.LEAVING and was.incarnation not in left
        ]
        for name, record in now.items():
            known = self._before[name].health if name in self._before else {}
            result += [_device_lost(record, number) for number in record.health if number not in known]
        self._before = now
        return result


class DeadlineAlarms:
    """Compares the timeline of a batch with its deadlines; raises one alarm per job that is forecast to end late.

    deadlines_s: the deadline of each job, in seconds from `started_s`.
    started_s: the start of the batch, in seconds since the epoch.
    """

    def __init__(self, batch: str, *, deadlines_s: Mapping[str, float], started_s: float) -> None:
        self._batch, self._deadlines_s, self._started_s = batch, deadlines_s, started_s
        self._reported: set[str] = set()

    def poll(self, run_timeline: RunTimeline) -> list[Alarm]:
        """Returns the alarms for jobs whose deadline came to be in danger since the last call."""
        result = []
        for line in run_timeline.jobs:
            job = line.name.rpartition("/")[2]
            deadline_s = self._deadlines_s.get(job)
            if deadline_s is None or line.ends_s is None or line.status in ENDED or job in self._reported:
                continue
            late_s = run_timeline.zero_s + line.ends_s - self._started_s - deadline_s
            if late_s > 0:
                self._reported.add(job)
                result.append(self._alarm(job, deadline_s=deadline_s, late_s=late_s))
        return result

    def report_late(self, run_timeline: RunTimeline, emit_alarm: Callable[[Alarm], None]) -> None:
        """Passes the alarms that `poll` returns to `emit_alarm`."""
        for alarm in self.poll(run_timeline):
            emit_alarm(alarm)

    def _alarm(self, job: str, *, deadline_s: float, late_s: float) -> Alarm:
        by = f"{seconds_text(late_s)} after its deadline, {seconds_text(deadline_s)} from the start"
        return Alarm(
            event=DEADLINE_IN_DANGER,
            resource=f"ringmaster.job.{self._batch}.{job}",
            name=job,
            message=f"{job} of batch {self._batch} is forecast to end {by}",
            facts={"batch": self._batch, "job": job, "late_s": late_s, "deadline_s": deadline_s},
        )


def _node_lost(record: NodeRecord) -> Alarm:
    devices = f"{len(record.devices)} device{'s' if len(record.devices) != 1 else ''}"
    return Alarm(
        event=DEVICE_LOST,
        resource=f"ringmaster.node.{record.name}",
        name=record.name,
        message=f"node {record.name} is gone, with {devices}: its jobs continue elsewhere, from their last checkpoints",
        facts={"node": record.name, "num_devices": len(record.devices)},
    )


def _device_lost(record: NodeRecord, number: str) -> Alarm:
    why = record.health[number]
    return Alarm(
        event=DEVICE_LOST,
        resource=f"ringmaster.device.{record.name}.{number}",
        name=f"{record.name}:{number}",
        message=f"device {number} of {record.name} is out of the plan: {why}",
        facts={"node": record.name, "device": number, "why": why},
    )
