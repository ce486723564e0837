"""What Slurm says of its jobs and nodes, read from the output of squeue and scontrol."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringmaster.tasks.pool.providers.slurm.times import seconds_of

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
_DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "REBOOT_REQUESTED", "POWER_DOWN"})
_AWAY = frozenset({"DOWN", "NOT_RESPONDING", "POWERED_DOWN", "REBOOT_ISSUED", "UNKNOWN"})
_MARK = "prefect-flow-run:"
_INFRASTRUCTURE = "slurm:"


class Incomplete(ValueError):
    """Raised for a list that may lack jobs."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job as Slurm describes it.

    states: its state, such as RUNNING, and flags such as COMPLETING: its processes are being ended.
    node: the name of its node; empty while it waits.
    user_id: the number of the user who submitted it; None where Slurm does not say.
    comment: the comment that it was submitted with.
    num_restarts: how many times it was requeued after it had started.
    end_s: when it ended, or has to, in seconds since the epoch; None while it waits.
    is_preempted: whether another job takes its node.
    exit: how its batch script ended, in words.
    reason: why it waits or ended, in Slurm's words; empty if there is no reason.
    """

    id: int
    states: frozenset[str]
    node: str = ""
    user_id: int | None = None
    comment: str = ""
    num_restarts: int = 0
    end_s: float | None = None
    is_preempted: bool = False
    exit: str = ""
    reason: str = ""

    @property
    def flow_run(self) -> str:
        """The id of the flow run that it was submitted for; empty for other jobs."""
        return self.comment.removeprefix(_MARK) if self.comment.startswith(_MARK) else ""

    @property
    def is_completing(self) -> bool:
        """Whether Slurm is ending its processes, or cannot confirm that they have ended."""
        return "COMPLETING" in self.states

    @property
    def is_waiting(self) -> bool:
        """Whether it has not started, or is to start again."""
        return bool(self.states & WAITING) and not self.is_completing

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, and Slurm knows of no process of it."""
        return bool(self.states & ENDED) and not self.is_completing

    @property
    def state(self) -> str:
        """Its states in words."""
        return "+".join(sorted(self.states))


@dataclass(frozen=True, kw_only=True)
class SlurmNode:
    """A node as Slurm describes it.

    reason: why it is drained or down, in its administrator's words.
    partitions: names of the partitions that it belongs to.
    gres: its generic resources, as in "gpu:a100:8(S:0-1)"; empty for none.
    """

    name: str
    states: frozenset[str]
    reason: str = ""
    partitions: frozenset[str] = frozenset()
    gres: str = ""

    @property
    def is_drained(self) -> bool:
        """Whether it accepts no new jobs."""
        return bool(self.states & _DRAINED)

    @property
    def is_away(self) -> bool:
        """Whether Slurm cannot reach it: processes may run there that Slurm counts as ended."""
        # A process that cannot be killed makes Slurm drain its node, and count the job as ended.
        return bool(self.states & _AWAY) or "kill task failed" in self.reason.lower()


@dataclass(frozen=True, kw_only=True)
class SlurmPartition:
    """A partition as Slurm describes it.

    is_default: whether jobs that name no partition are put there.
    is_up: whether it accepts jobs and starts them.
    max_time_s: the longest time limit of a job; infinity for any.
    """

    name: str
    is_default: bool = False
    is_up: bool = True
    max_time_s: float = math.inf


def infrastructure_of(job: int) -> str:
    """Returns the id under which Prefect, and the pool, know a job."""
    return f"{_INFRASTRUCTURE}{job}"


def job_number(infrastructure: str) -> int | None:
    """Returns the number of the job with such an id; None for other ids."""
    number = infrastructure.removeprefix(_INFRASTRUCTURE)
    return int(number) if infrastructure.startswith(_INFRASTRUCTURE) and number.isdecimal() else None


def comment_of(flow_run: str) -> str:
    """Returns the comment of the job of a flow run, by which it is found even if its number was never stored."""
    return f"{_MARK}{flow_run}"


