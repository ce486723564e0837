"""Freezing of parameters by patterns of their names."""

import pytest
from torch import nn

from ringmaster.techniques import ModelSpec
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.training.optimizers import freeze


class Small(nn.Module):
    """An embedding, a layer and a head that shares the embedding's weight where `is_tied`."""

    def __init__(self, *, is_tied=False):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 4)
        if is_tied:
            self.head.weight = self.embed.weight


def trained(patterns, **kwargs):
    model = Small(**kwargs)
    freeze(model, patterns)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        (("embed.*",), ["layer.weight", "layer.bias", "head.weight", "head.bias"]),
        (("*", "!head.*"), ["head.weight", "head.bias"]),
        (("*", "!head.*", "head.bias"), ["head.weight"]),
        (("*.weight",), ["layer.bias", "head.bias"]),
        (("!head.*", "*.weight"), ["layer.bias", "head.bias"]),
    ],
    ids=" ".join,
)
def test_the_last_pattern_that_matches_decides(patterns, left):
    assert trained(patterns) == left


def test_what_an_earlier_step_froze_stays_frozen():
    model = Small()
    model.layer.requires_grad_(False)
    freeze(model, ("*", "!layer.*", "!head.*"))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("haed.*",), r"freeze\[0\]: 'haed\.\*' matches no parameter\. To fix: match names such as head\."),
        (("*", "!classifier"), r"freeze\[1\]: '!classifier' matches no parameter"),
        (("*",), r"leaves no parameter to train.*'!head\.bias'"),
        (("!head.*",), "freezes nothing"),
    ],
)
def test_patterns_that_do_not_suit_the_model_are_refused(patterns, message):
    with pytest.raises(ValueError, match=message):
        trained(patterns)


def test_a_shared_weight_is_frozen_under_all_of_its_names_or_none():
    assert trained(("embed.*", "head.weight"), is_tied=True) == ["layer.weight", "layer.bias", "head.bias"]
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight are one weight"):
        trained(("embed.*",), is_tied=True)


def test_the_facts_count_the_trained_parameters():
    spec = ModelSpec(
        architecture="ViTForImageClassification",
        config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    )
    data = PreparedData(
        name="d",
        source="d",
        kind="images",
        num_samples=4,
        num_held_out=1,
        digest="",
        num_labels=3,
        image_size=16,
        num_channels=1,
    )
    whole = model_facts(spec, data=data)
    facts = model_facts(spec, data=data, frozen=("*", "!classifier.*"))
    assert (facts.num_updated, facts.num_parameters) == (16 * 3 + 3, whole.num_parameters)
    assert whole.num_updated == whole.num_parameters
