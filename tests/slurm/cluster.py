"""A Slurm cluster on this machine: the real daemons, two nodes with two CPUs and two devices each that stand for GPUs.

There is no accounting database. Partition `urgent` takes nodes from jobs in `batch`. BatchStartTimeout is 10 s by
default: on a busy machine, where a job may start later, Slurm would end it when its node registers, as after a resume.
"""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ringmaster.features.slurm.slurm_engine import Slurm
from tests.cluster.machines import end
from tests.cluster.waiting import until
from tests.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=15
BatchStartTimeout=300
KillWait=20
JobRequeue=1
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=n[1-{num_nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=2 RealMemory=8000 Gres=gpu:2
PartitionName=batch Nodes=n[1-{num_nodes}] Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=REQUEUE GraceTime=8
PartitionName=urgent Nodes=n[1-{num_nodes}] MaxTime=INFINITE PriorityTier=100 PreemptMode=OFF
"""


def missing():
    """Returns what a test cluster lacks on this machine, in words; empty if nothing."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if absent:
        packages = "slurm-wlm slurmctld slurmd slurm-client munge"
        return f"{', '.join(absent)} cannot be found (on Debian and Ubuntu: apt install {packages})"
    return "" if os.geteuid() == 0 else "Slurm's daemons have to be started as root"


class SlurmCluster:
    """The daemons of a cluster. `slurm` calls its commands, for which `environment` names its configuration."""

    def __init__(self, *, num_nodes=2):
        if lacking := missing():
            pytest.skip(f"no Slurm cluster can be started: {lacking}")
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path: sockets have at most 108 characters
        self.nodes = tuple(f"n{number}" for number in range(1, num_nodes + 1))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.slurm = Slurm(run=lambda command, input, env: self.command(*command, input=input, check=False))
        self._processes = {}
        self._configure(num_nodes)

    def _configure(self, num_nodes):
        for name in ("run", "state", "log", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)  # munge refuses sockets in folders that others may write to
        key = self.folder / "run" / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        for node in self.nodes:
            for number in range(2):
                device = self.folder / "run" / f"gpu-{node}-{number}"
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        gpus = [f"NodeName={node} Name=gpu File={self.folder}/run/gpu-{node}-[0-1]\n" for node in self.nodes]
        (self.folder / "gres.conf").write_text("".join(gpus))
        port, *ports = free_ports(1 + num_nodes)
        text = CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            port=port,
            ports=",".join(map(str, ports)),
            folder=self.folder,
            num_nodes=num_nodes,
        )
        (self.folder / "slurm.conf").write_text(text)

    def start(self):
        """Starts the daemons; returns when all nodes are idle."""
        run = self.folder / "run"
        self._launch(
            "munged",
            *("--foreground", "--force", f"--key-file={run}/munge.key", f"--socket={run}/munge.socket"),
            *(f"--pid-file={run}/munged.pid", f"--log-file={self.folder}/log/munged.log"),
            f"--seed-file={run}/munge.seed",
        )
        until("munged listens", (run / "munge.socket").exists)
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        until("all nodes are idle", self.are_all_idle)
        return self

    def start_controller(self):
        """Starts slurmctld, which finds the state of the one before."""
        self._launch("slurmctld", "-D")

    def start_node(self, node):
        """Starts the slurmd of a node."""
        self._launch("slurmd", "-D", "-N", node, name=node)

    def kill(self, name):
        """Kills a daemon, "slurmctld" or that of a node; the jobs' processes continue."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def wait_until_saved(self, job):
        """Waits until slurmctld has stored a job, which takes seconds: one that dies before forgets it."""
        file, began_s = self.folder / "state" / "job_state", time.time()
        self.command("scontrol", "update", f"jobid={job}", "admincomment=stored")
        until("the job is stored", lambda: file.exists() and file.stat().st_mtime > began_s)

    def heal(self):
        """Restarts the daemons that a test has killed, ends all jobs, and returns drained nodes."""
        for name in {"slurmctld", *self.nodes} - self._processes.keys():
            self.start_controller() if name == "slurmctld" else self.start_node(name)
        until("slurmctld answers", lambda: self.command("scontrol", "ping", check=False).returncode == 0)
        self.command("scancel", "--user=root", check=False)
        for node in self.nodes:
            self.command("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        until("all nodes are idle", self.are_all_idle)

    def are_all_idle(self):
        """Returns whether every node accepts jobs and has none."""
        done = self.command("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%T", check=False)
        return done.returncode == 0 and done.stdout.split() == ["idle"] * len(self.nodes)

    def command(self, *words, check=True, input=None):
        """Runs a command of Slurm to its end."""
        return subprocess.run(
            words,
            input=input or "",
            env={**os.environ, **self.environment, "PATH": PATH},
            cwd="/tmp",
            check=check,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def submit(self, *options, script):
        """Submits a job; returns its number."""
        done = self.command("sbatch", "--parsable", f"--output={self.folder}/log/%j.out", *options, input=script)
        return int(done.stdout.split(";")[0])

    def output(self, job):
        """Returns the output of a job that `submit` has submitted."""
        file = self.folder / "log" / f"{job}.out"
        return file.read_text() if file.exists() else ""

    def job(self, number):
        """Returns a job as Slurm describes it, None if it does not know it."""
        return next((job for job in self.slurm.jobs() if job.id == number), None)

    def kill_processes(self, number):
        """Kills all processes of a job at once, its batch script included."""
        mark = f"SLURM_JOB_ID={number}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)

    def is_over(self, number):
        """Returns whether all processes of a job have ended."""
        job = self.job(number)
        return job is None or job.has_ended

    def log(self, name):
        """Returns the end of a daemon's log."""
        return (self.folder / "log" / f"{name}.out").read_text(errors="replace")[-3000:]

    def close(self):
        """Ends all jobs and daemons."""
        if "slurmctld" in self._processes:
            self.command("scancel", "--user=root", check=False)
            until("all jobs are over", lambda: all(job.has_ended for job in self.slurm.jobs()))
        for process in reversed(list(self._processes.values())):
            end(process)
        shutil.rmtree(self.folder)

    def _launch(self, program, *arguments, name=None):
        name = name or program
        path = shutil.which(program, path=PATH)
        assert re.fullmatch(r"\w+", program) and path is not None
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [path, *arguments],
                env={**os.environ, **self.environment, "PATH": PATH},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
