"""The commands of Slurm that a pool needs: sbatch, squeue, scancel and scontrol.

Neither an accounting database nor slurmrestd is used. JSON is read in the form of Slurm 22.05, and in that of later
releases, where a number may be {"set": true, "number": 5} and a state a list of flags.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringmaster.tasks.pool.batch_scheduler import WAITING, BatchJob, BatchNode, BatchScheduler, short_time_s

_UNLIMITED = frozenset({"UNLIMITED", "INFINITE"})
# Without days: minutes, minutes:seconds, hours:minutes:seconds. With days: days-hours[:minutes[:seconds]].
_LONG = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_MARK = "prefect-flow-run:"  # of the comments of jobs


def slurm_time(text: str) -> str:
    """Returns a time limit as sbatch reads it, from a text such as 8h, 30m or 2d; returns other texts unchanged."""
    seconds = short_time_s(text)
    return text.strip() if seconds is None else str(seconds // 60)


def seconds_of(text: str) -> float:
    """Returns a time limit in seconds, infinity for none. Raises ValueError for a text that is no time."""
    text = slurm_time(text)
    if text.upper() in _UNLIMITED:
        return math.inf
    result = _LONG.fullmatch(text)
    if result is None:
        raise ValueError(f"{text!r} is no time")
    parts = [int(part) for part in result["parts"].split(":")]
    has_hours = result["days"] is not None or len(parts) == len("HMS")
    units = (3600, 60, 1) if has_hours else (60, 1)
    days_s = int(result["days"] or 0) * 86400
    return float(days_s + sum(part * unit for part, unit in zip(parts, units, strict=False)))


@dataclass(frozen=True, kw_only=True)
class SlurmNode(BatchNode):
    """A node as Slurm describes it.

    partitions: names of the partitions that it belongs to.
    gres: its generic resources, as in "gpu:a100:8(S:0-1)"; empty for none.
    """

    partitions: frozenset[str] = frozenset()
    gres: str = ""


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


def comment_of(flow_run: str) -> str:
    """Returns the comment of the job of a flow run, by which it is found even if its number was never stored."""
    return f"{_MARK}{flow_run}"


def nodes_of(text: str) -> Mapping[str, SlurmNode]:
    """Returns the nodes in the output of `scontrol --oneliner show node`, by name."""
    result = {}
    for line in text.splitlines():
        name, state = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bState=(\S+)", line)
        reason = re.search(r"\bReason=(.*?)(?: \[\S+@\S+\])?\s*$", line)
        if name and state:
            partitions, gres = _field(line, "Partitions"), _field(line, "Gres")
            result[name[1]] = SlurmNode(
                name=name[1],
                states=_node_states(state[1]),
                reason=reason[1] if reason else "",
                partitions=frozenset(filter(None, partitions.split(","))),
                gres=gres,
            )
    return result


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
    result = re.search(rf"(?:^|\s){name}=(\S*)", line)
    return result[1] if result and result[1] != "(null)" else ""


def _node_states(text: str) -> frozenset[str]:
    """Returns the flags in a text such as "IDLE+DRAIN", or "DOWN*" of a node that does not respond."""
    return frozenset(text.rstrip("*~#!%$@^-").split("+")) | ({"NOT_RESPONDING"} if "*" in text else set())


def _job(row: Mapping[str, Any]) -> BatchJob:
    states = _states(row.get("job_state"))
    flags = {flag for flag in _states(row.get("flags", [])) if flag in ("COMPLETING", "CONFIGURING")}
    is_waiting = bool(states & WAITING)
    reason = str(row.get("state_reason") or "")
    description = str(row.get("state_description") or "")
    user_id, comment = _number(row.get("user_id")), _text(row.get("comment"))
    return BatchJob(
        id=int(_number(row["job_id"]) or 0),
        states=states | flags,
        node=str(row.get("nodes") or ""),
        user_id=None if user_id is None else int(user_id),
        flow_run=comment.removeprefix(_MARK) if comment.startswith(_MARK) else "",
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


class Slurm(BatchScheduler):
    """The cluster that the commands of this machine reach, as `SLURM_CONF` or /etc/slurm says."""

    name = "slurm"
    title = "Slurm"
    server = "Slurm's controller (slurmctld)"
    ping = "scontrol ping"
    submit_command = ("sbatch", "--parsable", "--export=ALL")  # Slurm shows the environment to nobody else
    # Slurm 22.05 prints all jobs, whatever it is asked for.
    jobs_command = ("squeue", "--all", "--states=all", "--json")
    # Not to the script's children: it decides which of them hear of it.
    end_command = ("scancel", "--batch", "--signal=TERM")
    cancel_command = ("scancel",)  # SIGKILL follows after the cluster's KillWait
    other_commands = ("scontrol",)
    clients = "(on Debian and Ubuntu: apt install slurm-client), with the slurm.conf of the cluster"
    away = re.compile(
        r"unable to contact slurm controller|connection refused|timed out|unable to connect|connect failure"
        r"|zero bytes were transmitted|communication connection|protocol authentication error|in standby mode"
        r"|socket communicate failure|slurm_load_\w+ error: .*(contact|connect)|munge",
        re.IGNORECASE,
    )
    over = re.compile(
        r"invalid job id|already completing or completed|job/step already|already finished|no such process|not running",
        re.IGNORECASE,
    )
    variables = re.compile("SLURM_(?!CONF$)")
    log = "{job}.log"

    def read_jobs(self, text: str) -> Sequence[BatchJob]:
        """Returns the jobs; see `BatchScheduler`.

        squeue 22.05 reports an error with an empty list and the exit status 0.
        """
        result = json.loads(text)
        if errors := result.get("errors"):
            causes = [" ".join(str(each.get(key, "")) for key in ("description", "error")).strip() for each in errors]
            raise ValueError("; ".join(causes))
        return [_job(each) for each in result["jobs"]]

    def check(self, options: Sequence[str]) -> None:
        """Raises SchedulerError where sbatch would refuse a job with those options."""
        environment = self.environment_of_jobs(os.environ)
        self._answer(["sbatch", "--test-only", *options], input="#!/bin/sh\n", env=environment)

    def nodes(self, names: Collection[str]) -> Mapping[str, SlurmNode]:
        """Returns nodes by their names."""
        return self.described_nodes(",".join(sorted(names))) if names else {}

    def described_nodes(self, *names: str) -> Mapping[str, SlurmNode]:
        """Returns nodes, by default all of the cluster, by name."""
        return nodes_of(self._query(["scontrol", "--oneliner", "--all", "show", "node", *names]))

    def partitions(self) -> Sequence[SlurmPartition]:
        """Returns the partitions that this user may see."""
        return partitions_of(self._query(["scontrol", "--oneliner", "show", "partition"]))
