"""The name under which a base model from a folder or the hub is registered."""

import pytest

from ringmaster.model_lineage.base_models import registered_name

HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/runs/mood/model", "mood"),
        ("/runs/mood/final/model", "mood"),
        ("/runs/mood/final_model", "mood"),
        ("/runs/mood/output", "mood"),
        ("/runs/mood/checkpoint-500", "mood-checkpoint-500"),
        ("/runs/mood/2026-11-25/model", "mood-2026-11-25"),
        ("/runs/nightly/20261125-155925/models/llama", "llama"),
        (f"/home/me/.cache/huggingface/hub/models--org--name/snapshots/{HASH}", "org--name"),
        ("/data/llama-7b", "llama-7b"),
        ("/data/my model", "my-model"),
        ("org/model", "org--model"),
        ("gpt2", "gpt2"),
        ("/model", "model"),
        ("/", "imported"),
    ],
)
def test_a_name_says_which_model_it_is(source, name):
    assert registered_name(source) == name


def test_no_two_models_have_one_name():
    taken = set()
    for folder in ("/a/mood/model", "/b/mood/model", "/c/mood/model", "/c/mood/final", "/d/mood/model"):
        name = registered_name(folder, taken=taken.__contains__)
        assert name not in taken
        taken.add(name)
    assert {"mood", "mood-model", "c-mood-model"} <= taken
