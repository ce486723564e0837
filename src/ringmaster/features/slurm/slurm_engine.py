"""The engine `slurm`: its commands (sbatch, squeue, scancel, scontrol), and the options of its jobs with their faults.

Neither an accounting database nor slurmrestd is used. JSON is read in the form of Slurm 22.05, and in that of later
releases, where a number may be {"set": true, "number": 5} and a state a list of flags.
"""

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringmaster.errors import EngineUnavailable, SchedulerError
from ringmaster.tasks.pool.batch_scheduler import (
    WAITING,
    BatchScheduler,
    SchedulerJob,
    SchedulerNode,
    SchedulerOptions,
    batch_script,
    short_time_s,
)
from ringmaster.tasks.pool.engines import option

_UNLIMITED = frozenset({"UNLIMITED", "INFINITE"})
# Without days: minutes, minutes:seconds, hours:minutes:seconds. With days: days-hours[:minutes[:seconds]].
_LONG = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_MARK = "prefect-flow-run:"  # of the comments of jobs


def slurm_time(text: str) -> str:
    """Returns a time limit as sbatch reads it, from a text such as 8h, 30m or 2d; returns other texts unchanged."""
    seconds = short_time_s(text)
    return text.strip() if seconds is None else str(seconds // 60)


def seconds_of(text: str) -> float:
    """Returns a time limit in seconds, infinity for none. Raises ValueError for a text that is not a time."""
    text = slurm_time(text)
    if text.upper() in _UNLIMITED:
        return math.inf
    result = _LONG.fullmatch(text)
    if result is None:
        raise ValueError(f"{text!r} is not a time")
    parts = [int(part) for part in result["parts"].split(":")]
    has_hours = result["days"] is not None or len(parts) == len("HMS")
    units = (3600, 60, 1) if has_hours else (60, 1)
    days_s = int(result["days"] or 0) * 86400
    return float(days_s + sum(part * unit for part, unit in zip(parts, units, strict=False)))


@dataclass(frozen=True, kw_only=True)
class SlurmNode(SchedulerNode):
    """A node as Slurm describes it.

    partitions: names of the partitions that it belongs to.
    gres: its generic resources, as in "gpu:a100:8(S:0-1)"; empty for none.
    """

    partitions: frozenset[str] = frozenset()
    gres: str = ""

    @property
    def is_away(self) -> bool:
        """Whether processes may run on it that Slurm counts as ended; see `SchedulerNode`."""
        # A process that cannot be killed makes Slurm drain its node, and count the job as ended.
        return super().is_away or "kill task failed" in self.reason.lower()


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
            result[name[1]] = SlurmNode(
                name=name[1],
                states=_node_states(state[1]),
                reason=reason[1] if reason else "",
                partitions=frozenset(filter(None, _field(line, "Partitions").split(","))),
                gres=_field(line, "Gres"),
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


def _job(row: Mapping[str, Any]) -> SchedulerJob:
    states = _states(row.get("job_state"))
    flags = {flag for flag in _states(row.get("flags", [])) if flag in ("COMPLETING", "CONFIGURING")}
    is_waiting = bool(states & WAITING)
    reason = str(row.get("state_reason") or "")
    description = str(row.get("state_description") or "")
    user_id, comment = _number(row.get("user_id")), _text(row.get("comment"))
    return SchedulerJob(
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
    """The cluster that the commands of this machine reach, as configured by `SLURM_CONF` or /etc/slurm."""

    name = "slurm"
    title = "Slurm"
    server = "Slurm's controller (slurmctld)"
    ping = "scontrol ping"
    submit_command = ("sbatch", "--parsable", "--export=ALL")  # Slurm shows the environment to nobody else
    # Slurm 22.05 prints all jobs, whatever the arguments.
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

    def read_jobs(self, text: str) -> Sequence[SchedulerJob]:
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


NOTICE_S = 60
_GRES = re.compile(r"(?:gres[:/])?(?P<name>[a-z]\w*)(?::(?P<type>[a-z_]\w*))?(?::(?P<number>\d+))?(?:\(.*\))?", re.I)
_ASKS_FOR_GPUS = re.compile(r"(^|\s)(--gpus|-G|(--gres|--tres-per-\w+)[= ]\S*gpu)")
_SEPARATOR = re.compile(r",(?![^(]*\))")  # no comma in parentheses, as in gpu:8(S:0,1)
UNAVAILABLE = "Requested node configuration is not available"
BATCH_SCRIPT = batch_script(
    Slurm.name,
    directive="#SBATCH",
    job="$SLURM_JOB_ID",
    node="$SLURMD_NODENAME",
    restarts="${SLURM_RESTART_COUNT:-0}",
)


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(SchedulerOptions):
    """The resource request of each node. Empty fields are left to the defaults of Slurm."""

    scheduler = Slurm

    name: str = "slurm"
    partition: str | None = option(
        None, "Partition of Slurm; the cluster's default partition if empty.", flag="--partition"
    )
    account: str | None = option(None, "The account that pays for the job.")
    qos: str | None = option(None, "The quality of service.", title="QOS")
    gres: str | None = option(
        None,
        "Generic resources of a Slurm job, for example gpu:8.",
        flag="--gres",
        title="Generic resources",
        examples=["gpu:8"],
    )
    cpus: int | None = option(None, "CPUs of a job that shares its node.", least=1, title="CPUs")
    memory: str | None = option(
        "0", "Memory of the job, such as 64G; 0 for all memory of an exclusive node.", examples=["64G"]
    )
    notice_s: int = option(
        NOTICE_S,
        "How long before the end of the time limit the job gets the signal to end. Slurm may be a minute early.",
        least=0,
        title="Notice (seconds)",
    )
    sbatch_options: list[str] = option(
        [],
        "Further option of sbatch, for example --account=ml; may be repeated. Every user of the cluster can read it: "
        "it must hold no password.",
        flag="--sbatch",
        title="Further options of sbatch",
        examples=[["--constraint=a100", "--exclude=node7"]],
    )
    working_dir: str | None = option(None, "The worker's if empty.", title="Working folder")
    batch_script: str = option(BATCH_SCRIPT, "The batch script.", json_schema_extra={"format": "sh"})

    def arguments(self, *, job_name: str, flow_run: str, log_dir: Path) -> list[str]:
        """Returns the options of sbatch; see `SchedulerOptions`."""
        given: dict[str, Any] = {
            "job-name": job_name,
            "comment": comment_of(flow_run),
            "output": f"{log_dir}/%j.log",
            "open-mode": "append",
            "nodes": 1,
            "ntasks": 1,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": None if self.time is None else slurm_time(self.time),
            "gres": self.gres,
            "cpus-per-task": self.cpus,
            "mem": self.memory if self.exclusive or self.memory != "0" else None,  # all of it would be exclusive, too
            "chdir": self.working_dir,
            "signal": f"B:USR1@{self.notice_s}" if self.notice_s else None,
        }
        options = [f"--{option}={value}" for option, value in given.items() if value is not None and value != ""]
        options += ["--no-requeue", *["--exclusive"] * self.exclusive]
        return [*options, *self.sbatch_options]  # the last ones count

    def queried_faults(self, home: Path) -> Sequence[str]:
        """Returns what is wrong with the jobs of nodes; see `EngineOptions`."""
        return self.scheduler.lacking_commands() or self.with_template().refusals(self.scheduler())

    def refusals(self, slurm: Slurm) -> Sequence[str]:
        """Returns what is wrong with these options, as checked here and by sbatch itself.

        What was found to be wrong before is left out of its request.
        """
        try:
            partitions, nodes = slurm.partitions(), list(slurm.described_nodes().values())
            default = [each for each in partitions if each.is_default]
            names = self.partition.split(",") if self.partition else []
            # The job's partition; any partition where it cannot run there, so that other errors are found, too.
            allowed = ([each for each in partitions if each.name in names] if names else default) or partitions
            partition_faults = _partition_faults(names, partitions)
            time_faults = _time_faults(self.time or "", allowed)
            gres_faults = _gres_faults(self.gres or "", allowed, nodes)
            result = [*partition_faults, *time_faults, *gres_faults, *self._gpu_faults(allowed, nodes)]
            if partition_faults and not default:
                return result
            rest = replace(
                self,
                partition=None if partition_faults else self.partition,
                time=None if time_faults else self.time,
                gres=None if gres_faults else self.gres,
            )
            return [*result, *_refusals(slurm, rest._trial(), nodes)]
        except EngineUnavailable as error:
            return [str(error)]

    def _trial(self) -> list[str]:
        return self.arguments(job_name="preflight", flow_run="preflight", log_dir=Path())

    def _gpu_faults(self, allowed: Sequence[SlurmPartition], nodes: Sequence[SlurmNode]) -> Sequence[str]:
        """Returns the error of a job whose node would not see its GPUs, as nothing requests them.

        A job that has its node for itself is given all GPUs of it. Where Slurm does not know of GPUs, it hides none.
        """
        kind, _, text = self.devices.partition(":")
        number = (int(text) if text.isdigit() else 1) if kind == "gpu" else 0
        lines = self.batch_script.splitlines()
        directives = [line.removeprefix("#SBATCH") for line in lines if line.startswith("#SBATCH")]
        if not number or _ASKS_FOR_GPUS.search(" ".join([*self._trial(), *directives])):
            return []
        own = [node for node in nodes if node.partitions & {each.name for each in allowed}]
        have_gpus = all(_has(node, {("gpu", ""): number}) for node in own)
        knows_gpus = any(_has(node, {("gpu", ""): 1}) for node in nodes)
        if not knows_gpus or (self.exclusive and have_gpus):
            return []
        return [
            f"--node-devices gpu:{number}: nothing requests GPUs from Slurm, so that a node may be given none. "
            f"To fix: --gres gpu:{number}"
        ]


def _partition_faults(names: Sequence[str], partitions: Sequence[SlurmPartition]) -> Sequence[str]:
    """Returns the faults of the names, of which sbatch takes several, or of having named none."""
    known = {each.name: each for each in partitions}
    listed = ", ".join(known) or "none"
    if not names and not any(each.is_default for each in partitions):
        return [f"the cluster has no default partition. To fix: name one by --partition, of {listed}"]
    absent = [name for name in names if name not in known]
    closed = [name for name in names if name in known and not known[name].is_up]
    return [
        *(f"--partition {name} is not in this cluster. To fix: choose one of {listed}" for name in absent),
        *(f"--partition {name} starts no jobs at present. To fix: choose another one of {listed}" for name in closed),
    ]


def _time_faults(time: str, allowed: Sequence[SlurmPartition]) -> Sequence[str]:
    from ringmaster.tasks.execution.known_nodes import EMPTY_BEFORE_S

    if not time:
        return []
    try:
        time_s = seconds_of(time)
    except ValueError:
        return [f"--time {time} is not a time. To fix: write it as in 30m, 8h, 2d or 1-12:00:00"]
    least_s = EMPTY_BEFORE_S + 60.0  # before anything was measured, a node would otherwise leave as it comes
    if time_s < least_s:
        least = f"To fix: at least --time {least_s // 60:.0f}m"
        return [f"--time {time} is too short: a node is emptied {EMPTY_BEFORE_S:.0f} s before its end. {least}"]
    limit_s = max((each.max_time_s for each in allowed), default=math.inf)
    if time_s <= limit_s:
        return []
    most = f"To fix: at most --time {limit_s // 60:.0f}m"
    return [f"--time {time} is above the limit of partition {_names(allowed)}. {most}"]


def _gres_faults(gres: str, allowed: Sequence[SlurmPartition], nodes: Sequence[SlurmNode]) -> Sequence[str]:
    wanted = numbers_of(gres)
    own = [node for node in nodes if node.partitions & {each.name for each in allowed}]
    if not wanted or any(_has(node, wanted) for node in own):
        return []
    there = " or ".join(sorted({node.gres or "nothing" for node in own})) or "no generic resources"
    return [f"--gres {gres}: no node of partition {_names(allowed)} has that. To fix: a node there has {there}"]


def _names(partitions: Sequence[SlurmPartition]) -> str:
    return ", ".join(each.name for each in partitions)


def _has(node: SlurmNode, wanted: Mapping[tuple[str, str], int]) -> bool:
    there = numbers_of(node.gres)
    return all(
        sum(number for key, number in there.items() if key[0] == name and type in ("", key[1])) >= least
        for (name, type), least in wanted.items()
    )


def numbers_of(gres: str) -> Mapping[tuple[str, str], int]:
    """Returns the numbers in a text such as "gpu:a100:8(S:0-1),nvme:1", by name and type ("" for any).

    What cannot be understood is left out: sbatch judges that.
    """
    result: dict[tuple[str, str], int] = {}
    for part in _SEPARATOR.split(gres):
        if match := _GRES.fullmatch(part.strip()):
            key = (match["name"].lower(), (match["type"] or "").lower())
            result[key] = result.get(key, 0) + int(match["number"] or 1)
    return result


def _refusals(slurm: Slurm, options: Sequence[str], nodes: Sequence[SlurmNode]) -> Sequence[str]:
    """Returns why sbatch would refuse a job."""
    try:
        slurm.check(options)
    except SchedulerError as error:
        remedy = "To fix: change --partition, --time, --gres or --sbatch, or add what the site needs"
        # `--test-only` asks for nodes that are there now, whereas a job waits until they are back.
        waits = UNAVAILABLE in str(error) and any(node.is_drained or node.is_away for node in nodes)
        return [] if waits else [f"{error}. {remedy}, as in --sbatch=--account=NAME"]
    return []
