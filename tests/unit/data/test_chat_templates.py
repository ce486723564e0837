"""Chat templates: what ends an answer, what is left out of a conversation, and how tool calls are rendered."""

import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ringmaster.codec import from_json
from ringmaster.features.on_policy.prompts import Prompt, PromptOptions
from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.data.chat_template import ChatTemplate, TurnEnd, turn_end_of
from ringmaster.techniques.data.row_kind import SampleContext
from ringmaster.techniques.data.row_tokenizer import CHATML, RowTokenizer
from ringmaster.techniques.data.sources.chat import Chat, chat_reference, messages_of, without_nulls
from ringmaster.techniques.job_specs import DataSpec
from ringmaster.techniques.metric import IGNORED

LOOP, END = "{% for m in messages %}", "{% endfor %}{% if add_generation_prompt %}%s{% endif %}"


def turns(start, end, header, last=""):
    """A template whose messages are `start`, with {role}, then the content and `end`."""
    before = start.replace("{role}", "{{ m.role }}")
    return f"{LOOP}{before}{{{{ m.content | trim }}}}{end}{END.replace('%s', header)}{last}"


CALL = "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + LOOP + "<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}<|im_end|>\n"
    + END.replace("%s", "<|im_start|>assistant\n")
)  # fmt: skip
QWEN3 = (  # which leaves the reasoning of earlier answers out
    LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1].lstrip() }}{% elif m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{{ m.content }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    + END.replace("%s", "<|im_start|>assistant\n")
)
ENDS = {
    "chatml": (CHATML, ["<|im_end|>"]),
    "llama 3": (
        turns("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>",
              "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ["<|eot_id|>"],
    ),
    "llama 3 with builtin tools": (
        LOOP + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.tool_calls %}<|eom_id|>{% else %}<|eot_id|>{% endif %}" + END.replace("%s", ""),
        ["<|eot_id|>", "<|eom_id|>"],
    ),
    "one that needs a system prompt": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system prompt') }}{% endif %}" + CHATML,
        ["<|im_end|>"],
    ),
    "gemma": (turns("<start_of_turn>{role}\n", "<end_of_turn>\n", "<start_of_turn>model\n"), ["<end_of_turn>"]),
    "phi": (
        turns("<|{role}|>\n", "<|end|>\n", "<|assistant|>\n", "{% if not add_generation_prompt %}</s>{% endif %}"),
        ["<|end|>"],
    ),
    "mistral": (turns("[INST] ", "</s>", ""), ["</s>"]),
    "zephyr": (turns("<|{role}|>\n", "</s>\n", "<|assistant|>\n"), ["</s>"]),
    "deepseek": (turns("<｜{role}｜>", "<｜end▁of▁sentence｜>", "<｜Assistant｜>"), ["<｜end▁of▁sentence｜>"]),
    "cohere": (turns("<|START_OF_TURN_TOKEN|>{role}", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", ""),
               ["<|END_OF_TURN_TOKEN|>"]),
    "granite": (turns("<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n", ""), ["<|end_of_text|>"]),
    "ends the last answer otherwise": (
        turns("<|start|>{role}<|message|>", "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}", ""),
        ["<|return|>"],
    ),
    "calls that end by themselves": (CALLS.replace("<|im_end|>", ""), []),
    "a token behind each of several calls": (CALLS, ["<|im_end|>"]),
}  # fmt: skip


def tokenizer_of(template, *, more=(), decodes=True):
    """A tokenizer of bytes whose added tokens are those that the template writes."""
    written = set(re.findall(r"<[|｜][^<>{}\s]+?[|｜]>|<\w+_of_turn>|</?call>|\[INST\]|</?think>", template)) | {*more}
    inner = Tokenizer(models.BPE({each: i for i, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", additional_special_tokens=sorted(written)
    )
    tokenizer.chat_template = template
    return tokenizer


def saved(folder, template, **more):
    tokenizer_of(template, **more).save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


def said_by(messages, *contents):
    return [{"role": role, "content": content} for role, content in zip(messages.split(), contents, strict=True)]


# The end of an answer


@pytest.mark.parametrize("name", ENDS)
def test_what_is_rendered_behind_an_answer_ends_it(tmp_path, name):
    template, wanted = ENDS[name]
    tokenizer = tokenizer_of(template)
    end = turn_end_of(Path(saved(tmp_path, template)))
    assert tokenizer.convert_ids_to_tokens(list(end.token_ids)) == wanted


def test_a_text_may_end_answers():
    tokenizer = tokenizer_of(turns("{role}: ", " [END]\n", "assistant: "))
    end = ChatTemplate(tokenizer).turn_end
    assert end.text == "[END]"
    prompt = tokenizer.apply_chat_template(said_by("user", "what"), add_generation_prompt=True)["input_ids"]
    assert tuple(prompt[-len(end.prompt_end) :]) == end.prompt_end
    assert tokenizer.decode(end.prompt_end).endswith("assistant: ")


def test_a_tokenizer_without_a_template_has_no_end_of_a_turn():
    tokenizer = tokenizer_of("")
    tokenizer.chat_template = None
    assert ChatTemplate(tokenizer).turn_end == TurnEnd()


def test_a_template_that_changes_letters_ends_answers():
    template = turns("<|{role}|>\n", "<|end|>\n", "<|assistant|>\n").replace("| trim", "| upper")
    tokenizer = tokenizer_of(template)
    assert tokenizer.convert_ids_to_tokens(list(ChatTemplate(tokenizer).turn_end.token_ids)) == ["<|end|>"]
    assert ChatTemplate(tokenizer_of(CALLS.replace("| tojson", "| tojson | upper"))).turn_end.token_ids


# What is left out


def opened(tmp_path, template, rows, kind="chat", suffix="jsonl", **spec):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    if template is not None:
        spec["tokenizer"] = saved(tmp_path, template)
    given = from_json(DataSpec, {"kind": kind, "path": str(path), "held_out": 0, **spec})
    prepared = prepare(given, cache_dir=tmp_path / "cache")
    samples, _ = open_data(given, cache_dir=tmp_path / "cache", prepared=prepared)
    return samples, prepared, AutoTokenizer.from_pretrained(prepared.tokenizer_dir)


def fault(tmp_path, template, row, **spec):
    with pytest.raises(ValueError) as caught:
        opened(tmp_path, template, [row] * 2, **spec)
    assert "rows.jsonl, row 1: " in str(caught.value)
    return str(caught.value)


def without(role):
    """ChatML without messages of a role."""
    start = "{{ '<|im_start|>' + message"
    template = CHATML.replace(start, f"{{% if message.role != '{role}' %}}{start}")
    return template.replace("{% endfor %}", "{% endif %}{% endfor %}", 1)


CONVERSATION = said_by("system user assistant", "one", "what", "one")
LATER = said_by("user assistant system user assistant", "a", "b", "be odd", "c", "d")
RESULT = said_by("user assistant tool assistant", "a", "b", "3", "d 3")
FIRST_ALONE = without("system").replace("message.role != 'system'", "loop.first or message.role != 'system'")


PARTS = CHATML.replace("message['content']", "message['content'][0]['text']")
LOOPED = CHATML.replace(
    "{{ message['content'] + '<|im_end|>",
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '<|im_end|>",
)
ANSWERS_AS_TEXT = LOOPED.replace("{% for part", "{% set text = message.content %}{{ text }}{% for part", 1)
ANSWERS_AS_TEXT = ANSWERS_AS_TEXT.replace("for part in message.content %}", "for part in [] %}", 1)


@pytest.mark.parametrize("template", [PARTS, LOOPED, ANSWERS_AS_TEXT], ids=["first", "all", "of others"])
def test_contents_are_lists_of_parts_where_a_template_takes_these_alone(tmp_path, template):
    samples, prepared, tokenizer = opened(tmp_path, template, [{"messages": CONVERSATION}] * 2)
    expected = tokenizer_of(CHATML).apply_chat_template(CONVERSATION, tokenize=False)
    assert tokenizer.decode(samples[0]["input_ids"]) == expected
    learnt = samples[0]["input_ids"][samples[0]["labels"] != IGNORED]
    assert tokenizer.decode(learnt) == "one<|im_end|>\n"
    assert tokenizer.convert_ids_to_tokens(list(turn_end_of(Path(prepared.tokenizer_dir)).token_ids)) == ["<|im_end|>"]
    samples, *_ = opened(tmp_path, template, [{"prompt": CONVERSATION[:2]}] * 2, kind="prompt")
    assert tokenizer.decode(samples[0]["input_ids"]).endswith("what<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "messages", "what"),
    [
        (without("system"), CONVERSATION, "content of message 1 (system)"),
        (FIRST_ALONE, LATER, "content of message 3 (system)"),
        (without("tool"), RESULT, "content of message 3 (tool)"),
        (CHATML, [*CONVERSATION[:2], {**CONVERSATION[2], "reasoning_content": "so"}],
         "reasoning_content of message 3 (assistant)"),
        (CHATML, [*CONVERSATION[:2], {**CONVERSATION[2], "thinking": "so"}], "thinking of message 3 (assistant)"),
        (CHATML, [{**CONVERSATION[1], "name": "Ada"}, CONVERSATION[2]], "name of message 1 (user)"),
        (CHATML.replace("message['content'] + '<|im_end|>", "message['content'][:3] + '<|im_end|>"),
         said_by("user assistant", "what is", "it"), "content of message 1 (user)"),
        (CHATML.replace("message['content'] +", "message['content'].split('</think>')[-1] +"),
         said_by("user assistant", "a", "<think>so</think>b"), "reasoning_content of message 2 (assistant)"),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_refused(tmp_path, template, messages, what):
    said = fault(tmp_path, template, {"messages": messages})
    assert f"row 1: the chat template leaves out the {what}" in said
    assert "To fix: set data.tokenizer to one whose template renders it" in said


@pytest.mark.parametrize("kind", ["completion", "preference", "prompt"])
def test_what_is_left_out_of_a_prompt_is_refused(tmp_path, kind):
    prompt, answers = CONVERSATION[:2], [said_by("assistant", each) for each in ("b", "c")]
    row = {"prompt": prompt, "completion": answers[0], "chosen": answers[0], "rejected": answers[1]}
    row = {"prompt": prompt} if kind == "prompt" else row
    assert "content of message 1 (system)" in fault(tmp_path, without("system"), row, kind=kind)


TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}


def test_prompts_have_their_tools_and_their_system_prompt(tmp_path):
    row = {"prompt": said_by("user", "what"), "system": "be odd", "tools": [TOOL]}
    samples, _, tokenizer = opened(tmp_path, CALLS, [row] * 2, kind="prompt")
    messages = said_by("system user", "be odd", "what")
    wanted = tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True)["input_ids"]
    assert samples[0]["input_ids"].tolist() == wanted
    samples, _, tokenizer = opened(tmp_path, None, [row] * 2, kind="prompt", tokenizer=str(tmp_path / "tokenizer"),
                                   ignored_columns=["system", "tools"])  # fmt: skip
    assert (
        samples[0]["input_ids"].tolist()
        == tokenizer.apply_chat_template(messages[1:], add_generation_prompt=True)["input_ids"]
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": said_by("user assistant", "a", "b")}, "ends with a message of the assistant's"),
        ({"messages": said_by("user assistant", "a", "b")}, "ends with a message of the assistant's"),
        ({"prompt": "a", "system": "be odd"}, "'system' cannot be combined with a prompt of text"),
        ({"instruction": "a", "input": "b"}, "'input' cannot be combined with a prompt of text"),
        ({"prompt": "a", "tools": [{"name": "f"}]}, "'tools' cannot be combined with a prompt of text"),
    ],
)  # fmt: skip
def test_prompts_that_would_be_another_question_are_refused(tmp_path, row, said):
    assert said in fault(tmp_path, CALLS, row, kind="prompt")


@pytest.mark.parametrize("kind", ["completion", "preference"])
@pytest.mark.parametrize("before", [[("system", "be odd"), ("user", "Q")], [("user", "Q ")]])
def test_answers_that_begin_with_a_question_are_refused(tmp_path, kind, before):
    """A template without a generation prompt renders them as if all of it were learnt."""
    questions = [{"role": role, "content": content} for role, content in before]
    answers = [[*questions, *said_by("assistant", each)] for each in ("b", "c")]
    row = {"prompt": "Q", "completion": answers[0], "chosen": answers[0], "rejected": answers[1]}
    said = fault(tmp_path, turns("[INST] ", "</s>", ""), row, kind=kind)
    assert f"begins with a message that is not an answer ({before[0][0]})" in said


@pytest.mark.parametrize(
    "messages",
    [
        CONVERSATION,
        LATER,
        RESULT,
        said_by("user assistant", "  spaces \n", "\tyes\n"),
        [{**RESULT[0]}, RESULT[1], {**RESULT[2], "name": "weather", "tool_call_id": "1"}, RESULT[3]],
        [{**CONVERSATION[1], "id": "a1", "timestamp": 3}, CONVERSATION[2]],
    ],
)
def test_what_is_rendered_is_not_refused(tmp_path, messages):
    samples, prepared, tokenizer = opened(tmp_path, CHATML, [{"messages": messages}] * 2)
    whole = tokenizer.apply_chat_template(messages)["input_ids"]
    assert samples[0]["input_ids"].tolist() == whole
    assert [
        note for note in prepared.notes if "keys that the chat template does not read: id, timestamp" not in note
    ] == []


def test_reasoning_of_answers_that_are_not_learnt_may_be_left_out(tmp_path):
    thoughts = said_by("user assistant user assistant", "a", "<think>so</think>b", "c", "<think>then</think>d")
    learnt = [thoughts[0], thoughts[1], thoughts[2], thoughts[3]]
    assert "message 2" in fault(tmp_path, QWEN3, {"messages": learnt})
    rows = [{"messages": [thoughts[0], {**thoughts[1], "weight": 0}, *thoughts[2:]]}, {"messages": thoughts[:2]}]
    samples, prepared, tokenizer = opened(tmp_path, QWEN3, rows)
    assert "so" not in tokenizer.decode(samples[0]["input_ids"])
    assert any("in 1 rows the chat template leaves out reasoning" in note for note in prepared.notes)
    row = {"prompt": thoughts[:3], "completion": thoughts[3:]}
    samples, _, _ = opened(tmp_path, QWEN3, [row] * 2, kind="completion")
    labels = samples[0]["labels"]
    assert tokenizer.decode(labels[labels != IGNORED]) == "<think>then</think>d<|im_end|>\n"


def test_written_special_tokens_are_special_and_said(tmp_path):
    messages = said_by("user assistant", "a<|im_end|>b", "yes")
    samples, prepared, tokenizer = opened(tmp_path, CHATML, [{"messages": messages}, {"messages": LATER}])
    whole = tokenizer.apply_chat_template(messages)["input_ids"]
    assert samples[0]["input_ids"].tolist()[: len(whole)] == whole
    assert any("1 rows have special tokens in messages" in note for note in prepared.notes)


@pytest.mark.parametrize(
    ("end", "note"), [("\n", "writes nothing behind answers"), (" [END]\n", "ends answers with '[END]'")]
)
def test_an_end_without_a_token_is_said(tmp_path, end, note):
    rows = [{"messages": CONVERSATION}] * 2
    _, prepared, _ = opened(tmp_path, turns("{role}: ", end, "assistant: "), rows)
    assert any(note in each for each in prepared.notes)


# Tool calls

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def called(arguments, **more):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [*said_by("user", "what"), {"role": "assistant", "content": "", "tool_calls": [call], **more}]


@pytest.mark.parametrize("given", ['{"city": "Rome", "days": [1, null]}', {"city": "Rome", "days": [1, None]}])
def test_arguments_are_objects(tmp_path, given):
    samples, _, tokenizer = opened(tmp_path, CALLS, [{"messages": called(given), "tools": TOOLS}] * 2)
    assert '<call>weather {"city": "Rome", "days": [1, null]}</call>' in tokenizer.decode(samples[0]["input_ids"])


@pytest.mark.parametrize(("given", "wanted"), [("", "{}"), (None, "{}"), ({}, "{}"), ("{}", "{}"), (" ", "{}")])
def test_arguments_may_be_missing(tmp_path, given, wanted):
    samples, _, tokenizer = opened(tmp_path, CALLS, [{"messages": called(given)}] * 2)
    assert f"<call>weather {wanted}</call>" in tokenizer.decode(samples[0]["input_ids"])


@pytest.mark.parametrize("given", ["{city: Rome}", "[1]", '"Rome"', "3"])
def test_arguments_that_are_no_object_are_refused(tmp_path, given):
    said = fault(tmp_path, CALLS, {"messages": called(given)})
    assert f"message 2 calls weather with arguments that are no JSON object: {given!r}. To fix: give an object" in said


def test_a_call_without_a_name_is_refused(tmp_path):
    call = [{"type": "custom", "custom": {"name": "x"}}]
    row = {"messages": [*said_by("user", "what"), {"role": "assistant", "tool_calls": call}]}
    assert "message 2 has a tool call without the name of a function. To fix" in fault(tmp_path, CALLS, row)


def test_other_forms_of_calls_have_objects():
    wanted = {"name": "weather", "arguments": {"a": 1}}
    former = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"a": 1}'}}
    share_gpt = {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": '{"a": 1}'})}
    beside = {
        "from": "gpt",
        "value": "so",
        "tool_calls": json.dumps([{"function": {**wanted, "arguments": '{"a": 1}'}}]),
    }
    for message in (former, share_gpt, beside):
        (found,) = messages_of([message])
        assert found["tool_calls"][0]["function"] == wanted
    assert found["content"] == "so"


def test_templates_that_want_texts_get_them(tmp_path):
    template = CALLS.replace("c.function.arguments | tojson", "' ' + c.function.arguments")
    for given in ({"city": "Rome"}, '{"city": "Rome"}'):
        samples, _, tokenizer = opened(tmp_path, template, [{"messages": called(given)}] * 2)
        assert '{"city": "Rome"}</call>' in tokenizer.decode(samples[0]["input_ids"])


def test_parameters_may_be_json(tmp_path):
    schema = {"type": "object", "properties": {"city": {"type": "string", "default": None}}, "required": ["city"]}
    for parameters in (schema, json.dumps(schema)):
        tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
        row = {"messages": called({"city": "Rome"}), "tools": json.dumps(tools)}
        samples, _, tokenizer = opened(tmp_path, CALLS, [row] * 2)
        assert json.dumps(schema) in tokenizer.decode(samples[0]["input_ids"])


def test_nulls_that_arrow_adds_are_removed_at_every_depth(tmp_path):
    def row(city, more, schema):
        function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": schema}}}
        return {"messages": called({"city": city, **more}), "tools": [{"type": "function", "function": function}]}

    rows = [
        row("Rome", {"where": {"lat": 1}}, {"type": "string", "enum": ["Rome", None]}),
        row("Oslo", {"when": [{"day": 1}, None, {"hour": 2}]}, {"type": "string", "minLength": 1}),
    ]
    texts = []
    for suffix in ("jsonl", "parquet"):
        samples, _, tokenizer = opened(tmp_path, CALLS, rows, suffix=suffix)
        texts.append([tokenizer.decode(samples[i]["input_ids"]).rstrip("</s>") for i in range(2)])
    assert [json.loads(re.search(r"weather (.*?)</call>", text)[1]) for text in texts[1]] == [
        {"city": "Rome", "where": {"lat": 1}}, {"city": "Oslo", "when": [{"day": 1}, None, {"hour": 2}]}
    ]  # fmt: skip
    assert "minLength" not in texts[1][0]
    assert '"enum": ["Rome", null]' in texts[1][0]
    assert sorted(map(len, texts[0])) == sorted(map(len, texts[1]))


def test_nulls_of_data_sets_are_removed_and_those_of_jsonl_stay(tmp_path):
    from datasets import Dataset

    rows = [{"messages": called({"a": 1})}, {"messages": called({"b": "x"})}]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    spec = {"kind": "chat", "dataset": str(tmp_path / "saved"), "tokenizer": saved(tmp_path, CALLS), "held_out": 0}
    given = from_json(DataSpec, spec)
    prepared = prepare(given, cache_dir=tmp_path / "cache")
    samples, _ = open_data(given, cache_dir=tmp_path / "cache", prepared=prepared)
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    assert '<call>weather {"a": 1}</call>' in tokenizer.decode(samples[0]["input_ids"])
    samples, _, _ = opened(tmp_path, CALLS, [{"messages": called({"a": None})}] * 2)
    assert '<call>weather {"a": null}</call>' in tokenizer.decode(samples[0]["input_ids"])


def test_maps_of_arrow_are_objects():
    assert without_nulls([{"a": [("x", 1), ("y", None)], "b": None, "c": [None]}]) == [
        {"a": {"x": 1, "y": None}, "c": [None]}
    ]


@pytest.mark.parametrize("part", [{"text": "a", "image": "x.png"}, {"type": "thinking", "text": "a"}])
def test_parts_with_more_than_a_text_are_refused(tmp_path, part):
    row = {"messages": [{"role": "user", "content": [part]}, *said_by("assistant", "yes")]}
    assert "row 1: message 1 has a part of type" in fault(tmp_path, CHATML, row)


# The library's own call


def context_of(tmp_path, template):
    spec = DataSpec(kind="chat", path="", tokenizer="")
    tokenizer = RowTokenizer(Path(saved(tmp_path, template)))
    return SampleContext(spec=spec, options=PromptOptions(), max_length=1024, _tokenizer=tokenizer)


@pytest.mark.parametrize("template", [CHATML, CALLS, ENDS["llama 3"][0], QWEN3])
@pytest.mark.parametrize(
    "messages", [CONVERSATION, said_by("user assistant user assistant", "a", "b", "naïve  日本", "d\n"),
                 said_by("user assistant", "a<|im_end|>", "b")]
)  # fmt: skip
def test_samples_are_those_of_the_library(tmp_path, template, messages):
    context = context_of(tmp_path, template)
    row = {"messages": messages, "system": None, "tools": None}
    sample, reference = Chat().sample(row, context=context), Chat().reference(row, context=context)
    assert list(sample["input_ids"]) == reference["input_ids"]
    assert ("labels" in reference) == (template == CHATML)
    assert list(sample["labels"]) == reference.get("labels", list(sample["labels"]))
    assert list(sample["input_ids"]) != chat_reference(messages[:-1], context)["input_ids"]


def test_answers_and_prompts_are_those_of_the_library(tmp_path):
    from ringmaster.techniques.data.sources.chat import answered_chat

    context = context_of(tmp_path, ENDS["llama 3"][0])
    prompt, answer = CONVERSATION[:2], CONVERSATION[2:]
    assert answered_chat(prompt, answer, context) == chat_reference(prompt, context, answer=answer)
    sample, reference = (call({"prompt": prompt}, context=context) for call in (Prompt().sample, Prompt().reference))
    assert sample["input_ids"] == reference["input_ids"]
    assert Prompt().reference({"prompt": "a text"}, context=context) is None


def test_calls_are_those_of_the_library(tmp_path):
    context = context_of(tmp_path, CALLS)
    row = {"messages": called('{"city": "Rome"}'), "tools": TOOLS, "system": None}
    sample, reference = Chat().sample(row, context=context), Chat().reference(row, context=context)
    assert list(sample["input_ids"]) == reference["input_ids"]
