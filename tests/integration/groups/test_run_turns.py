"""`ringmaster run` where a device cannot hold all adapters at once: they take turns, bit-equal to separate runs."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal
from tests.integration.flows.test_run import Place
from tests.integration.workbench import is_bit_equal, weights_in

BATCH = """
name: nightly
devices: {{cpu: 2}}
grid:
  - template:
      name: tuned
      model: {{from_pretrained: base}}
      adapter: {{kind: lora, rank: 4}}
      data: {{path: prose.txt, seq_len: 16, vocab_size: 300}}
      optimizer: {{lr: 1.0e-2}}
      global_batch_size: 1
      evaluation: {{max_batches: 2}}
      techniques: {techniques}
    over: {{num_steps: [40, 10, 20, 30]}}
"""
LEADER = "tuned-num_steps40"
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]  # two runs in one test


class TightPlace(Place):
    program = "tests.integration.groups.two_at_a_time"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = TightPlace(tmp_path_factory.mktemp("turns"))
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=64, **shape))
    base.save_pretrained(place.folder / "base")
    place.batch.write_text(BATCH.format(techniques="[single, shared_base]"))
    return place


@pytest.fixture(scope="module")
def alone(place):
    """The weights of each job, trained alone."""
    batch = place.folder / "alone.yaml"
    batch.write_text(BATCH.format(techniques="[single]"))
    with place.run(batch=batch) as run:
        result = run.result(exit_code=0)
    return {job["name"]: weights_in(Path(job["model_dir"])) for job in result["jobs"]}


def assert_took_turns(place, result, alone):
    assert result["status"] == "done"
    assert [(lead, len(members)) for lead, members in result["fusion"]["groups"].items()] == [(LEADER, 3)]
    for job in result["jobs"]:
        assert job["status"] == "done" and {segment["technique"] for segment in job["segments"]} == {"shared_base"}
        assert is_bit_equal(weights_in(Path(job["model_dir"])), alone[job["name"]]), job["name"]
    database = Database(file_url(place.newest / "journal.db"))
    for segment in Journal(database, batch="").segments():
        assert segment.spec.config["at_once"] == 2
    database.close()


def test_jobs_that_take_turns_end_as_each_does_alone(place, alone):
    assert_took_turns(place, place.done(), alone)
