"""The error that a run reports for base models that do not exist."""

import pytest

from ringmaster.errors import InputError, LedgerError
from ringmaster.flows.batch.run_folder import base_weights, with_models
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


class NamingLedger:
    """Records the models of job y.z, and of job z-lr1 whose best model became a version of the name."""

    def __init__(self):
        self.asked = []

    def jobs_of(self, name):
        self.asked.append(name)
        return ["y.z", "z-lr1"]


@pytest.mark.parametrize(
    ("batch", "job", "other"),
    [("x", "y.z", None), ("x.y", "z", "y.z of batch x"), ("x.y", "x.y.z", "y.z of batch x.y.x"), ("x", "z", None)],
)
def test_a_job_whose_model_has_the_name_of_another_jobs_is_refused_with_both_readings(tmp_path, batch, job, other):
    text = (
        f"name: {batch}\njobs:\n  - {{name: {job}, model: {{architecture: LlamaForCausalLM}}, data: {{source: digits}}"
    )
    ledger, batch_of_it = NamingLedger(), parse_batch(text + ", num_steps: 1}\n", folder=tmp_path, name="b.yaml")
    if other is None:
        with_models(batch_of_it, ledger, None, tmp_path)
        assert ledger.asked == ([] if "." not in job else ["x.y.z"])
        return
    with pytest.raises(InputError) as raised:
        with_models(batch_of_it, ledger, None, tmp_path)
    assert f"is that of job {job} of batch {batch}, and of job {other}, which has made versions" in str(raised.value)
