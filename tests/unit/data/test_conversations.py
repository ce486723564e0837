"""Conversations as rows: what of them is learnt, their tools and system prompts, by templates and by formats."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ringmaster.techniques.metric import IGNORED
from tests.unit.data.prepared_rows import NUM_ROWS, conversation, opened, refused


def test_only_what_the_assistant_said_is_learnt(tmp_path):
    rows = [{"messages": conversation(i)} for i in range(NUM_ROWS)]
    _, training, tokenizer = opened(tmp_path, "chat", rows, vocab_size=400)
    tokens, labels = training[7]["input_ids"].tolist(), training[7]["labels"]
    whole = tokenizer.apply_chat_template(conversation(7), tokenize=True, return_dict=True)["input_ids"]
    assert tokens[: len(whole)] == whole
    learnt = tokenizer.decode(labels[labels != IGNORED])
    assert learnt == "it is 7<|im_end|>\nyes<|im_end|>\n"


def test_a_template_of_the_tokenizers_own_is_used(tmp_path, chat_tokenizer):
    rows = [{"messages": conversation(i), "tools": None} for i in range(4)]
    _, training, tokenizer = opened(tmp_path, "chat", rows, tokenizer=chat_tokenizer)
    labels = training[1]["labels"]
    assert tokenizer.decode(labels[labels != IGNORED]) == "it is 1 ; yes ;"
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(chat_tokenizer).chat_template


def test_an_answer_may_come_first(tmp_path, chat_tokenizer):
    turns = [{"role": "assistant", "content": "yes it is"}, *conversation(1)[1:3]]
    given = tmp_path / "given"
    shutil.copytree(chat_tokenizer, given)
    template = given / "chat_template.jinja"
    template.write_text("system : what ; " + template.read_text())
    for tokenizer in (given, chat_tokenizer):
        _, training, loaded = opened(tmp_path, "chat", [{"messages": turns}] * 4, tokenizer=str(tokenizer))
        labels = training[1]["labels"]
        assert loaded.decode(labels[labels != IGNORED]) == "yes it is ; it is 1 ;"
    template.write_text(template.read_text().replace("assistant : ", ""))
    said = refused(tmp_path, "chat", [{"messages": turns}] * 4, tokenizer=str(given))
    assert "row 1: message 1 is rendered in another way" in said


REASONING = (
    "{% for m in messages %}{{ m.role + ' : ' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ ('1 ' if loop.last else '') + m.content + ' ; ' }}{% endgeneration %}{% else %}{{ m.content + ' ; ' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def test_answers_that_a_template_marks_may_depend_on_what_follows(tmp_path, chat_tokenizer):
    """As those of templates that leave the reasoning of earlier answers out."""
    template = Path(chat_tokenizer) / "chat_template.jinja"
    rows = [{"messages": conversation(i)} for i in range(4)]
    template.write_text(REASONING)
    _, training, tokenizer = opened(tmp_path, "chat", rows, tokenizer=chat_tokenizer)
    labels = training[1]["labels"]
    assert tokenizer.decode(labels[labels != IGNORED]) == "it is 1 ; 1 yes ;"
    whole = tokenizer.apply_chat_template(rows[1]["messages"], return_dict=True)["input_ids"]
    assert training[1]["input_ids"].tolist() == whole
    template.write_text(REASONING.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    said = refused(tmp_path, "chat", rows, tokenizer=chat_tokenizer)
    assert "row 1: message 3 is rendered in another way" in said
    assert "marks answers with {% generation %}" in said


def test_conversations_in_share_gpts_format_are_read(tmp_path):
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    _, training, tokenizer = opened(tmp_path, "chat", [{"conversations": turns}] * 4, vocab_size=270)
    labels = training[0]["labels"]
    assert tokenizer.decode(labels[labels != IGNORED]) == "hello<|im_end|>\n"


WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.name + ' ' }}{% endfor %}{% for m in messages %}{{ m.role + ' : ' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + ' ' }}{% endfor %}{{ (m.content or '') + ' ; ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
TOOLS = [{"name": "three"}]


@pytest.fixture
def tool_tokenizer(chat_tokenizer):
    """A tokenizer whose chat template renders tools and their calls."""
    (Path(chat_tokenizer) / "chat_template.jinja").write_text(WITH_TOOLS)
    return chat_tokenizer


def test_calls_and_results_in_share_gpts_format_are_tool_calls(tmp_path, tool_tokenizer):
    turns = [
        {"from": "human", "value": "what is it"},
        {"from": "function_call", "value": json.dumps({"name": "three", "arguments": {}})},
        {"from": "observation", "value": "one"},
        {"from": "gpt", "value": "it is one"},
    ]
    _, training, tokenizer = opened(tmp_path, "chat", [{"conversations": turns}] * 3, tokenizer=tool_tokenizer)
    labels = training[0]["labels"]
    assert tokenizer.decode(labels[labels != IGNORED]) == "three ; it is one ;"
    wrong = [{**turns[0], "from": "humam"}, *turns[1:]]
    assert "row 1: message 1 is from 'humam'. To fix: give one of system, user, assistant" in refused(
        tmp_path, "chat", [{"conversations": wrong}], tokenizer=tool_tokenizer
    )
    wrong = [turns[0], {**turns[1], "value": "three()"}, *turns[2:]]
    assert "row 1: message 2 is not a function_call. To fix: give JSON" in refused(
        tmp_path, "chat", [{"conversations": wrong}], tokenizer=tool_tokenizer
    )


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), None, "", [], " "])
@pytest.mark.parametrize("kind", ["chat", "completion", "preference"])
def test_tools_are_rendered_for_every_kind_of_conversation(tmp_path, tool_tokenizer, kind, tools):
    prompt, answer = ([{"role": role, "content": "it"}] for role in ("user", "assistant"))
    row = {"messages": prompt + answer, "prompt": prompt, "completion": answer, "chosen": answer, "rejected": answer}
    row["rejected"] = [{"role": "assistant", "content": "one"}]
    _, training, tokenizer = opened(tmp_path, kind, [{**row, "tools": tools}] * 3, tokenizer=tool_tokenizer)
    tokens = training[0]["input_ids"].reshape(-1, training[0]["input_ids"].shape[-1])[0]
    said = tokenizer.decode(tokens, skip_special_tokens=False).split()
    assert (said[0] == "three") == (tools in (TOOLS, json.dumps(TOOLS)))


def test_what_a_template_does_not_render_is_refused(tmp_path, chat_tokenizer):
    rows = [{"messages": conversation(1), "tools": TOOLS}, {"messages": conversation(1), "tools": None}]
    said = refused(tmp_path, "chat", rows, tokenizer=chat_tokenizer)
    assert "row 1: the chat template ignores tools. To fix: set data.tokenizer to one whose" in said
    call = {"role": "assistant", "content": "one", "tool_calls": [{"function": {"name": "three"}}]}
    said = refused(tmp_path, "chat", [{"messages": [*conversation(1), call]}], tokenizer=chat_tokenizer)
    assert "row 1: the chat template ignores tool_calls. To fix: " in said
    said = refused(tmp_path, "chat", [{"messages": conversation(1), "tools": "three()"}], tokenizer=chat_tokenizer)
    assert "row 1: tools are 'three()'. To fix: give a list of functions" in said
    texts = {"prompt": "what", "completion": "one", "chosen": "one", "rejected": "two", "tools": TOOLS}
    for kind in ("completion", "preference"):
        assert "row 1: a row of texts has tools" in refused(tmp_path, kind, [texts], tokenizer=chat_tokenizer)


def test_a_system_prompt_may_have_a_column(tmp_path, chat_tokenizer):
    first = [{"role": "system", "content": "one two"}]
    rows = [{"system": "one two", "messages": [*first[i % 2 :], *conversation(i)[1:]]} for i in range(2)]
    _, training, tokenizer = opened(tmp_path, "chat", rows, tokenizer=chat_tokenizer)
    for sample in training:
        assert tokenizer.decode(sample["input_ids"]).count("one two") == 1
    said = refused(tmp_path, "chat", [{**rows[0], "system": "three"}] * 2, tokenizer=chat_tokenizer)
    assert "row 1: the row has a system prompt, and its messages begin with another; " in said
    row = {"instruction": "say it", "input": "ho", "output": "ho", "system": "be brief", "history": []}
    _, training, tokenizer = opened(tmp_path, "completion", [row] * 3)
    text = tokenizer.decode(training[0]["input_ids"], skip_special_tokens=True)
    assert text == "be brief\n\nsay it\n\nhoho"
    said = refused(tmp_path, "completion", [{**row, "history": [["a", "b"]]}])
    assert "row 1: a row has a history. To fix: make its turns messages" in said


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path, bert_tokenizer):
    said = refused(tmp_path, "chat", [{"messages": conversation(1)}], tokenizer=bert_tokenizer)
    assert "the tokenizer has no chat template. To fix: set data.tokenizer" in said
