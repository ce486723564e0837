"""Configs of every built-in technique: each one that the search may select trains the same model."""

from dataclasses import replace

import pytest

from ringmaster.techniques import registry
from ringmaster.techniques.black_box import BlackBox
from tests.integration.techniques.test_conformance import assert_trains_the_same
from tests.integration.techniques.test_expert import MIXTRAL
from tests.integration.workbench import LLAMA, Layout

pytestmark = pytest.mark.full
MODEL = replace(LLAMA, config={**LLAMA.config, "num_hidden_layers": 4, "num_key_value_heads": 2})
NAMES = [name for name, path in registry.BUILTIN.items() if not isinstance(registry.load(path), BlackBox)]
NAMES.remove("local")  # it trains another model than `single`: see test_local_updates.py


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_every_config_that_is_offered_trains_the_same(bench, tmp_path, name):
    num_devices = {"mesh": 4, "offload": 1}.get(name, 2)
    technique, shape = registry.load(registry.dotted_path(name)), bench.shape(num_devices)
    job = bench.job(MIXTRAL if name == "expert" else MODEL, techniques=(name,), num_steps=3)
    facts = bench.facts(job)
    assert technique.supports(job, shape, facts) is None
    configs = list(technique.configs(job, shape, facts))
    assert configs
    for i, config in enumerate(configs):
        assert_trains_the_same(bench, job, Layout(name, num_devices, dict(config)), tmp_path / str(i))
