"""Ranks that die, hang and cannot write; the pool resumes from their last checkpoint."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.checks import assert_well
from tests.cluster.jobs import profiles_of, torch_job
from tests.cluster.waiting import until
from tests.integration.workbench import Layout

BALLAST = 1_000_000  # makes a checkpoint of 12 MB, whose saving takes long enough to be interrupted


def strike(pool, job, number):
    """Sends a signal to the process that trains a job; returns its pid and the time."""
    pid, before_s = pool.trace.of(job=job)[-1]["pid"], time.monotonic()
    os.kill(pid, number)
    return pid, before_s


def test_a_rank_that_is_killed(pool, bench, recovered):
    job = torch_job("killed", trace=pool.trace.file)
    batch = pool.submit([job])
    pool.wait_for_checkpoint(batch)
    pid, before_s = strike(pool, "killed", signal.SIGKILL)
    again = pool.trains("killed", after_s=before_s, not_by=pid)
    recovered("a rank killed", again["s"] - before_s)
    pool.finish(batch)
    assert_well(pool, batch, [job], bench)


def test_a_rank_of_a_gang_over_two_nodes_that_is_killed(pool, bench, recovered):
    job = replace(torch_job("wide", trace=pool.trace.file), exact=True, exact_chunk=4)
    profiles = profiles_of(job, techniques=("ddp",))
    batch = pool.submit([job], profiles={"wide": profiles})
    pool.wait_for_checkpoint(batch)
    assert {step["node"] for step in pool.trace.of(job="wide")} == {node.mark for node in pool.nodes.values()}
    before = {step["pid"] for step in pool.trace.of(job="wide")}
    _, before_s = strike(pool, "wide", signal.SIGKILL)
    again = until(
        "both ranks train again",
        lambda: [step for step in pool.trace.of(job="wide", after_s=before_s) if step["pid"] not in before],
    )
    recovered("a rank killed, of a gang over two nodes", again[0]["s"] - before_s)
    pool.finish(batch)
    layout = Layout("single", 1, profiles[0].config)  # exact jobs have the same bits on one device
    assert_well(pool, batch, [job], bench, layouts={"wide": layout})


def test_a_rank_that_is_stopped(pool, bench, recovered):
    job = torch_job("stopped", trace=pool.trace.file)
    batch = pool.submit([job])
    pool.wait_for_checkpoint(batch)
    pid, before_s = strike(pool, "stopped", signal.SIGSTOP)
    again = pool.trains("stopped", after_s=before_s + 0.5, not_by=pid)
    recovered("a rank stopped (SIGSTOP)", again["s"] - before_s)
    pool.finish(batch)
    assert_well(pool, batch, [job], bench)


def stands(pid):
    """Returns whether all threads of a process are stopped."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def caught_writing(pid, root):
    """Returns whether a process is in the middle of a checkpoint under `root`; stops it in this case."""
    if not list(root.glob("step-*.tmp")):
        return False
    os.kill(pid, signal.SIGSTOP)
    until("it stands", lambda: stands(pid), every_s=0.001)
    if list(root.glob("step-*.tmp")):
        return True
    os.kill(pid, signal.SIGCONT)  # the checkpoint was complete by then
    return False


def test_a_rank_that_is_killed_during_a_checkpoint(pool, bench, recovered):
    job = torch_job("saving", trace=pool.trace.file, ballast=BALLAST, num_steps=300, step_s=0.3)
    batch = pool.submit([job])
    root = pool.home / "batches" / batch / "checkpoints" / "saving"
    pool.wait_for_checkpoint(batch)
    pid = pool.trace.of(job="saving")[-1]["pid"]
    until("a checkpoint is being written", lambda: caught_writing(pid, root), every_s=0.002)
    before_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    again = pool.trains("saving", after_s=before_s, not_by=pid)
    recovered("kill -9 during a checkpoint", again["s"] - before_s)
    pool.finish(batch)
    assert_well(pool, batch, [job], bench)
    assert not list(root.glob("step-*.tmp"))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one megabyte, which needs root."""
    if os.geteuid() != 0:
        pytest.skip("a small disk can be made only as root")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(file):
    """Writes until the disk is full."""
    with contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_checkpoint_disk_that_is_full_and_then_freed(pool, bench, small_disk, recovered):
    job = torch_job("full", trace=pool.trace.file)
    batch = pool.submit([job], checkpoint_root=str(small_disk))
    pool.wait_for_checkpoint(batch)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:

        def fails_to_checkpoint():
            fill(file)  # repeated: a checkpoint that was just completed frees the space of an older one
            return pool.said(batch, "checkpoint_failed")

        failed = until("a checkpoint fails", fails_to_checkpoint)
    before_s = time.monotonic()
    filler.unlink()
    pool.wait_for_checkpoint(batch, beyond=failed[-1].content.step)
    recovered("checkpoint disk freed, to the next checkpoint", time.monotonic() - before_s)
    pid, struck_s = strike(pool, "full", signal.SIGKILL)
    pool.trains("full", after_s=struck_s, not_by=pid)
    pool.finish(batch)
    assert_well(pool, batch, [job], bench)
