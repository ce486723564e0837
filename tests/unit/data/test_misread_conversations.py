"""Messages are learnt as their formats mean it: by role, by weight, and with their whole text."""

import csv
import json
from itertools import product
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from ringmaster.codec import from_json
from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED
from tests.matrix import matrix

MARKED = (
    "{% for m in messages %}{{ m.role + ' : ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' ; ' }}"
    "{% endgeneration %}{% else %}{{ m.content + ' ; ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def turns(*messages):
    return [{"role": role, "content": content, **(more[0] if more else {})} for role, content, *more in messages]


def opened(tmp_path, rows, kind="chat", **spec):
    path = tmp_path / "rows.jsonl"
    if rows is not None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = from_json(DataSpec, {"kind": kind, "path": str(path), "vocab_size": 300, "held_out": 0, **spec})
    prepared = prepare(given, cache_dir=tmp_path / "cache")
    return open_data(given, cache_dir=tmp_path / "cache", prepared=prepared)[0], AutoTokenizer.from_pretrained(
        prepared.tokenizer_dir
    )


def learnt(tmp_path, messages, **spec):
    """What is learnt of a conversation, and the whole of it."""
    samples, tokenizer = opened(tmp_path, [{"messages": messages}] * 2, **spec)
    labels = samples[0]["labels"]
    return tokenizer.decode(labels[labels != IGNORED]), tokenizer.decode(samples[0]["input_ids"])


def fault_of(tmp_path, messages, **spec):
    with pytest.raises(ValueError) as caught:
        learnt(tmp_path, messages, **spec)
    said = str(caught.value)
    assert "rows.jsonl, row 1: " in said
    assert "To fix: " in said
    return said


# Weights


@pytest.fixture(params=["unmarked", "marked", "trained"])
def tokenizer(request, chat_tokenizer):
    """A tokenizer whose template marks answers, one whose template does not, and one that is trained on the data."""
    if request.param == "marked":
        (Path(chat_tokenizer) / "chat_template.jinja").write_text(MARKED)
    return None if request.param == "trained" else chat_tokenizer


WEIGHTS = [
    ((0, 1), ["two"]), ((1, 0), ["one"]), ((0.0, None), ["two"]), ((1, 1.0), ["one", "two"]),
    ((False, True), ["two"]), ((None, 0), ["one"]),
]  # fmt: skip
KEYS = ("weight", "train", "training", "loss")


@pytest.mark.parametrize(
    ("key", "weights", "wanted"),
    # A weight is read in the same way whatever key it has.
    matrix(
        [(key, *case) for key, case in product(KEYS, WEIGHTS)],
        quick=[(key, *case) for key, case in product(KEYS, WEIGHTS) if key == "weight" or case == WEIGHTS[0]],
    ),
)
def test_messages_of_weight_0_are_not_learnt(tmp_path, tokenizer, weights, wanted, key):
    first, second = ({} if weight is None else {key: weight} for weight in weights)
    messages = turns(("user", "what"), ("assistant", "one", first), ("user", "is"), ("assistant", "two", second))
    said, whole = learnt(tmp_path, messages, tokenizer=tokenizer)
    assert [word for word in ("one", "two", "what", "is") if word in said] == wanted
    plain = [{name: value for name, value in each.items() if name != key} for each in messages]
    assert whole == learnt(tmp_path, plain, tokenizer=tokenizer)[1]


@pytest.mark.parametrize("weight", [0.5, "0", "1", 2, -1, [0], float("nan")])
def test_other_weights_are_refused(tmp_path, weight):
    said = fault_of(tmp_path, turns(("user", "what"), ("assistant", "one", {"weight": weight})))
    assert f"message 2 has the weight {weight!r}. To fix: give 1" in said


def test_answers_of_which_parts_are_learnt_are_refused(tmp_path):
    parts = [{"begin_offset": 0, "end_offset": 1, "train": False}]
    messages = turns(("user", "what"), ("assistant", "one two", {"train_detail": parts}))
    assert "message 2 has train_detail" in fault_of(tmp_path, messages)


def test_conversations_without_a_message_to_learn_are_refused(tmp_path, tokenizer):
    messages = turns(("user", "what"), ("assistant", "one", {"weight": 0}))
    assert "nothing to learn" in fault_of(tmp_path, messages, tokenizer=tokenizer)


def test_weights_of_parquet_and_of_share_gpt_are_read(tmp_path):
    messages = turns(
        ("user", "what", {"weight": None}),
        ("assistant", "one", {"weight": 0}),
        ("user", "is", {"weight": None}),
        ("assistant", "two", {"weight": 1}),
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}] * 2), tmp_path / "rows.parquet")
    samples, tokenizer = opened(tmp_path, None, path=str(tmp_path / "rows.parquet"))
    labels = samples[0]["labels"]
    assert tokenizer.decode(labels[labels != IGNORED]) == "two<|im_end|>\n"
    share_gpt = [
        {"from": "human", "value": "what"}, {"from": "gpt", "value": "one", "weight": 0},
        {"from": "human", "value": "is"}, {"from": "gpt", "value": "two", "weight": None},
    ]  # fmt: skip
    assert learnt(tmp_path, share_gpt)[0] == "two<|im_end|>\n"


