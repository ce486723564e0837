"""The commands of Slurm that a pool needs: sbatch, squeue, scancel and scontrol.

Neither an accounting database nor slurmrestd is used. JSON is read in the form of Slurm 22.05, and in that of later
releases, where a number may be {"set": true, "number": 5} and a state a list of flags.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence

from ringmaster.errors import EngineUnavailable, SlurmError
from ringmaster.tasks.pool.providers.slurm.records import (
    Incomplete,
    SlurmJob,
    SlurmNode,
    SlurmPartition,
    jobs_of,
    nodes_of,
    partitions_of,
)

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
        said = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
        if _AWAY.search(said):
            raise EngineUnavailable(_away(said))
        raise SlurmError(f"Slurm refuses {name}: {said}")


_INSTALL = (
    "To fix: use a machine from which jobs can be submitted, such as a login node "
    "(on Debian and Ubuntu: apt install slurm-client), with the slurm.conf of the cluster"
)


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
