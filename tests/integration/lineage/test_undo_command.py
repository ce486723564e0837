"""`ringmaster lineage undo` as a command: what an interrupted call has trained is not trained again."""

import signal
import subprocess
import sys

import pytest

from tests.integration.flows.test_run import TIMEOUT_S, Place, Run
from tests.integration.lineage.trained import write_rows

BATCH = """
name: nightly
devices: {cpu: 1}
datasets: {rows: {path: rows.jsonl}}
jobs:
  - name: small
    model: {architecture: GPT2LMHeadModel, config: {n_embd: 32, n_layer: 1, n_head: 2}}
    data: {name: rows, seq_len: 16, vocab_size: 280}
    num_steps: 2000
    evaluation: {max_batches: 2}
"""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_interrupted_call_goes_on_where_it_was(tmp_path):
    place = Place(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl")
    place.batch.write_text(BATCH)
    place.done()
    arguments = [sys.executable, "-m", "ringmaster.flows.entry", "lineage", "undo", "--row", f"{rows}:3", "--json"]

    def call(name):
        with (tmp_path / name).open("wb") as file:
            given = {"cwd": tmp_path, "env": place.environment}
            return Run(subprocess.Popen(arguments, **given, stdout=file, stderr=subprocess.PIPE), tmp_path / name)

    first = call("first")
    first.read_until("small-v1 starts at step 0")
    (folder,) = (place.home / "batches").glob("undo-*/*")
    first.until_checkpointed(folder, job="nightly.small-v1")
    first.process.send_signal(signal.SIGINT)
    _, rest = first.process.communicate(timeout=TIMEOUT_S)
    assert first.process.returncode == 1, (first.said + rest).decode()
    assert "nothing is promoted, and the same command continues" in (first.said + rest).decode()
    second = call("second")
    result = second.result(exit_code=0)
    line, *_ = (line for line in second.said.decode().splitlines() if " at step " in line and " start" in line)
    assert int(line.split(" at step ")[1].split()[0]) > 0, line
    assert result["versions"] == ["nightly.small/2"]
    assert list((place.home / "batches").glob("undo-*/*")) == [folder]  # one run of one batch
