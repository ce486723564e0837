"""The options of a flow run's job, as the base job template of a work pool of type `slurm` offers them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.workers.base import BaseJobConfiguration, BaseVariables
from pydantic import Field

from ringmaster.tasks.pool.providers.slurm.commands import comment_of, environment_of_jobs, slurm_time

BATCH_SCRIPT = (Path(__file__).parent / "batch_script.sh").read_text()
NOTICE_S = 60
GRACE_S = 60
COMMAND, IS_SHARED = "FLOW_RUN_COMMAND", "JOB_IS_SHARED"
# -P: a file in the working folder with the name of a library must not be imported instead of the library. Prefect's own
# default, `prefect flow-run execute`, starts a second interpreter, which takes seconds more.
DEFAULT_COMMAND = f"{sys.executable} -P -m prefect.engine"


class SlurmVariables(BaseVariables):
    """What a work pool, a deployment or a flow run chooses of its job. Each job has one node."""

    partition: str | None = Field(default=None, description="The partition; the cluster's default partition if empty.")
    account: str | None = Field(default=None, description="The account that pays for the job.")
    qos: str | None = Field(default=None, title="QOS", description="The quality of service.")
    time: str | None = Field(
        default=None,
        title="Time limit",
        description="For how long a node is lent: 8h, 30m, or as sbatch reads it: 1-12:00:00. The partition's limit if "
        "empty.",
        examples=["8h"],
    )
    gres: str | None = Field(
        default=None, title="Generic resources", description="The GPUs of the job.", examples=["gpu:8"]
    )
    exclusive: bool = Field(default=True, description="Whether the job has the node to itself.")
    cpus: int | None = Field(default=None, title="CPUs", ge=1, description="CPUs of a job that shares its node.")
    memory: str | None = Field(
        default="0",
        description="Memory of the job, such as 64G; 0 for all memory of an exclusive node.",
        examples=["64G"],
    )
    notice_s: int = Field(
        default=NOTICE_S,
        ge=0,
        title="Notice (seconds)",
        description="How long before the end of the time limit the job is told to end in order. Slurm may be a minute "
        "early.",
    )
    grace_s: int = Field(
        default=GRACE_S,
        ge=0,
        title="Grace (seconds)",
        description="How long a cancelled flow run has to end in order, before its job is cancelled.",
    )
    sbatch_options: list[str] = Field(
        default_factory=list,
        title="Further options of sbatch",
        description="Every user of the cluster can read them: they must hold no passwords.",
        examples=[["--constraint=a100", "--exclude=node7"]],
    )
    working_dir: str | None = Field(default=None, title="Working folder", description="The worker's if empty.")
    log_dir: str | None = Field(
        default=None,
        title="Folder of logs",
        description="Where the output of the jobs is stored, a file each: a folder that nodes and worker share. "
        "By default slurm/ in RINGMASTER_HOME.",
    )
    batch_script: str = Field(default=BATCH_SCRIPT, description="The batch script.", json_schema_extra={"format": "sh"})


class SlurmJobConfiguration(BaseJobConfiguration):
    """The job of one flow run."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    gres: str | None = None
    exclusive: bool = True
    cpus: int | None = None
    memory: str | None = "0"
    notice_s: int = NOTICE_S
    grace_s: int = GRACE_S
    sbatch_options: list[str] = Field(default_factory=list)
    working_dir: str | None = None
    log_dir: str | None = None
    batch_script: str = BATCH_SCRIPT

    def prepare_for_flow_run(self, *arguments: Any, **options: Any) -> None:
        """Sets what depends on the flow run."""
        self.command = self.command or DEFAULT_COMMAND
        super().prepare_for_flow_run(*arguments, **options)

    def arguments(self, *, flow_run: str, log_dir: Path) -> list[str]:
        """Returns the options of sbatch. They are visible to all users of the cluster.

        flow_run: id of the flow run.
        log_dir: the folder for the output of jobs.
        """
        name = re.sub(r"[^\w.-]+", "-", self.name or "flow-run")
        given: dict[str, Any] = {
            "job-name": name,
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

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of sbatch and the job: the worker's, and that of the flow run.

        It may hold passwords: Slurm keeps it from other users, unlike options.
        """
        given = {name: value for name, value in self.env.items() if value is not None}
        shared = {} if self.exclusive else {IS_SHARED: "1"}
        return {**environment_of_jobs(own), **given, **shared, COMMAND: self.command or DEFAULT_COMMAND}
