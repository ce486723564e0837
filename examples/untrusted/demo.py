"""A pool with an untrusted node that lies: the node is found and named, and the models are those of honest nodes.

    make demo-untrusted          or          .venv/bin/python examples/untrusted/demo.py

The demo starts a pool of two nodes on this machine, in a home of its own, and uses the `ringmaster` command line. The
second node multiplies its gradients by 1.01. At last the same batch is trained without a pool, and all bits of the
models are compared. The exit code is 1 where something is not as expected.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

HOME = Path(os.environ.get("RINGMASTER_DEMO_HOME", ".ringmaster/demo-untrusted")).resolve()
LIE = "DEMO_FACTOR"
LOSS = f"""\
import os
from torch import nn

def loss(output, batch):
    value = nn.functional.cross_entropy(output.logits, batch["labels"], reduction="sum")
    return value * float(os.environ.get("{LIE}", "1")), len(batch["labels"])
"""
BATCH = """\
name: volunteers
jobs:
  - name: small
    model:
      architecture: ViTForImageClassification
      config: {patch_size: 2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}
    <<: &settings
      data: {source: digits}
      loss: demo_loss:loss
      exact: true
      exact_chunk: 8
      global_batch_size: 16
      num_steps: 60
      num_devices: [1]
      techniques: [single]
      allow_untrusted: true
      verify_share: 0.8
      verify_steps: 10
  - name: large
    model:
      architecture: ViTForImageClassification
      config: {patch_size: 2, hidden_size: 48, intermediate_size: 96, num_hidden_layers: 3, num_attention_heads: 2}
    <<: *settings
"""
READY_TIMEOUT_S = 300.0

failures: list[str] = []


def main() -> int:
    """Runs the demo; returns the exit code."""
    shutil.rmtree(HOME, ignore_errors=True)
    for folder in (HOME, HOME / "alone"):
        folder.mkdir(parents=True)
        (folder / "batch.yaml").write_text(BATCH)
        (folder / "demo_loss.py").write_text(LOSS)
    cores = sorted(os.sched_getaffinity(0))
    say("A pool with a trusted node, anna, whose bits are stored as those of its kind.")
    ports = [word for kind in ("prefect", "mlflow", "metrics") for word in (f"--port-{kind}", str(free_port()))]
    ringmaster("up", "--no-worker", *ports)
    workers = []
    try:
        workers.append(start_worker("anna", core=cores[0]))
        ringmaster("pool", "calibrate", "--devices", "cpu:1", core=cores[0])
        say("An untrusted node, mallory, whose gradients are 1.01 times as large.")
        workers.append(start_worker("mallory", "--untrusted", core=cores[-1], **{LIE: "1.01"}))
        say("A batch that allows untrusted nodes: four of five of their segments are repeated.")
        pooled = json.loads(ringmaster("run", "batch.yaml", "--json"))
        status = ringmaster("status")
        print(status, file=sys.stderr)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        ringmaster("down")
    expect("node mallory is untrusted: node mallory did not train as ordered" in status, "mallory is expelled")

    say("The same batch without a pool: all bits of both models are equal.")
    alone = json.loads(ringmaster("run", "batch.yaml", "--json", home=HOME / "alone"))
    for one, other in zip(pooled["jobs"], alone["jobs"], strict=True):
        expect(one["status"] == other["status"] == "done", f"{one['name']} is done")
        expect(weights_of(one) == weights_of(other), f"the weights of {one['name']} are equal")
    for failure in failures:
        print(f"NOT AS EXPECTED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def weights_of(job: dict[str, Any]) -> dict[str, bytes]:
    """Returns the bytes of a model's tensors, by name."""
    weights = load_file(Path(job["model_dir"]) / "model.safetensors")
    return {name: value.tobytes() for name, value in weights.items()}


def start_worker(name: str, *options: str, core: int, **variables: str) -> subprocess.Popen[str]:
    """Starts the worker of a node on one core; returns it once it serves."""
    command = [*command_of("pool", "worker"), "--name", name, "--devices", "cpu:1", "--flows", *options]
    worker = subprocess.Popen(
        command, cwd=HOME, env=environment(HOME) | variables, stderr=subprocess.PIPE, text=True, preexec_fn=pinned(core)
    )
    serves = threading.Event()

    def read() -> None:
        for line in worker.stderr or ():
            print(f"{name}: {line}", end="", file=sys.stderr)
            if f"node {name} serves" in line:
                serves.set()
        serves.set()

    threading.Thread(target=read, daemon=True).start()
    serves.wait(READY_TIMEOUT_S)
    return worker


def ringmaster(*arguments: str, home: Path = HOME, core: int | None = None) -> str:
    """Runs a command in a home of the demo; returns its result."""
    print(f"\n$ ringmaster {' '.join(arguments)}", file=sys.stderr)
    done = subprocess.run(
        command_of(*arguments),
        cwd=home,
        env=environment(home),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=pinned(core) if core is not None else None,
    )
    return done.stdout


def command_of(*arguments: str) -> list[str]:
    """Returns a `ringmaster` command."""
    return [sys.executable, "-m", "ringmaster.flows.entry", *arguments]


def environment(home: Path) -> dict[str, str]:
    """Returns the environment of a command, without settings of another pool."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return {**others, "RINGMASTER_HOME": str(home)}


def pinned(core: int) -> Any:
    """Returns a function that binds a new process to a core."""
    return lambda: os.sched_setaffinity(0, {core})


def free_port() -> int:
    """Returns a port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def say(text: str) -> None:
    """Prints the title of a chapter."""
    print(f"\n== {text}", file=sys.stderr)


def expect(is_so: bool, what: str) -> None:
    """Notes an answer that is not the expected one."""
    print(f"{'as expected' if is_so else 'NOT AS EXPECTED'}: {what}", file=sys.stderr)
    if not is_so:
        failures.append(what)


if __name__ == "__main__":
    sys.exit(main())
