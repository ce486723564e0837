"""The error that a run reports for base models that do not exist."""

import pytest

from ringmaster.errors import InputError, LedgerError
from ringmaster.flows.batch.run_folder import base_weights
from ringmaster.tasks.batch import parse_batch
from ringmaster.tasks.storage.journal import Journal

BATCH = """\
jobs:
  - &job {name: a, base: "models:/nope@champion", model: {architecture: LlamaForCausalLM}, data: {source: digits},
          num_steps: 1}
  - {<<: *job, name: b}
  - {<<: *job, name: c}
  - {<<: *job, name: d, base: "models:/gone/1"}
"""


class EmptyLedger:
    def __init__(self):
        self.asked = []

    def resolve_model(self, uri):
        self.asked.append(uri)
        raise LedgerError(f"{uri} is not there; there are ['digits']")


def test_a_model_that_is_not_there_is_told_once_whoever_names_it(tmp_path):
    batch = parse_batch(BATCH, folder=tmp_path, name="trials")
    journal, ledger = Journal.of_file(tmp_path / "journal.db"), EmptyLedger()
    with pytest.raises(InputError) as raised:
        base_weights(batch, ledger, journal, tmp_path)
    journal.close()
    assert str(raised.value).splitlines() == [
        "job a and 2 more: base models:/nope@champion: models:/nope@champion is not there; there are ['digits']",
        "job d: base models:/gone/1: models:/gone/1 is not there; there are ['digits']",
    ]
    assert ledger.asked == ["models:/nope@champion", "models:/gone/1"]