@pytest.mark.parametrize("kind", ["completion", "preference"])
def test_weights_are_those_of_conversations_alone(tmp_path, kind):
    answer = turns(("assistant", "one", {"weight": 0}))
    row = {"prompt": turns(("user", "what"), ("assistant", "is", {"weight": 0}), ("user", "it"))}
    row |= (
        {"completion": answer} if kind == "completion" else {"chosen": turns(("assistant", "yes")), "rejected": answer}
    )
    with pytest.raises(ValueError, match=r"row 1: an answer has a message of weight 0; .*To fix: .*chat"):
        opened(tmp_path, [row] * 2, kind=kind)
    row |= (
        {"completion": turns(("assistant", "one"))}
        if kind == "completion"
        else {"rejected": turns(("assistant", "one"))}
    )
    assert len(opened(tmp_path, [row] * 2, kind=kind)[0]) == 2


# Roles


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"), ("Human", "user"), ("USER", "user"), ("prompter", "user"), ("gpt", "assistant"),
        ("Assistant", "assistant"), ("assistant ", "assistant"), ("bot", "assistant"), ("model", "assistant"),
        ("chatgpt", "assistant"), ("developer", "system"), ("System", "system"), ("function", "tool"), ("Tool", "tool"),
        ("observation", "tool"), ("ipython", "tool"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_known_roles_are_mapped(tmp_path, chat_tokenizer, name, role, keys):
    messages = [("user", "what"), (name, "one"), ("assistant", "yes")]
    said, whole = learnt(
        tmp_path, [dict(zip(keys, message, strict=True)) for message in messages], tokenizer=chat_tokenizer
    )
    wanted = turns(("user", "what"), (role, "one"), ("assistant", "yes"))
    assert (said, whole) == learnt(tmp_path, wanted, tokenizer=chat_tokenizer)


@pytest.mark.parametrize("role", ["usr", "asistant", "", "critic"])
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_unknown_roles_are_refused_with_the_known_ones(tmp_path, role, keys):
    messages = [("user", "what"), (role, "one"), ("assistant", "yes")]
    said = fault_of(tmp_path, [dict(zip(keys, message, strict=True)) for message in messages])
    assert f"row 1: message 2 is from {role!r}; " in said
    assert "To fix: give one of system, user, assistant, tool, human, prompter, gpt, " in said


@pytest.mark.parametrize("test", ["m.role == 'critic'", 'm["role"] == "critic"', "m['role'] in ['user', 'critic']"])
def test_roles_that_the_chat_template_reads_stay(tmp_path, chat_tokenizer, test):
    template = Path(chat_tokenizer) / "chat_template.jinja"
    template.write_text(
        template.read_text() + "{% for m in messages %}{% if " + test + " %}{{ ' it' }}{% endif %}{% endfor %}"
    )
    samples, _ = opened(
        tmp_path, [{"prompt": turns(("critic", "what"), ("user", "one"))}] * 2, kind="prompt", tokenizer=chat_tokenizer
    )
    assert b'"role": "critic"' in bytes(samples[0]["row"].tolist())


def test_roles_of_every_kind_are_mapped(tmp_path, chat_tokenizer):
    human, gpt = turns(("human", "what")), turns(("gpt", "one"))
    user, assistant = turns(("user", "what")), turns(("assistant", "one"))
    for kind, made, wanted in (
        ("completion", {"prompt": human, "completion": gpt}, {"prompt": user, "completion": assistant}),
        (
            "preference", {"chosen": human + gpt, "rejected": human + turns(("gpt", "two"))},
            {"chosen": user + assistant, "rejected": user + turns(("assistant", "two"))},
        ),
    ):  # fmt: skip
        found = [
            opened(tmp_path, [row] * 2, kind=kind, tokenizer=chat_tokenizer)[0][0]["labels"].tolist()
            for row in (made, wanted)
        ]
        assert found[0] == found[1]


# Contents


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
        [{"text": "one "}, {"text": "two"}],
        ["one ", "two"],
        [{"type": "output_text", "text": "one two", "image_url": None}],
    ],
)
def test_parts_of_text_are_joined(tmp_path, parts, tokenizer):
    whole = turns(("user", "one two"), ("assistant", "one two"))
    given = turns(("user", parts), ("assistant", parts))
    assert learnt(tmp_path, given, tokenizer=tokenizer) == learnt(tmp_path, whole, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (
            [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": "x"}}],
            "has a part of type 'image_url'",
        ),
        ([{"type": "image"}], "has a part of type 'image'"),
        ([{"type": "text", "text": 3}], "has a part of type 'text'"),
        ([1, 2], "has a part of type int"),
        ([], "has neither content nor tool_calls"),
        (42, "has a content that is int"),
        (True, "has a content that is bool"),
        ({"text": "what"}, "has a content that is dict"),
        (None, "has neither content nor tool_calls"),
    ],
)
def test_other_contents_are_refused(tmp_path, chat_tokenizer, content, what):
    for tokenizer in (None, chat_tokenizer):
        said = fault_of(tmp_path, turns(("user", content), ("assistant", "one")), tokenizer=tokenizer)
        assert f"message 1 {what}" in said


