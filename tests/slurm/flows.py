"""Flows that tests run as jobs of Slurm."""

import json
import os
import signal
import threading
from pathlib import Path

from prefect import flow

SHOWN = ("RINGMASTER_ALLOCATION", "RINGMASTER_NODE", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_ON_NODE", "A_PASSWORD")


@flow(persist_result=False)
def serve(folder: str) -> None:
    """Serves until SIGTERM, as a node does; writes down when it begins and how it ends."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    facts = {"pid": os.getpid(), **{name: os.environ.get(name) for name in SHOWN}}
    Path(folder, "begun.json").write_text(json.dumps(facts))
    while not stopping.wait(0.1) and not Path(folder, "end").exists():
        pass
    Path(folder, "ended").write_text("SIGTERM" if stopping.is_set() else "by itself")
