"""peft adapters with settings that are not supported are refused when they are read, as their logits would differ."""

import json

import pytest
import torch
from safetensors.torch import save_file

from ringmaster.techniques.models.adapters import pretrained_state
from ringmaster.techniques.models.peft_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": True}


@pytest.fixture
def saved(tmp_path):
    def save(**said):
        (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(PLAIN | said))
        (tmp_path / ADAPTER_WEIGHTS).touch()
        return tmp_path

    return save


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("alora_invocation_tokens", [7, 8]),
        ("lora_bias", True),
        ("rank_pattern", {"q_proj": 2}),
    ],
)
def test_what_is_not_plain_is_refused(saved, key, value):
    with pytest.raises(ValueError, match=f"has {key}: .*To fix"):
        read_adapter(saved(**{key: value}))


@pytest.mark.parametrize("said", [{}, {"init_lora_weights": "gaussian"}, {"init_lora_weights": False}])
def test_what_only_began_otherwise_is_read(saved, said):
    assert read_adapter(saved(**said)).rank == 4


def test_what_is_read_is_in_the_order_of_what_begins(tmp_path):
    """Norms are summed in the order of the first state. A file is sorted by name, and has a bias before its weight."""
    first = {name: torch.ones(2) for name in ("head.weight", "head.bias", "a.weight")}
    save_file({f"base_model.model.{name}": tensor for name, tensor in first.items()}, tmp_path / ADAPTER_WEIGHTS)
    assert list(pretrained_state(tmp_path, first)) == list(first)