def test_results_of_tools_may_be_no_texts(tmp_path, chat_tokenizer):
    template = Path(chat_tokenizer) / "chat_template.jinja"
    template.write_text(template.read_text().replace("m.content + ' ; '", "(m.content | string) + ' ; '"))
    messages = turns(("user", "what"), ("tool", {"one": 1}), ("assistant", "yes"))
    assert "one" in learnt(tmp_path, messages, tokenizer=chat_tokenizer)[1]


CALLS = (
    "{% for m in messages %}{{ m.role + ' : ' + (m.content or '') }}{% for call in m.tool_calls or [] %}"
    "{{ ' ' + call.function.name }}{% endfor %}{{ ' ; ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


@pytest.mark.parametrize("content", ["", None, "it"])
def test_a_function_call_beside_a_content_is_learnt(tmp_path, chat_tokenizer, content):
    """As in OpenAI's format before tool calls, whose templates would ignore it."""
    (Path(chat_tokenizer) / "chat_template.jinja").write_text(CALLS)
    call = {"name": "three", "arguments": "{}"}
    given = turns(("user", "what"), ("assistant", content, {"function_call": call}))
    wanted = turns(("user", "what"), ("assistant", content, {"tool_calls": [{"type": "function", "function": call}]}))
    assert learnt(tmp_path, given, tokenizer=chat_tokenizer) == learnt(tmp_path, wanted, tokenizer=chat_tokenizer)


@pytest.mark.parametrize(
    "calls",
    [{"tool_calls": []}, {"tool_calls": "[]"}, {"tool_calls": ""}, {"function_call": {}}, {"function_call": ""}],
)
def test_messages_that_call_nothing_are_as_those_without_calls(tmp_path, chat_tokenizer, calls):
    """Templates such as Mistral's leave the content of a message with the key `tool_calls` out."""
    template = CALLS.replace("(m.content or '')", "(m.content if m.tool_calls is not defined else '')")
    (Path(chat_tokenizer) / "chat_template.jinja").write_text(template)
    wanted = turns(("user", "what"), ("assistant", "one"))
    given = [wanted[0], {**wanted[1], **calls}]
    assert learnt(tmp_path, given, tokenizer=chat_tokenizer) == learnt(tmp_path, wanted, tokenizer=chat_tokenizer)


def test_tool_calls_may_be_json(tmp_path, chat_tokenizer):
    (Path(chat_tokenizer) / "chat_template.jinja").write_text(CALLS)
    calls = [{"type": "function", "function": {"name": "three", "arguments": "{}"}}]
    wanted = turns(("user", "what"), ("assistant", None, {"tool_calls": calls}))
    given = turns(("user", "what"), ("assistant", None, {"tool_calls": json.dumps(calls)}))
    assert learnt(tmp_path, given, tokenizer=chat_tokenizer) == learnt(tmp_path, wanted, tokenizer=chat_tokenizer)
    for wrong in ("three()", {"name": "three"}):
        given = turns(("user", "what"), ("assistant", None, {"tool_calls": wrong}))
        assert "message 2: tool_calls are " in fault_of(tmp_path, given, tokenizer=chat_tokenizer)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_messages_may_be_json(tmp_path, suffix):
    text = json.dumps(turns(("Human", "what"), ("gpt", [{"type": "text", "text": "one"}])))
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["messages"], [text], [text]])
    else:
        pyarrow.parquet.write_table(pyarrow.table({"messages": [text] * 2}), path)
    samples, tokenizer = opened(tmp_path, None, path=str(path))
    labels = samples[0]["labels"]
    assert tokenizer.decode(labels[labels != IGNORED]) == "one<|im_end|>\n"