def jobs_of(text: str) -> Sequence[SlurmJob]:
    """Returns the jobs in the output of `squeue --json`.

    Raises Incomplete where it reports an error. squeue 22.05 does so with an empty list and the exit status 0.
    """
    found = json.loads(text)
    if errors := found.get("errors"):
        causes = [" ".join(str(each.get(key, "")) for key in ("description", "error")).strip() for each in errors]
        raise Incomplete("; ".join(causes))
    return [_job(each) for each in found["jobs"]]


def nodes_of(text: str) -> Mapping[str, SlurmNode]:
    """Returns the nodes in the output of `scontrol --oneliner show node`, by name."""
    found = {}
    for line in text.splitlines():
        name, state = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bState=(\S+)", line)
        reason = re.search(r"\bReason=(.*?)(?: \[\S+@\S+\])?\s*$", line)
        if name and state:
            partitions, gres = _field(line, "Partitions"), _field(line, "Gres")
            found[name[1]] = SlurmNode(
                name=name[1],
                states=_node_states(state[1]),
                reason=reason[1] if reason else "",
                partitions=frozenset(filter(None, partitions.split(","))),
                gres=gres,
            )
    return found


def partitions_of(text: str) -> Sequence[SlurmPartition]:
    """Returns the partitions in the output of `scontrol --oneliner show partition`."""
    return [
        SlurmPartition(
            name=_field(line, "PartitionName"),
            is_default=_field(line, "Default") == "YES",
            is_up=_field(line, "State") == "UP",
            max_time_s=seconds_of(_field(line, "MaxTime") or "UNLIMITED"),
        )
        for line in text.splitlines()
        if "PartitionName=" in line
    ]


def _field(line: str, name: str) -> str:
    """Returns a value without spaces in a line of scontrol; empty where it is missing or null."""
    found = re.search(rf"(?:^|\s){name}=(\S*)", line)
    return found[1] if found and found[1] != "(null)" else ""


def _node_states(text: str) -> frozenset[str]:
    """Returns the flags in a text such as "IDLE+DRAIN", or "DOWN*" of a node that does not respond."""
    return frozenset(text.rstrip("*~#!%$@^-").split("+")) | ({"NOT_RESPONDING"} if "*" in text else set())


def _job(row: Mapping[str, Any]) -> SlurmJob:
    states = _states(row.get("job_state"))
    flags = {flag for flag in _states(row.get("flags", [])) if flag in ("COMPLETING", "CONFIGURING")}
    is_waiting = bool(states & WAITING)
    reason = str(row.get("state_reason") or "")
    description = str(row.get("state_description") or "")
    user_id = _number(row.get("user_id"))
    return SlurmJob(
        id=int(_number(row["job_id"]) or 0),
        states=states | flags,
        node=str(row.get("nodes") or ""),
        user_id=None if user_id is None else int(user_id),
        comment=_text(row.get("comment")),
        num_restarts=int(_number(row.get("restart_cnt")) or 0),
        end_s=None if is_waiting else _number(row.get("end_time")) or None,
        is_preempted=bool(_number(row.get("preempt_time"))),
        exit=_exit(row.get("exit_code")),
        reason=description or ("" if reason == "None" else reason),
    )


def _states(value: Any) -> frozenset[str]:
    names = value if isinstance(value, list) else [value]
    return frozenset(str(name).upper() for name in names if name)


def _number(value: Any) -> float | None:
    """Returns a number in either form; None for one that is not set, or infinite."""
    if isinstance(value, Mapping):
        return float(value["number"]) if value.get("set", True) and not value.get("infinite") else None
    return None if value is None else float(value)


def _text(value: Any) -> str:
    # Some releases have several comments: the user's, the administrator's, and Slurm's.
    return str((value.get("job") if isinstance(value, Mapping) else value) or "")


def _exit(value: Any) -> str:
    """Returns the exit status in words, from the raw status of 22.05 or the object of later releases."""
    if isinstance(value, Mapping):
        signal = value.get("signal") or {}
        status, number = _number(value.get("return_code")), _number(signal.get("id", signal.get("signal_id")))
    else:
        raw = int(value or 0)
        status, number = float(raw >> 8), float(raw & 0x7F)
    return f"signal {number:.0f}" if number else f"exit status {status or 0:.0f}"
