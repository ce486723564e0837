"""Trains the batch of batch.yaml with a user's own technique among the candidates; one job requires it.

    .venv/bin/python examples/custom/run.py

A package would declare the technique in its own pyproject.toml instead, so that it is known wherever it is installed:

    [project.entry-points."ringmaster.techniques"]
    one-message = "mypackage.my_technique:OneMessage"
"""

from dataclasses import replace
from pathlib import Path

from my_technique import OneMessage

from ringmaster import Batch, train_batch
from ringmaster.tasks.batch import load_batch
from ringmaster.techniques import registry

registry.register(OneMessage)
folder = Path(__file__).parent
first, *others = load_batch(folder / "batch.yaml").jobs
jobs = [replace(first, techniques=("one-message",)), *others]
result = train_batch(Batch.of(name="custom", jobs=jobs, folder=folder).to_json())
for job in result.jobs:
    used = [f"{segment['technique']} on {segment['num_devices']}" for segment in job["segments"]]
    print(job["name"], job["status"], *used, job["metrics"])
