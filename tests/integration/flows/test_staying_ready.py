"""After a command of a terminal its servers stay, and the next one, from another folder, is forked by them."""

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress

import psutil
import pytest
import yaml

JOB = {
    "name": "small",
    "model": {
        "architecture": "LlamaForCausalLM",
        "config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "data": {"source": "python-stdlib", "seq_len": 16, "vocab_size": 512},
    "global_batch_size": 4,
    "num_steps": 2,
}


@contextmanager
def terminal():
    """Yields a terminal, and what was written to it so far."""
    ours, theirs = os.openpty()
    shown = bytearray()

    def read():
        with suppress(OSError):  # its last process has closed it
            while part := os.read(ours, 65536):
                shown.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield theirs, shown
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


@pytest.mark.full
def test_what_a_command_leaves_serves_the_next_one_and_ends_with_down(tmp_path):
    home, other = tmp_path / "home", tmp_path / "other"
    other.mkdir()
    (tmp_path / "batch.yaml").write_text(yaml.safe_dump({"name": "b", "devices": {"cpu": 1}, "jobs": [JOB]}))
    (other / "bad.yaml").write_text("jobs: []\n")
    environment = {**os.environ, "RINGMASTER_HOME": str(home), "RINGMASTER_STAY_S": "600", "HF_HUB_OFFLINE": "1"}
    environment.pop("CI", None)
    ringmaster = [sys.executable, "-m", "ringmaster.flows.entry"]

    def run(*arguments, folder, stderr=subprocess.PIPE):
        return subprocess.run(
            [*ringmaster, *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            check=False,
        )

    with terminal() as (stderr, shown):
        first = run("run", "batch.yaml", "--json", folder=tmp_path, stderr=stderr)
        assert first.returncode == 0, shown.decode()
        while "command server" not in (status := run("status", folder=tmp_path).stdout):
            assert "Traceback" not in status
        daemon = psutil.Process(json.loads((home / "daemon.json").read_text())["pid"])
        kept = [daemon, *daemon.children(recursive=True)]
        refused = run("run", "bad.yaml", folder=other, stderr=stderr)
        assert refused.returncode == 2
        second = run("run", "../batch.yaml", "--json", folder=other, stderr=stderr)
        assert json.loads(second.stdout)["status"] == "done"
    assert b"has no job" in shown
    assert "has ended" in run("down", folder=tmp_path).stderr
    assert not psutil.wait_procs(kept, 60)[1]
    assert not [each for each in psutil.process_iter(["environ"]) if str(home) in str(each.info["environ"])]
