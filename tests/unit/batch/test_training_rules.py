"""How a job trains is judged only where its values are of the right types; the schema reports the others."""

from typing import Any

import pytest

from ringmaster.tasks.batch.rules import training_findings


@pytest.mark.parametrize("name", [["sgd"], {"sgd": 1}, 3, None])
def test_a_name_that_is_not_text_is_left_to_the_schema(name: Any):
    job = {"optimizer": {"name": name, "options": {"momentum": 0.9}}, "schedule": {"name": name}}
    assert [*training_findings(job)] == []
