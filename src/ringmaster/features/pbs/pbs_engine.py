"""The engine `pbs`: nodes are jobs of OpenPBS or PBS Professional, whose server keeps the history of jobs.

The history (`qmgr -c "set server job_history_enable=true"`) shows how a job has ended. Torque has no output in JSON.
"""

import json
import pwd
import re
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.tasks.pool.batch_scheduler import (
    BatchScheduler,
    SchedulerJob,
    SchedulerNode,
    SchedulerOptions,
    batch_script,
    short_time_s,
)
from ringmaster.tasks.pool.engines import option

FLOW_RUN = "RINGMASTER_FLOW_RUN"
"""Variable of a job that marks it as that of a flow run: the scheduler overwrites the comments of jobs."""
_STATES = {"B": "RUNNING", "E": "COMPLETING", "F": "COMPLETED", "R": "RUNNING", "S": "SUSPENDED", "U": "SUSPENDED"}
_NODE_STATES = {"offline": "DRAIN", "maintenance": "DRAIN", "down": "DOWN", "stale": "DOWN", "state-unknown": "DOWN"}


class Pbs(BatchScheduler):
    """The cluster that the commands of this machine reach, as configured by /etc/pbs.conf or `PBS_CONF_FILE`."""

    name = "pbs"
    title = "PBS"
    server = "The server of PBS"
    ping = "qstat -B"
    submit_command = ("qsub",)
    jobs_command = ("qstat", "-x", "-f", "-F", "json")
    end_command = ("qsig", "-s", "TERM")
    cancel_command = ("qdel",)
    other_commands = ("pbsnodes",)
    clients = "(its package is openpbs-client), with the pbs.conf of the cluster"
    away = re.compile(r"cannot connect|connection (refused|timed out)|communication failure|end of file|munge", re.I)
    over = re.compile(r"unknown job|job has finished|invalid for state of job", re.I)
    variables = re.compile("PBS_(?!CONF_FILE|SERVER)")
    log = "{job}.*.OU"

    def submit(self, options: Sequence[str], *, script: str, environment: Mapping[str, str]) -> int:
        """Submits a batch job; see `BatchScheduler`.

        PBS shows the variables of jobs to other users, but not their scripts: variables follow the first comment there.
        """
        values = {name: value for name, value in environment.items() if name.isidentifier()}
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
        comment = re.match(r"(#.*\n)*", script)
        end = comment.end() if comment is not None else 0
        return super().submit(options, script=f"{script[:end]}{exports}{script[end:]}", environment=environment)

    def read_jobs(self, text: str) -> Sequence[SchedulerJob]:
        """Returns the jobs; see `BatchScheduler`."""
        return [_job(id, row) for id, row in json.loads(text, strict=False).get("Jobs", {}).items()]

    def nodes(self, names: Collection[str]) -> Mapping[str, SchedulerNode]:
        """Returns nodes by their names."""
        rows = json.loads(self._query(("pbsnodes", "-a", "-F", "json")))["nodes"] if names else {}
        return {name: _node(name, row) for name, row in rows.items() if name in names}


def _job(id: str, row: Mapping[str, Any]) -> SchedulerJob:
    limit, begun = row.get("Resource_List", {}).get("walltime"), row.get("stime")
    end_s = None
    if limit and begun:
        hours, minutes, seconds = map(int, limit.split(":"))
        end_s = time.mktime(time.strptime(begun)) + 3600 * hours + 60 * minutes + seconds
    status = row.get("Exit_status", 0)
    return SchedulerJob(
        id=int(id.partition(".")[0]),
        states=frozenset({_STATES.get(row["job_state"], "PENDING")}),
        node=row.get("exec_host", "").partition("/")[0],
        user_id=_user_id(row["Job_Owner"].partition("@")[0]),
        flow_run=row.get("Variable_List", {}).get(FLOW_RUN, ""),
        num_restarts=max(row.get("run_count", 0) - 1, 0),
        end_s=end_s,
        exit=f"signal {status - 256}" if status > 256 else f"exit status {status}",
        reason=row.get("comment", ""),
    )


def _node(name: str, row: Mapping[str, Any]) -> SchedulerNode:
    states = frozenset(_NODE_STATES.get(state, state) for state in row["state"].split(","))
    return SchedulerNode(name=name, states=states, reason=row.get("comment", ""))


def _user_id(name: str) -> int:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return -1


# Jobs are never requeued (-r n).
BATCH_SCRIPT = batch_script(Pbs.name, directive="#PBS", job="${PBS_JOBID%%.*}", node="$(hostname)", restarts="0")


@dataclass(frozen=True, kw_only=True)
class PbsOptions(SchedulerOptions):
    """The resource request of each node. Empty fields are left to the defaults of PBS."""

    scheduler = Pbs

    name: str = "pbs"
    queue: str | None = option(None, "Queue of PBS; the server's default queue if empty.", flag="--queue")
    select: str = option(
        "1:ncpus=1",
        "Chunk of a PBS job, for example 1:ncpus=32:ngpus=8:mem=200gb.",
        flag="--select",
        examples=["1:ncpus=32:ngpus=8:mem=200gb"],
    )
    qsub_options: list[str] = option(
        [],
        "Further option of qsub, for example -Aml; may be repeated. Every user of the cluster can read it: it must "
        "hold no password.",
        flag="--qsub",
        title="Further options of qsub",
    )
    batch_script: str = option(BATCH_SCRIPT, "The batch script.", json_schema_extra={"format": "sh"})

    def arguments(self, *, job_name: str, flow_run: str, log_dir: Path) -> list[str]:
        """Returns the options of qsub; see `SchedulerOptions`."""
        seconds = short_time_s(self.time or "")
        resources = {
            "select": self.select,
            "place": "excl" if self.exclusive else None,
            "walltime": self.time if seconds is None else str(seconds),
        }
        options = ["-N", job_name, "-v", f"{FLOW_RUN}={flow_run}", "-o", f"{log_dir}/", "-j", "oe", "-r", "n"]
        options += ["-S", "/bin/bash", *(["-q", self.queue] if self.queue else [])]
        for name, value in resources.items():
            options += ["-l", f"{name}={value}"] if value else []
        return [*options, *self.qsub_options]
