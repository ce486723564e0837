"""The batch of batch.yaml, with a technique of one's own among those that are tried.

    python examples/custom/run.py

A package would rather name it in its own pyproject.toml, and have it wherever it is installed:

    [project.entry-points."ringmaster.techniques"]
    one-message = "mypackage.my_technique:OneMessage"
"""

from pathlib import Path

from my_technique import OneMessage

from flows import train_batch
from techniques import registry

registry.register(OneMessage)
result = train_batch(str(Path(__file__).parent / "batch.yaml"))
for job in result.jobs:
    used = [f"{segment['technique']} on {segment['num_devices']}" for segment in job["segments"]]
    print(job["name"], job["status"], *used, job["metrics"])
