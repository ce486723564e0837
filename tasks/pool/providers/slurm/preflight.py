"""Checks, before a pool starts, of what it would ask of Slurm: all faults at once, each with a remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringmaster.errors import EngineUnavailable, SlurmError
from ringmaster.tasks.execution.engines.known_nodes import EMPTY_BEFORE_S
from ringmaster.tasks.pool.providers.slurm.commands import Slurm, lacking_commands
from ringmaster.tasks.pool.providers.slurm.records import SlurmNode, SlurmPartition
from ringmaster.tasks.pool.providers.slurm.times import seconds_of

_GRES = re.compile(r"(?:gres[:/])?(?P<name>[a-z]\w*)(?::(?P<type>[a-z_]\w*))?(?::(?P<number>\d+))?(?:\(.*\))?", re.I)
_ASKS_FOR_GPUS = re.compile(r"(^|\s)(--gpus|-G|(--gres|--tres-per-\w+)[= ]\S*gpu)")
_SEPARATOR = re.compile(r",(?![^(]*\))")  # no comma in parentheses, as in gpu:8(S:0,1)

LEAST_TIME_S = EMPTY_BEFORE_S + 60.0  # before anything was measured, a node would otherwise leave as it comes
UNAVAILABLE = "Requested node configuration is not available"


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What a pool asks of Slurm for each node; empty texts leave the choice to Slurm.

    time: a time limit as sbatch reads it, or as in 8h.
    gres: generic resources, as in gpu:8.
    num_gpus: how many GPUs are to serve; 0 where that depends on what Slurm gives.
    has_whole_node: whether the job has its node, with all GPUs, for itself.
    script: the batch script, whose lines may ask for more.
    """

    partition: str = ""
    time: str = ""
    gres: str = ""
    num_gpus: int = 0
    has_whole_node: bool = False
    script: str = ""


def faults(
    slurm: Slurm,
    request: JobRequest,
    *,
    options: Callable[[JobRequest], Sequence[str]],
    lacking: Callable[[], Sequence[str]] = lacking_commands,
) -> Sequence[str]:
    """Returns what is wrong with a request for nodes.

    options: returns the options of sbatch for a request, with which sbatch is asked itself, too. What was found to be
        wrong before is left out of its request.
    lacking: returns the faults of commands that are missing.
    """
    if found := lacking():
        return found
    try:
        partitions, nodes = slurm.partitions(), slurm.all_nodes()
        default = [each for each in partitions if each.is_default]
        names = request.partition.split(",") if request.partition else []
        # Where the job may run; where it cannot run as asked, any partition, so that other faults are found, too.
        allowed = ([each for each in partitions if each.name in names] if names else default) or partitions
        partition_faults = _partition_faults(names, partitions)
        time_faults = _time_faults(request.time, allowed)
        gres_faults = _gres_faults(request.gres, allowed, nodes)
        gpu_faults = _gpu_faults(request, options(request), allowed, nodes)
        found = [*partition_faults, *time_faults, *gres_faults, *gpu_faults]
        if partition_faults and not default:
            return found
        rest = JobRequest(
            partition="" if partition_faults else request.partition,
            time="" if time_faults else request.time,
            gres="" if gres_faults else request.gres,
        )
        are_all_there = not any(node.is_drained or node.is_away for node in nodes)
        return [*found, *_refusals(slurm, options(rest), are_all_there=are_all_there)]
    except EngineUnavailable as error:
        return [str(error)]


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
    if not time:
        return []
    try:
        asked_s = seconds_of(time)
    except ValueError:
        return [f"--time {time} is no time. To fix: write it as in 30m, 8h, 2d or 1-12:00:00"]
    if asked_s < LEAST_TIME_S:
        least = f"To fix: at least --time {LEAST_TIME_S // 60:.0f}m"
        return [f"--time {time} is too short: a node is emptied {EMPTY_BEFORE_S:.0f} s before its end. {least}"]
    limit_s = max((each.max_time_s for each in allowed), default=math.inf)
    if asked_s <= limit_s:
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


def _gpu_faults(
    request: JobRequest, options: Sequence[str], allowed: Sequence[SlurmPartition], nodes: Sequence[SlurmNode]
) -> Sequence[str]:
    """Returns the fault of a job whose node would not see the GPUs that are to serve, as nothing asks for them.

    A job that has its node for itself is given all GPUs of it. Where Slurm does not know of GPUs, it hides none.
    """
    directives = [line.removeprefix("#SBATCH") for line in request.script.splitlines() if line.startswith("#SBATCH")]
    if not request.num_gpus or _ASKS_FOR_GPUS.search(" ".join([*options, *directives])):
        return []
    own = [node for node in nodes if node.partitions & {each.name for each in allowed}]
    have_gpus = all(_has(node, {("gpu", ""): request.num_gpus}) for node in own)
    knows_gpus = any(_has(node, {("gpu", ""): 1}) for node in nodes)
    if not knows_gpus or (request.has_whole_node and have_gpus):
        return []
    number = request.num_gpus
    return [
        f"--node-devices gpu:{number}: nothing asks Slurm for GPUs, so that a node may be given none. "
        f"To fix: --gres gpu:{number}"
    ]


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
    found: dict[tuple[str, str], int] = {}
    for part in _SEPARATOR.split(gres):
        if match := _GRES.fullmatch(part.strip()):
            key = (match["name"].lower(), (match["type"] or "").lower())
            found[key] = found.get(key, 0) + int(match["number"] or 1)
    return found


def _refusals(slurm: Slurm, options: Sequence[str], *, are_all_there: bool) -> Sequence[str]:
    """Returns why sbatch would refuse a job. are_all_there: whether no node is drained or down."""
    try:
        slurm.check(options)
    except SlurmError as error:
        # `--test-only` asks for nodes that are there now, whereas a job waits until they are back.
        if UNAVAILABLE in str(error) and not are_all_there:
            return []
        remedy = "To fix: change --partition, --time, --gres or --sbatch, or add what the site needs"
        return [f"{error}. {remedy}, as in --sbatch=--account=NAME"]
    return []
