"""Components that a job names are checked against its model before it trains."""

from dataclasses import replace

import pytest
from torch import nn

from ringmaster.features.composition.job import Components
from ringmaster.features.composition.trainer import check_components
from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec


def job(**components):
    data, features = DataSpec(source="digits"), (Components(components=components),)
    return Job(name="it", model=ModelSpec(), data=data, num_steps=1, features=features)


def test_a_prefix_without_a_parameter_is_told_with_what_there_is():
    model = nn.ModuleDict({"tower": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 1)})
    check_components(job(eye="tower", layer="tower.0", words="head.weight"), model)
    for prefix in ("towe", "tower.1", "head.weight.x"):
        with pytest.raises(ValueError, match=rf"eye is '{prefix}'.*begin with one of head, tower"):
            check_components(job(eye=prefix), model)


def test_what_an_adapter_calls_its_parts_is_another_matter():
    check_components(replace(job(eye="base_model"), adapter=Adapter()), nn.ModuleDict({"head": nn.Linear(2, 1)}))
