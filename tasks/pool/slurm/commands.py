"""The commands of Slurm that a pool needs: sbatch, squeue, scancel and scontrol.

Neither an accounting database nor slurmrestd is used. JSON is read in the form of Slurm 22.05, and in that of later
releases, where a number may be {"set": true, "number": 5} and a state a list of flags.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringmaster.errors import EngineUnavailable, SlurmError

_SHORT = re.compile(r"(\d+)\s*([mhd])")
_MINUTES = {"m": 1, "h": 60, "d": 1440}
_UNLIMITED = frozenset({"UNLIMITED", "INFINITE"})
# Without days: minutes, minutes:seconds, hours:minutes:seconds. With days: days-hours[:minutes[:seconds]].
_LONG = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")

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
_UNREACHABLE_STATES = frozenset({"DOWN", "NOT_RESPONDING", "POWERED_DOWN", "REBOOT_ISSUED", "UNKNOWN"})
_MARK = "prefect-flow-run:"
_INFRASTRUCTURE = "slurm:"
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")
TIMEOUT_S = 60.0  # the commands give up by themselves after some time, which sites choose
# What the commands print when slurmctld, or the key service of the cluster, does not answer.
_AWAY = re.compile(
    r"unable to contact slurm controller|connection refused|timed out|unable to connect|connect failure"
    r"|zero bytes were transmitted|communication connection|protocol authentication error|in standby mode"
    r"|socket communicate failure|slurm_load_\w+ error: .*(contact|connect)|munge",
    re.IGNORECASE,
)
# What scancel prints of a job that has ended, or is about to.
_OVER = re.compile(
    r"invalid job id|already completing or completed|job/step already|already finished|no such process|not running",
    re.IGNORECASE,
)
Run = Callable[[Sequence[str], str | None, Mapping[str, str] | None], subprocess.CompletedProcess[str]]
"""Runs a command with a standard input and an environment (None for those of this process) to its end."""
_INSTALL = (
    "To fix: use a machine from which jobs can be submitted, such as a login node "
    "(on Debian and Ubuntu: apt install slurm-client), with the slurm.conf of the cluster"
)


def slurm_time(text: str) -> str:
    """Returns a time limit as sbatch reads it, from a text such as 8h, 30m or 2d; returns other texts unchanged."""
    result = _SHORT.fullmatch(text.strip().lower())
    return str(int(result[1]) * _MINUTES[result[2]]) if result else text.strip()


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
        return bool(self.states & _UNREACHABLE_STATES) or "kill task failed" in self.reason.lower()


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
    result = json.loads(text)
    if errors := result.get("errors"):
        causes = [" ".join(str(each.get(key, "")) for key in ("description", "error")).strip() for each in errors]
        raise Incomplete("; ".join(causes))
    return [_job(each) for each in result["jobs"]]


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


def _run(command: Sequence[str], input: str | None, env: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=input or "", env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


class Slurm:
    """The cluster that the commands of this machine reach, as `SLURM_CONF` or /etc/slurm says. Calls wait for Slurm.

    All methods raise EngineUnavailable while Slurm does not answer.
    """

    def __init__(self, *, run: Run = _run) -> None:
        self._run = run

    def submit(self, options: Sequence[str], *, script: str, environment: Mapping[str, str]) -> int:
        """Submits a batch job; returns its number. Raises SlurmError.

        options: options of sbatch, which every user of the cluster can read.
        script: the batch script, which is passed through standard input and therefore written to no file here.
        environment: the variables of sbatch and of the job. Slurm shows them to nobody else.
        """
        answer = self._answer(["sbatch", "--parsable", "--export=ALL", *options], input=script, env=environment)
        number = answer.strip().splitlines()[-1].partition(";")[0]  # the name of the cluster follows, if it has several
        return int(number)

    def check(self, options: Sequence[str]) -> None:
        """Raises SlurmError where sbatch would refuse a job with those options."""
        self._answer(["sbatch", "--test-only", *options], input="#!/bin/sh\n", env=environment_of_jobs(os.environ))

    def jobs(self) -> Sequence[SlurmJob]:
        """Returns the jobs that Slurm knows: those that wait or run, and those that ended in the last minutes."""
        # Slurm 22.05 prints all jobs, whatever it is asked for.
        text = self._query(["squeue", "--all", "--states=all", "--json"])
        try:
            return jobs_of(text)
        except Incomplete as error:
            raise EngineUnavailable(_away(f"squeue: {error}")) from error

    def nodes(self, names: Collection[str]) -> Mapping[str, SlurmNode]:
        """Returns nodes by their names."""
        if not names:
            return {}
        return nodes_of(self._query(["scontrol", "--oneliner", "--all", "show", "node", ",".join(sorted(names))]))

    def all_nodes(self) -> Sequence[SlurmNode]:
        """Returns all nodes of the cluster."""
        return list(nodes_of(self._query(["scontrol", "--oneliner", "--all", "show", "node"])).values())

    def partitions(self) -> Sequence[SlurmPartition]:
        """Returns the partitions that this user may see."""
        return partitions_of(self._query(["scontrol", "--oneliner", "show", "partition"]))

    def end(self, job: int) -> None:
        """Sends SIGTERM to the batch script of a running job, which ends in order; does nothing if it has ended."""
        # Not to the script's children: it decides which of them hear of it.
        self._cancel(["scancel", "--batch", "--signal=TERM", str(job)])

    def cancel(self, job: int) -> None:
        """Cancels a job. If it runs, all its processes receive SIGTERM, and SIGKILL after the cluster's KillWait."""
        self._cancel(["scancel", str(job)])

    def _cancel(self, command: Sequence[str]) -> None:
        try:
            self._answer(command)
        except SlurmError as error:
            if not _OVER.search(str(error)):
                raise

    def _query(self, command: Sequence[str]) -> str:
        """Returns the output of a command that Slurm has no reason to refuse."""
        try:
            return self._answer(command)
        except SlurmError as error:
            raise EngineUnavailable(_away(str(error))) from error

    def _answer(self, command: Sequence[str], *, input: str | None = None, env: Mapping[str, str] | None = None) -> str:
        name = command[0]
        try:
            done = self._run(command, input, env)
        except subprocess.TimeoutExpired as error:
            raise EngineUnavailable(_away(f"{name} has waited for {TIMEOUT_S:.0f} s")) from error
        except OSError as error:
            raise EngineUnavailable(f"{name} cannot be started here ({error}). {_INSTALL}") from error
        if done.returncode == 0:
            return done.stdout
        text = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
        if _AWAY.search(text):
            raise EngineUnavailable(_away(text))
        raise SlurmError(f"Slurm refuses {name}: {text}")


def lacking_commands() -> Sequence[str]:
    """Returns the faults of this machine: one for the commands that are not installed, with a remedy."""
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    return [f"{', '.join(absent)} cannot be found on this machine. {_INSTALL}"] if absent else []


def environment_of_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without what Slurm has set for a job, in which the caller may run.

    Such variables would be taken for options of the new job.
    """
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}


def _away(cause: str) -> str:
    return (
        f"Slurm's controller (slurmctld) does not answer: {cause}. "
        "To fix: wait until it is back; `scontrol ping` on this machine says whether it is"
    )
