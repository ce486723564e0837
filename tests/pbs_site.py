#!/usr/bin/env python3
"""The commands of PBS for a cluster of two machines that are this one, each for one job; jobs are real processes.

Each command is this file under its name. What the server knows is in the folder `state` next to it.
"""

import fcntl
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(__file__).absolute().parent / "state"
NODES = ("pbs1", "pbs2")
KILL_DELAY_S = 10
PROGRAMS = ("qsub", "qstat", "qsig", "qdel", "pbsnodes", "hostname")


class Site:
    """The commands in a folder, to be put on PATH; a test sets files of its state."""

    def __init__(self, folder):
        self.folder, self.state = folder, folder / "state"
        self.state.mkdir(parents=True)
        for name in PROGRAMS:
            shutil.copy(__file__, folder / name)
            (folder / name).chmod(0o755)

    def jobs(self):
        """What the server knows of each job, by number."""
        return {int(file.stem): json.loads(file.read_text()) for file in self.state.glob("*.json")}


def stored(job):
    aside = STATE / f"{job['id']}.aside"
    aside.write_text(json.dumps(job))
    aside.replace(STATE / f"{job['id']}.json")


def jobs():
    return sorted((json.loads(file.read_text()) for file in STATE.glob("*.json")), key=lambda job: job["id"])


def schedule():
    """Starts jobs that wait on machines that are free, and notes which have ended."""
    for job in jobs():
        status = STATE / f"{job['id']}.status"
        if job["state"] in "RE" and status.exists():
            stored({**job, "state": "F", "status": int(status.read_text() or 0)})
    free = [name for name in NODES if name not in [job["host"] for job in jobs() if job["state"] in "RE"]]
    for job, host in zip([job for job in jobs() if job["state"] == "Q"], free, strict=False):
        log = (STATE.parent / f"{job['id']}.log").open("wb")
        environment = {"PATH": "/usr/bin:/bin", "PBS_JOBID": f"{job['id']}.site", "HOST_OF_JOB": host}
        run = (
            f"bash {STATE}/{job['id']}.sh; echo $? > {STATE}/{job['id']}.ended; mv {STATE}/{job['id']}.{{ended,status}}"
        )
        keeper = subprocess.Popen(
            ["bash", "-c", f"trap : TERM; {run}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        stored({**job, "state": "R", "host": host, "pid": keeper.pid, "begun": time.ctime()})


def qsub(words):
    options, lists = dict(zip(words[::2], words[1::2], strict=True)), words[1::2]
    if options.get("-q") == "nope":
        sys.exit("qsub: Unknown queue")
    number = 1 + len(list(STATE.glob("*.sh")))
    (STATE / f"{number}.sh").write_text(sys.stdin.read())
    limit = next((word.partition("=")[2] for word in lists if word.startswith("walltime=")), "3600")
    variables = dict([options["-v"].split("=", 1)])
    stored({"id": number, "state": "Q", "host": "", "variables": variables, "limit_s": int(limit), "words": words})
    schedule()
    print(f"{number}.site")


def qstat(words):
    rows = {}
    for job in jobs():
        minutes, seconds = divmod(job["limit_s"], 60)
        rows[f"{job['id']}.site"] = {
            "Job_Owner": f"{getpass.getuser()}@site",
            "job_state": job["state"],
            "exec_host": f"{job['host']}/0" if job["host"] else "",
            "Resource_List": {"walltime": f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"},
            "Variable_List": job["variables"],
            "run_count": int(bool(job["host"])),
            **({"stime": job["begun"]} if "begun" in job else {}),
            **({"Exit_status": job["status"]} if "status" in job else {}),
        }
    print(json.dumps({"pbs_version": "23.06", **({"Jobs": rows} if rows else {})}))


def job_of(words, program):
    job = next((job for job in jobs() if job["id"] == int(words[-1])), None)
    if job is None or job["state"] == "F":
        sys.exit(f"{program}: {'Unknown Job Id' if job is None else 'Job has finished'} {words[-1]}.site")
    return job


def qsig(words):
    os.killpg(job_of(words, "qsig")["pid"], signal.SIGTERM)


def qdel(words):
    job = job_of(words, "qdel")
    if job["state"] == "Q":
        return stored({**job, "state": "F", "status": 271})
    os.killpg(job["pid"], signal.SIGTERM)
    subprocess.Popen(
        ["bash", "-c", f"sleep {KILL_DELAY_S}; kill -9 -- -{job['pid']} && echo 265 > {STATE}/{job['id']}.status"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return stored({**job, "state": "E"})


def pbsnodes(words):
    def row(name):
        reason = STATE / f"offline-{name}"
        return {"state": "job-busy,offline", "comment": reason.read_text()} if reason.exists() else {"state": "free"}

    print(json.dumps({"nodes": {name: row(name) for name in NODES}}))


def main():
    program = Path(sys.argv[0]).name
    if program == "hostname":
        print(os.environ.get("HOST_OF_JOB", "login"))
        return
    if (STATE / "away").exists():
        sys.exit(f"Connection refused\n{program}: cannot connect to server site (errno=15010)")
    with (STATE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), False)
        schedule()
        assert re.fullmatch("q?[a-z]+", program)
        globals()[program](sys.argv[1:])


if __name__ == "__main__":
    main()
