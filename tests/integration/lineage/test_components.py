"""Components of a model that a job names, as a gang that trains the job resolves them."""

import pytest

from ringmaster.features.composition.job import Components
from ringmaster.techniques.processes.gang_events import Steps
from tests.integration.workbench import SINGLE, Layout, is_bit_equal

FSDP = Layout("fsdp", 2, {"reshard": True})


@pytest.mark.parametrize("layout", [SINGLE, FSDP], ids=str)
def test_a_part_that_the_model_does_not_have_ends_the_job_before_its_first_step(bench, tmp_path, layout):
    ended = bench.train(bench.job(features=(Components(components={"tower": "vision_model"}),)), layout, tmp_path)
    assert ended.outcome.status == "invalid", "another try would end the same way"
    assert "tower is 'vision_model', and no parameter of the model is within it" in ended.outcome.message
    assert "To fix: begin with one of lm_head, model" in ended.outcome.message
    assert not [event for event in ended.events if isinstance(event, Steps)]
    assert not (tmp_path / "model").exists()


def test_a_part_that_it_has_changes_nothing_of_its_training(bench, tmp_path):
    named = bench.train(bench.job(features=(Components(components={"stem": "model.layers"}),)), SINGLE, tmp_path)
    assert named.outcome.status == "done"
    assert is_bit_equal(named.weights, bench.reference(bench.job()).weights)
