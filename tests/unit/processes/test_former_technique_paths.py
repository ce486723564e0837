"""Orders and records that an earlier release has stored name modules that have other names now."""

import pytest

from ringmaster.techniques import registry


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("ringmaster.techniques.context:Context", "context"),
        ("ringmaster.techniques.tensor:TensorParallel", "tensor"),
        ("ringmaster.techniques.expert:Expert", "expert"),
        ("ringmaster.techniques.serving.gang_technique:Served", "endpoint"),
    ],
)
def test_a_stored_path_of_an_earlier_release_is_loaded(path, name):
    assert registry.load(path).name == name
