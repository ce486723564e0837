"""The engine `slurm`: the options of its jobs, and what `ringmaster up` finds wrong with them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringmaster.errors import EngineUnavailable, SchedulerError
from ringmaster.tasks.pool.batch_scheduler import BatchOptions, batch_script
from ringmaster.tasks.pool.engines import option
from ringmaster.tasks.pool.slurm.commands import (
    Slurm,
    SlurmNode,
    SlurmPartition,
    comment_of,
    seconds_of,
    slurm_time,
)

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
class SlurmOptions(BatchOptions):
    """What is asked of Slurm for each node; what is empty is left to Slurm."""

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
        "How long before the end of the time limit the job is told to end in order. Slurm may be a minute early.",
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
        """Returns the options of sbatch; see `BatchOptions`."""
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

    def preflight(self, home: Path) -> Sequence[str]:
        """Returns what is wrong with the jobs of nodes; see `EngineOptions`."""
        return self.scheduler.lacking_commands() or self.with_template().refusals(self.scheduler())

    def refusals(self, slurm: Slurm) -> Sequence[str]:
        """Returns what is wrong with these options, about which sbatch is asked itself, too.

        What was found to be wrong before is left out of its request.
        """
        try:
            partitions, nodes = slurm.partitions(), list(slurm.described_nodes().values())
            default = [each for each in partitions if each.is_default]
            names = self.partition.split(",") if self.partition else []
            # Where the job may run; where it cannot run as asked, any partition, so that other faults are found, too.
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
        """Returns the fault of a job whose node would not see the GPUs that are to serve, as nothing asks for them.

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
            f"--node-devices gpu:{number}: nothing asks Slurm for GPUs, so that a node may be given none. "
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
        return [f"--time {time} is no time. To fix: write it as in 30m, 8h, 2d or 1-12:00:00"]
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
        # `--test-only` asks for nodes that are there now, whereas a job waits until they are back.
        if UNAVAILABLE in str(error) and any(node.is_drained or node.is_away for node in nodes):
            return []
        remedy = "To fix: change --partition, --time, --gres or --sbatch, or add what the site needs"
        return [f"{error}. {remedy}, as in --sbatch=--account=NAME"]
    return []
