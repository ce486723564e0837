"""Arbitrary batch files: the reader returns a batch or reports faults, each with a line and a remedy."""

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.tasks.batch.document import read
from tests.drawing import draws

RIGHT = {
    "name": "n",
    "objective": "weighted",
    "price_per_device_hour": 0.5,
    "devices": {"cpu": 2},
    "jobs": [
        {
            "name": "a",
            "model": {"from_pretrained": "gpt2", "config": {"hidden_size": 8}},
            "base": "b",
            "data": {"source": "python-stdlib", "seq_len": 64, "kwargs": {}},
            "optimizer": {"name": "sgd", "lr": 0.1, "options": {"momentum": 0.9}},
            "schedule": {"name": "cosine", "warmup_steps": 3},
            "evaluation": {"every_steps": 3, "metrics": ["loss"]},
            "num_steps": 10,
            "techniques": ["single"],
            "num_devices": [1],
            "deadline_s": 60,
            "weight": 2.0,
        },
        {"name": "b", "model": {"from_pretrained": "gpt2"}, "data": {"source": "digits"}, "num_epochs": 1.5},
    ],
    "grid": [
        {
            "template": {
                "name": "g",
                "model": {"from_pretrained": "gpt2"},
                "data": {"source": "digits"},
                "num_steps": 1,
            },
            "over": {"optimizer.lr": [0.1, 0.2], "seed": [0, 1]},
        }
    ],
}


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in parts for place in places(item, (*at, key)))]


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    value = copy.deepcopy(value)
    value[place[0]] = replaced(value[place[0]], place[1:], new)
    return value


WORDS = st.sampled_from(["name", "a", "b", "g-lr0.1-seed0", "num_steps", "optimizer.lr", "lr", "over", "", "ä", "all"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)


def outcome(text: str) -> Batch | BatchFileError:
    try:
        return parse_batch(text, folder=Path(__file__).parent, name="any.yaml")
    except BatchFileError as error:
        return error


def test_the_file_that_is_changed_here_is_right():
    assert isinstance(outcome(json.dumps(RIGHT)), Batch)


@draws(100)
@given(place=st.sampled_from(places(RIGHT)), value=VALUES)
def test_a_changed_file_gives_a_batch_or_faults(place: tuple[Any, ...], value: Any):
    answer = outcome(json.dumps(replaced(RIGHT, place, value), indent=1))
    if isinstance(answer, BatchFileError):
        assert all(fault.line and fault.message and fault.remedy for fault in answer.faults)
    else:
        assert Batch.from_json(json.loads(json.dumps(answer.to_json()))) == answer


@draws(100)
@given(text=st.text(alphabet="ab:-?[]{}&*!|>'\"#% \n\t<,01.e~", max_size=40))
def test_any_text_gives_a_batch_or_faults(text: str):
    assert isinstance(outcome(text), Batch | BatchFileError)


def test_json_may_escape_a_character_in_two_halves():
    assert read(r'{"\ud83c\udfaa": ["\ud83c\udfaa"]}').data == {"\N{CIRCUS TENT}": ["\N{CIRCUS TENT}"]}


def test_half_a_character_is_refused():
    answer = outcome(json.dumps(RIGHT, indent=1).replace('"n"', r'"\ud83c"', 1))
    assert [(fault.line, fault.remedy) for fault in answer.faults] == [(2, "write the whole one")]
