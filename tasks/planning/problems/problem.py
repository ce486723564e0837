"""Planning problems: nodes, jobs, and for each job the options that the planner may choose from.

A problem is validated as a whole when it is created, and all faults are reported at once. Its JSON form uses the short
keys of the benchmark files of this field ("gpus", "nodes", "runtime", "switch_cost"). All times are in seconds, but
nothing depends on that unit.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ringmaster.errors import ProblemError
from ringmaster.tasks.planning.problems.fair_share import fair_seconds
from ringmaster.tasks.planning.problems.faults import faults_of
from ringmaster.tasks.planning.problems.json_form import read_fields, write_fields
from ringmaster.tasks.planning.problems.parts import Node, PlanningJob


@dataclass(frozen=True)
class Problem:
    """The jobs to plan and the nodes to plan them on. Raises ProblemError with all faults where values are impossible.

    Every job has an option of its own, beside those of fused groups.

    switch_cost_s: seconds that a job pays when it continues under another option, on other devices or after a pause.
    """

    name: str
    nodes: tuple[Node, ...]
    jobs: tuple[PlanningJob, ...]
    switch_cost_s: float = 60.0

    def __post_init__(self) -> None:
        faults = faults_of(name=self.name, nodes=self.nodes, jobs=self.jobs, switch_cost_s=self.switch_cost_s)
        if found := list(faults):
            raise ProblemError(found)

    @cached_property
    def num_devices(self) -> int:
        """Number of devices of all nodes together."""
        return sum(node.num_devices for node in self.nodes)

    @cached_property
    def device_types(self) -> tuple[str, ...]:
        """The device types of the nodes, sorted."""
        return tuple(sorted({node.device_type for node in self.nodes}))

    @cached_property
    def is_plain(self) -> bool:
        """Whether jobs may run at any time, in any order, on any node, with no seconds beside their runtimes."""
        return (
            not any(job.after or job.release_s or job.deadline_s is not None for job in self.jobs)
            and not any(job.started for job in self.jobs)
            and not self.is_fused
            and not any(node.available_until_s is not None or node.host_memory_bytes is not None for node in self.nodes)
            and not any(o.startup_s or o.save_s or o.evaluate_s for job in self.jobs for o in job.options)
        )

    @cached_property
    def is_fused(self) -> bool:
        """Whether some option trains several jobs."""
        return any(option.jobs for job in self.jobs for option in job.options)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Classes of jobs that differ only in their id, such as the jobs of a sweep, as tuples of indices.

        Each job is in one class. Two jobs of a class can be swapped in a plan without changing any measure of it. A job
        is alone in its class if others wait for it, if it runs at time 0, or if a fused group includes it. Classes are
        in the order of their first job.
        """
        special = {other for job in self.jobs for other in job.after}
        special |= {other for job in self.jobs for option in job.options for other in option.jobs}
        found: dict[Hashable, list[int]] = {}
        for j, job in enumerate(self.jobs):
            is_alone = job.id in special or job.running or any(option.jobs for option in job.options)
            found.setdefault(job.id if is_alone else likeness(job), []).append(j)
        return tuple(map(tuple, found.values()))

    @cached_property
    def fair_s(self) -> Mapping[str, float]:
        """Seconds in which each group could do its jobs on its fair share of the devices, by job; see `fair_share`."""
        return fair_seconds(self.jobs, self.num_devices)

    def job(self, job_id: str) -> PlanningJob:
        """The job with that id. Raises KeyError if there is none."""
        return self._jobs[job_id]

    @cached_property
    def _jobs(self) -> dict[str, PlanningJob]:
        return {job.id: job for job in self.jobs}

    @classmethod
    def from_json(cls, data: Any) -> "Problem":
        """Reads a problem from a JSON object. Raises ProblemError with every fault and its place."""
        fields, faults = read_fields(data)
        try:
            problem = cls(**fields)
        except ProblemError as error:
            raise ProblemError([*faults, *error.faults]) from None
        if faults:
            raise ProblemError(faults)
        return problem

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads, without values that are at their default."""
        return write_fields(name=self.name, nodes=self.nodes, jobs=self.jobs, switch_cost_s=self.switch_cost_s)


def likeness(job: PlanningJob) -> Hashable:
    """Returns a key that is equal for jobs that the planner cannot tell apart."""
    options = tuple(
        (
            o.num_devices,
            o.num_nodes,
            o.runtime_s,
            o.device_type,
            o.startup_s,
            o.save_s,
            o.evaluate_s,
            o.host_memory_bytes,
        )
        for o in job.options
    )
    return options, job.after, job.release_s, job.deadline_s, job.weight, job.group, job.started
