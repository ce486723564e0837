"""The built-in kinds of data that make a sample of each row: tokens, labels, masks, classes, and what is refused."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from ringmaster.codec import from_json
from ringmaster.techniques.data import fetch, open_data, prepare, sampler_of, width_of
from ringmaster.techniques.data.inference import infer_kind
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.metric import IGNORED

NUM_ROWS = 40


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(tmp_path, kind, rows, **spec):
    """The prepared data of some rows, its training samples, and its tokenizer, if it has one."""
    path = jsonl(tmp_path / "rows.jsonl", rows)
    given = from_json(DataSpec, {"kind": kind, "path": path, "vocab_size": 300, "held_out": 0, **spec})
    prepared = prepare(given, cache_dir=tmp_path / "cache")
    training, _ = open_data(given, cache_dir=tmp_path / "cache", prepared=prepared)
    tokenizer = prepared.tokenizer_dir and AutoTokenizer.from_pretrained(prepared.tokenizer_dir)
    return prepared, training, tokenizer


def refused(tmp_path, kind, rows, **spec):
    with pytest.raises(ValueError) as caught:
        opened(tmp_path, kind, rows, **spec)
    return str(caught.value)


REVIEWS = [{"text": f"review {i}", "label": ["good", "bad", "so so"][i % 3]} for i in range(NUM_ROWS)]


def test_classes_are_found_in_the_labels(tmp_path):
    prepared, training, tokenizer = opened(tmp_path, "text-classification", REVIEWS)
    assert prepared.labels == ("bad", "good", "so so")
    assert prepared.num_labels == 3
    assert [training[i]["labels"].item() for i in range(3)] == [1, 0, 2]
    sample = training[4]
    assert tokenizer.decode(sample["input_ids"][sample["attention_mask"].bool()]) == "review 4"
    assert dict(prepared.columns) == {"text": "text", "label": "label"}


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([2, 10, 1], ("1", "2", "10")),
        ([0, 3, 1], ("0", "1", "2", "3")),
        (["0", "2", "2"], ("0", "1", "2")),
        ([True, False, True], ("false", "true")),
        ([1.0, 2.0, 5.0], ("1", "2", "5")),
        (["b", "1", "a"], ("1", "a", "b")),
    ],
)
def test_classes_are_ordered(tmp_path, labels, names):
    rows = [{"text": "a", "label": label} for label in labels]
    assert opened(tmp_path, "text-classification", rows)[0].labels == names


def test_named_classes_keep_their_order(tmp_path):
    prepared, training, _ = opened(tmp_path, "text-classification", REVIEWS, labels=("so so", "good", "bad", "none"))
    assert prepared.num_labels == 4
    assert [training[i]["labels"].item() for i in range(3)] == [1, 2, 0]


@pytest.mark.parametrize("kind", ["text-classification", "token-classification"])
def test_rows_of_a_file_to_evaluate_on_have_the_classes_of_training(tmp_path, kind):
    is_tokens = kind == "token-classification"
    rows = [{"tokens": ["a"], "labels": [each["label"]]} for each in REVIEWS] if is_tokens else REVIEWS
    few = jsonl(tmp_path / "few.jsonl", rows[:1])
    assert opened(tmp_path, kind, rows, held_out_path=few)[0].labels == ("bad", "good", "so so")
    odd = jsonl(tmp_path / "odd.jsonl", [rows[0], {"tokens": ["a"], "labels": ["great"]} if is_tokens else
                                         {"text": "a", "label": "great"}])  # fmt: skip
    said = refused(tmp_path, kind, rows, held_out_path=odd)
    assert "odd.jsonl, row 2: label 'great' is not one of the classes bad, good, so so. To fix: " in said


def test_a_row_may_have_several_classes(tmp_path):
    rows = [{"text": "a", "labels": ["x", "z"]}, {"text": "b", "labels": []}, {"text": "c", "labels": ["y"]}]
    prepared, training, _ = opened(tmp_path, "text-classification", rows)
    assert prepared.labels == ("x", "y", "z")
    assert [training[i]["labels"].tolist() for i in range(3)] == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert training[0]["labels"].is_floating_point()


def test_pairs_of_texts_have_the_tokenizers_special_tokens(tmp_path, bert_tokenizer):
    rows = [{"text": "one two", "text_pair": "three", "label": i % 2} for i in range(4)]
    _, training, tokenizer = opened(tmp_path, "text-classification", rows, tokenizer=bert_tokenizer)
    sample = {name: tensor.tolist() for name, tensor in training[0].items()}
    assert tokenizer.convert_ids_to_tokens(sample["input_ids"]) == ["[CLS]", "one", "two", "[SEP]", "three", "[SEP]"]
    assert sample["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    reference = tokenizer("one two", "three")
    assert sample["input_ids"] == reference["input_ids"]
    assert sample["token_type_ids"] == reference["token_type_ids"]


def test_a_row_without_the_second_text_that_others_have_is_refused(tmp_path, bert_tokenizer):
    rows = [{"text": "one two", "text_pair": "three" if i != 2 else None, "label": i % 2} for i in range(6)]
    said = refused(tmp_path, "text-classification", rows, tokenizer=bert_tokenizer)
    assert "rows.jsonl, line 3 has no value in 'text_pair'. To fix: add the value, or remove the row" in said


@pytest.mark.parametrize("length", [3, 4, 5, 6, 7, 8])
def test_the_longer_text_of_a_pair_is_cut(tmp_path, bert_tokenizer, length):
    rows = [{"text": "one two one two", "text_pair": "three", "label": i % 2} for i in range(4)]
    prepared, training, tokenizer = opened(
        tmp_path, "text-classification", rows, tokenizer=bert_tokenizer, seq_len=length
    )
    reference = tokenizer("one two one two", "three", truncation="longest_first", max_length=length)
    assert prepared.num_truncated == (4 if length < 8 else 0)
    kept = training[0]["attention_mask"].bool()
    assert training[0]["input_ids"][kept].tolist() == reference["input_ids"]
    assert prepared.seq_len == length


def test_what_is_cut_is_counted(tmp_path):
    rows = [{"prompt": "a" * 5, "completion": "b" * length} for length in (3, 30, 300)]
    prepared, training, _ = opened(tmp_path, "completion", rows, seq_len=10, vocab_size=257)
    assert prepared.num_truncated == 2
    assert fetch(training, range(3))["input_ids"].shape == (3, 10)
    assert prepared.lengths == (10, 10)


def test_typical_lengths_are_recorded(tmp_path):
    rows = [{"prompt": "p", "completion": "c" * length} for length in (1, 3, 5, 9)]
    assert opened(tmp_path, "completion", rows, seq_len=20, vocab_size=257)[0].lengths == (7, 11)


def test_what_has_nothing_to_learn_is_left_out(tmp_path):
    rows = [{"prompt": "p" * length, "completion": "c"} for length in (1, 2, 40, 50)]
    prepared, training, _ = opened(tmp_path, "completion", rows, seq_len=10, vocab_size=257)
    assert (len(training), prepared.num_samples, prepared.num_left_out) == (2, 2, 2)
    assert prepared.summary("completion").endswith("2 were left out, as nothing to learn was left of them")
    said = refused(tmp_path / "..", "completion", rows[2:], seq_len=10, vocab_size=257)
    assert "holds no row to train on. To fix: raise seq_len" in said


def test_a_prompt_has_no_labels(tmp_path):
    rows = [{"question": f"what is {i}?", "answer": f" it is {i}"} for i in range(NUM_ROWS)]
    _, training, tokenizer = opened(tmp_path, "completion", rows)
    tokens, labels = training[3]["input_ids"], training[3]["labels"]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "what is 3? it is 3"
    assert tokenizer.decode(labels[labels != IGNORED]) == " it is 3<|endoftext|>"
    assert "attention_mask" not in training[3]


def test_an_instruction_may_have_an_input(tmp_path):
    rows = [{"instruction": "say it twice", "input": word, "output": f"{word} {word}"} for word in ("a", "b", "")]
    _, training, tokenizer = opened(tmp_path, "completion", rows)
    texts = [tokenizer.decode(training[i]["input_ids"], skip_special_tokens=True) for i in (0, 2)]
    assert texts == ["say it twice\n\naa a", "say it twice "]


def test_a_completion_may_be_a_message(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "ho"}]}] * 3
    _, training, tokenizer = opened(tmp_path, "completion", rows, vocab_size=270)
    tokens, labels = training[0]["input_ids"], training[0]["labels"]
    assert tokenizer.decode(labels[labels != IGNORED]) == "ho<|im_end|>\n"
    assert tokenizer.decode(tokens).startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho")


def conversation(i):
    return [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": f"what is {i}?"},
        {"role": "assistant", "content": f"it is {i}"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]


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


def test_both_answers_are_rows_of_a_sample(tmp_path):
    rows = [{"prompt": f"q {i}", "chosen": " yes, I know", "rejected": " no"} for i in range(NUM_ROWS)]
    prepared, training, tokenizer = opened(tmp_path, "preference", rows)
    batch = fetch(training, [0, 5])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 2, prepared.seq_len)
    said = [[tokenizer.decode(labels[labels != IGNORED]) for labels in sample] for sample in batch["labels"]]
    assert said == [[" yes, I know<|endoftext|>", " no<|endoftext|>"]] * 2
    assert tokenizer.decode(batch["input_ids"][1, 1], skip_special_tokens=True) == "q 5 no"


@pytest.mark.parametrize("has_prompt", [True, False], ids=["prompt", "whole-conversations"])
def test_answers_may_be_messages(tmp_path, has_prompt):
    prompt = [{"role": "user", "content": "hi"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("hello", "go away")]
    chosen, rejected = answers if has_prompt else (prompt + answer for answer in answers)
    row = {"chosen": chosen, "rejected": rejected, **({"prompt": prompt} if has_prompt else {})}
    _, training, tokenizer = opened(tmp_path, "preference", [row] * 3, vocab_size=280)
    said = [tokenizer.decode(labels[labels != IGNORED]) for labels in training[0]["labels"]]
    assert said == ["hello<|im_end|>\n", "go away<|im_end|>\n"]


def test_a_prompt_is_what_both_texts_begin_with(tmp_path):
    rows = [{"chosen": "Human: hi Assistant: yes", "rejected": "Human: hi Assistant: no"}] * 3
    _, training, tokenizer = opened(tmp_path, "preference", rows)
    said = [tokenizer.decode(labels[labels != IGNORED]) for labels in training[0]["labels"]]
    assert said == [" yes<|endoftext|>", " no<|endoftext|>"]


def test_texts_begin_with_the_tokenizers_special_token_and_are_encoded_as_one(tmp_path, bert_tokenizer):
    row = {"prompt": "what is three", "completion": "two", "chosen": "two", "rejected": " it"}
    whole = ["[CLS]", "what", "is", "three", "##two"]
    _, training, tokenizer = opened(tmp_path, "completion", [row] * 3, tokenizer=bert_tokenizer)
    assert tokenizer.convert_ids_to_tokens(training[0]["input_ids"].tolist()) == whole
    assert training[0]["labels"].tolist() == [IGNORED] * 4 + tokenizer.convert_tokens_to_ids(["##two"])
    _, training, _ = opened(tmp_path, "preference", [row] * 3, tokenizer=bert_tokenizer)
    assert tokenizer.convert_ids_to_tokens(training[0]["input_ids"][0].tolist()) == whole
    _, training, _ = opened(tmp_path, "prompt", [{"prompt": row["prompt"]}] * 3, tokenizer=bert_tokenizer)
    assert tokenizer.convert_ids_to_tokens(training[0]["input_ids"][:4].tolist()) == whole[:4]


def test_pairs_have_masks_and_no_labels(tmp_path):
    rows = [{"anchor": f"q {i}", "positive": f"a rather long answer {i}"} for i in range(NUM_ROWS)]
    _, training, _ = opened(tmp_path, "embedding", rows)
    batch = fetch(training, [0, 1])
    assert set(batch) == {"input_ids", "attention_mask"}
    lengths = batch["attention_mask"].sum(-1)
    assert (lengths[:, 0] < lengths[:, 1]).all()


def test_triplets_have_a_hard_negative_each(tmp_path):
    rows = [{"anchor": f"q {i}", "positive": f"answer {i}", "negative": "another answer"} for i in range(NUM_ROWS)]
    _, training, tokenizer = opened(tmp_path, "embedding", rows)
    batch = fetch(training, [0, 1])
    assert batch["input_ids"].shape[:2] == batch["attention_mask"].shape[:2] == (2, 3)
    said = tokenizer.decode(batch["input_ids"][1, 2][batch["attention_mask"][1, 2].bool()])
    assert said == "another answer"
    rows[2] |= {"negative": None}
    assert "line 3 has no value in 'negative'" in refused(tmp_path, "embedding", rows)


def test_an_encoder_decoders_labels_are_the_target(tmp_path):
    rows = [{"input": f"number {i}", "target": f"it is {i}"} for i in range(NUM_ROWS)]
    _, training, tokenizer = opened(tmp_path, "seq2seq", rows, kwargs={"prefix": "say: "})
    sample = training[2]
    assert tokenizer.decode(sample["input_ids"][sample["attention_mask"].bool()]) == "say: number 2<|endoftext|>"
    assert tokenizer.decode(sample["labels"][sample["labels"] != IGNORED]) == "it is 2<|endoftext|>"


def test_the_first_token_of_a_word_has_its_label(tmp_path, bert_tokenizer):
    rows = [{"tokens": ["one", "threetwo", "two"], "labels": ["A", "B", "O"]}] * 4
    prepared, training, tokenizer = opened(tmp_path, "token-classification", rows, tokenizer=bert_tokenizer)
    assert prepared.labels == ("A", "B", "O")
    shown = list(
        zip(tokenizer.convert_ids_to_tokens(training[0]["input_ids"]), training[0]["labels"].tolist(), strict=True)
    )
    assert shown == [
        ("[CLS]", IGNORED), ("one", 0), ("three", 1), ("##two", IGNORED), ("two", 2), ("[SEP]", IGNORED)
    ]  # fmt: skip


def test_numbers_are_predicted_by_regression(tmp_path):
    rows = [{"text": f"row {i}", "label": f"{i / 2}"} for i in range(NUM_ROWS)]
    prepared, training, _ = opened(tmp_path, "text-regression", rows)
    assert prepared.num_labels == 1
    assert training[3]["labels"].item() == 1.5


@pytest.fixture
def images(tmp_path):
    """A folder of images by class, and a table that names them."""
    rows = []
    for i in range(12):
        name = ("cats", "dogs")[i % 2]
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        pixels = np.full((6, 9, 3), 20 * i, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
        rows.append([f"images/{name}/{i}.png", name])
    (tmp_path / "images" / "README.md").write_text("not an image")
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "label"], *rows])
    return tmp_path


@pytest.mark.parametrize("path", ["images/**/*", "table.csv"])
def test_images_are_resized_and_normalised(images, path):
    spec = DataSpec(kind="image-classification", path=str(images / path), kwargs={"image_size": 4}, held_out=0)
    prepared = prepare(spec, cache_dir=images / "cache")
    training, _ = open_data(spec, cache_dir=images / "cache", prepared=prepared)
    assert (prepared.kind, prepared.image_size, prepared.num_channels) == ("images", 4, 3)
    assert prepared.labels == ("cats", "dogs")
    found = {(round(sample["pixel_values"][0, 0, 0].item(), 4), sample["labels"].item()) for sample in training}
    assert found == {(round(20 * i / 127.5 - 1, 4), i % 2) for i in range(12)}
    processor = AutoImageProcessor.from_pretrained(prepared.processor_dir)
    theirs = processor(Image.open(images / "images/cats/2.png"), return_tensors="pt")["pixel_values"][0]
    assert theirs.shape == (3, 4, 4)
    assert theirs[0, 0, 0].item() == pytest.approx(40 / 127.5 - 1, abs=1e-4)


def test_a_processor_says_how_images_are_normalised(images):
    grey = {"image_processor_type": "ViTImageProcessor", "size": 4, "image_mean": [0.25], "do_normalize": False}
    (images / "vit").mkdir()
    (images / "vit" / "preprocessor_config.json").write_text(json.dumps(grey))
    spec = DataSpec(
        kind="image-classification", path=str(images / "table.csv"), kwargs={"processor": str(images / "vit")}
    )
    training, _ = open_data(spec, cache_dir=images / "cache")
    assert training[3]["pixel_values"].shape == (1, 4, 4)
    assert training[3]["pixel_values"][:, 0, 0].tolist() == pytest.approx([60 / 255])
    (images / "vit" / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"processor .*vit' cannot be read: .* To fix: give a folder with"):
        prepare(spec, cache_dir=images / "other")


def test_folders_of_splits_are_not_mixed(images):
    for split in ("train", "test"):
        shutil.copytree(images / "images", images / "splits" / split)
    spec = DataSpec(kind="image-classification", path=str(images / "splits" / "**" / "*"))
    with pytest.raises(ValueError, match=r"has a folder for each of test, train. To fix: set path to the one"):
        prepare(spec, cache_dir=images / "cache")
    one = replace(spec, path=str(images / "splits/train/**/*"), held_out_path=str(images / "splits/test/**/*"))
    prepared = prepare(one, cache_dir=images / "cache")
    assert (prepared.num_samples, prepared.num_held_out) == (12, 12)


def test_images_may_be_normalised_in_another_way(images):
    kwargs = {"image_size": 4, "mean": [0.1, 0.2, 0.3], "std": [1, 2, 4], "mode": "RGB"}
    spec = DataSpec(kind="image-classification", path=str(images / "table.csv"), kwargs=kwargs, held_out=0)
    training, _ = open_data(spec, cache_dir=images / "cache")
    assert training[3]["pixel_values"][:, 0, 0].tolist() == pytest.approx(
        [(60 / 255 - 0.1) / 1, (60 / 255 - 0.2) / 2, (60 / 255 - 0.3) / 4]
    )


def test_a_batch_is_as_wide_as_its_longest_sample(tmp_path):
    rows = [{"prompt": "q", "completion": "word " * length} for length in (1, 2, 3, 40)]
    prepared, training, _ = opened(tmp_path, "completion", rows, vocab_size=257)
    lengths = [int((training[i]["labels"] != IGNORED).sum()) + 1 for i in range(4)]
    assert width_of(training, [0, 1], multiple_of=1) == lengths[1]
    assert width_of(training, [1, 0], multiple_of=8) == -(-lengths[1] // 8) * 8
    assert width_of(training, [3, 0], multiple_of=1000) == prepared.seq_len == lengths[3]
    narrow = fetch(training, [0, 1], width=lengths[1])
    wide = fetch(training, [0, 1])
    assert (wide["input_ids"][:, : lengths[1]] == narrow["input_ids"]).all()
    assert (wide["labels"][:, lengths[1] :] == IGNORED).all()


def test_batches_have_samples_of_similar_length(tmp_path):
    rows = [{"prompt": "q", "completion": "word " * (1 + i * 7 % 40)} for i in range(NUM_ROWS)]
    prepared, training, _ = opened(tmp_path, "completion", rows, sampling="length-grouped", vocab_size=257)
    plain = DataSpec(kind="completion", path=str(tmp_path / "rows.jsonl"), vocab_size=257, held_out=0.0)
    assert prepared.folder == prepare(plain, cache_dir=tmp_path / "cache").folder  # prepared once
    lengths = [int((sample["labels"] != IGNORED).sum()) + 1 for sample in training]
    assert training.lengths().tolist() == lengths
    data = DataSpec(path="", sampling="length-grouped")
    sampler = sampler_of(Job(name="a", model=ModelSpec(), data=data, global_batch_size=4), training)
    assert max(lengths) in {lengths[i] for i in sampler.indices(0)}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"source": "python-stdlib"}, "samples of kind python-stdlib have one length. To fix: set sampling to random"),
        ({"path": "*.png", "kind": "image-classification"}, "samples of kind image-classification have one length"),
        ({"path": "a.jsonl", "kind": "chat", "sampling": "sorted"}, "'sorted' is unknown. To fix: give one of random"),
    ],
)
def test_samples_of_one_length_are_not_grouped(tmp_path, spec, says):
    with pytest.raises(ValueError, match=says):
        prepare(DataSpec(**{"sampling": "length-grouped", **spec}), cache_dir=tmp_path)


@pytest.mark.parametrize("kind", ["embedding", "completion"])
def test_samples_may_be_read_in_any_order(tmp_path, kind):
    """Pairs [2, tokens] and rows [tokens], cut, padded, or as long as the width."""
    first, second = ("anchor", "positive") if kind == "embedding" else ("prompt", "completion")
    rows = [{first: "a" * (1 + i), second: "b" * (2 + 3 * i)} for i in range(4)]
    _, training, _ = opened(tmp_path, kind, rows, vocab_size=257)
    alone, order = [training[i] for i in range(4)], (3, 0, 3, 2)
    for width in (3, 7, training.width):
        for name, tensor in fetch(training, order, width=width).items():
            assert tensor.tolist() == [alone[i][name][..., :width].tolist() for i in order]


def test_a_trained_tokenizer_pads(tmp_path):
    """As pipelines of transformers do, which encode texts in batches."""
    rows = [{"text": "some text", "label": "a"}, {"text": "more", "label": "b"}]
    *_, tokenizer = opened(tmp_path, "text-classification", rows)
    masks = tokenizer(["some text", "more"], padding=True)["attention_mask"]
    assert len(masks[0]) == len(masks[1]) > sum(masks[1])


def test_a_dataset_names_its_classes(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos", "none"])}
    )
    rows = {"text": ["a", "b", "c"] * 4, "label": [1, 0, 1] * 4}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    spec = DataSpec(kind="text-classification", dataset=str(tmp_path / "saved"), vocab_size=300, held_out=0)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    assert prepared.labels == ("neg", "pos", "none")


def test_texts_are_as_long_as_sentence_transformers_reads_them_or_it_is_told(tmp_path, bert_tokenizer):
    folder = Path(bert_tokenizer)
    base = shutil.copytree(folder, tmp_path / "base")
    (base / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.Transformer"}]')
    (base / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    path = str(tmp_path / "rows.jsonl")
    jsonl(tmp_path / "rows.jsonl", [{"anchor": "one two three four", "positive": f"one {n}"} for n in range(9)])

    def told(tokenizer, **spec):
        given = DataSpec(kind="embedding", path=path, tokenizer=str(tokenizer), held_out=0, **spec)
        prepared = prepare(given, cache_dir=tmp_path / "cache")
        notes = tuple(note for note in prepared.notes if "Sentence-Transformers" in note)
        return prepared.seq_len, prepared.num_truncated, notes

    assert told(base) == (4, 9, ())
    length, _, (note,) = told(base, seq_len=20)
    assert length == 20
    assert "of which Sentence-Transformers reads 4 with" in note
    assert told(folder)[1:] == (0, ())


@pytest.fixture
def numbered(tmp_path):
    """A function that returns a data set of texts, with the number of each one's class among `names`."""

    def make(names, *classes, is_list=False):
        import datasets  # local: the import takes seconds

        label = datasets.ClassLabel(names=names)
        values = [[names.index(each)] if is_list else names.index(each) for each in classes]
        features = {"text": datasets.Value("string"), "label": datasets.List(label) if is_list else label}
        rows = {"text": [f"{'-'.join(names)} {n}" for n in range(len(classes))], "label": values}
        return datasets.Dataset.from_dict(rows, features=datasets.Features(features))

    return make


@pytest.mark.parametrize("is_list", [False, True])
def test_splits_that_number_their_classes_in_another_order_are_read_by_name(tmp_path, numbered, is_list):
    import datasets

    training = numbered(["neg", "pos", "none"], "neg", "pos", "none", is_list=is_list)
    held_out = numbered(["none", "pos", "neg"], "neg", "pos", "none", is_list=is_list)
    datasets.DatasetDict(train=training, test=held_out).save_to_disk(str(tmp_path / "saved"))
    spec = DataSpec(kind="text-classification", dataset=str(tmp_path / "saved"), held_out_split="test", vocab_size=300)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    assert prepared.labels == ("neg", "pos", "none")
    one, other = (fetch(split, range(3))["labels"] for split in open_data(spec, cache_dir=tmp_path / "cache"))
    assert one.tolist() == other.tolist()


def test_a_class_that_only_the_held_out_split_names_is_refused_where_a_row_has_it(tmp_path, numbered):
    import datasets

    splits = {"train": numbered(["a", "b"], "a", "b"), "test": numbered(["c", "b", "a"], "a", "c")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    spec = DataSpec(kind="text-classification", dataset=str(tmp_path / "saved"), held_out_split="test", vocab_size=300)
    with pytest.raises(ValueError, match=r"row 2: label 'c' is not one of the classes a, b. To fix"):
        prepare(spec, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("others", [["pos", "neg"], ["neg", "pos"], ["neg", "pos", "none"], ["pos"]])
@pytest.mark.parametrize("where", ["path", "held_out_path"])
def test_classes_that_parquet_files_number_are_read_by_name(tmp_path, numbered, others, where, is_list):
    numbered(["neg", "pos"], "neg", "pos", is_list=is_list).to_parquet(tmp_path / "one.parquet")
    numbered(others, "pos", "pos", is_list=is_list).to_parquet(tmp_path / "two.parquet")
    files = {"path": "*.parquet"} if where == "path" else {"path": "one.parquet", "held_out_path": "two.parquet"}
    spec = DataSpec(
        kind="text-classification", vocab_size=300, held_out=0, **{key: str(tmp_path / f) for key, f in files.items()}
    )
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    assert prepared.labels[:2] == ("neg", "pos")
    splits = open_data(spec, cache_dir=tmp_path / "cache", prepared=prepared)
    labels = [fetch(each, range(len(each)))["labels"] for each in splits if len(each)]
    numbers = [(each.argmax(-1) if is_list else each).tolist() for each in labels]
    assert numbers == ([[0, 1, 1, 1]] if where == "path" else [[0, 1], [1, 1]])


@pytest.mark.parametrize(
    ("number", "says"),
    [(-1, "row 3: label -100 means no label. To fix: add the label"), (None, "line 3 has no value in 'label'")],
)
def test_a_row_of_a_parquet_file_without_a_class_is_refused(tmp_path, numbered, number, says):
    import datasets

    rows = numbered(["neg", "pos"], "neg", "pos")
    more = datasets.Dataset.from_dict({"text": ["none"], "label": [number]}, features=rows.features)
    datasets.concatenate_datasets([rows, more]).to_parquet(tmp_path / "rows.parquet")
    spec = DataSpec(kind="text-classification", path=str(tmp_path / "rows.parquet"), vocab_size=300)
    with pytest.raises(ValueError, match=says):
        prepare(spec, cache_dir=tmp_path / "cache")


def test_an_answer_may_consist_of_blanks_and_a_text_that_begins_with_its_prompt_may_not(tmp_path):
    path = tmp_path / "rows.jsonl"

    def prepared(kind, row):
        path.write_text(json.dumps(row) + "\n")
        return prepare(DataSpec(kind=kind, path=str(path), vocab_size=300, held_out=0), cache_dir=tmp_path / "cache")

    prepared("completion", {"prompt": "a", "completion": " "})
    prepared("preference", {"prompt": "a", "chosen": "b", "rejected": " "})
    with pytest.raises(ValueError, match=r"row 1: the rejected is ' ', which has no visible character"):
        prepared("preference", {"chosen": " b", "rejected": " "})


def test_a_class_that_only_another_parquet_file_names_is_refused(tmp_path, numbered):
    numbered(["a", "b"], "a", "b").to_parquet(tmp_path / "one.parquet")
    numbered(["c", "b", "a"], "a", "c").to_parquet(tmp_path / "two.parquet")
    paths = {"path": str(tmp_path / "one.parquet"), "held_out_path": str(tmp_path / "two.parquet")}
    with pytest.raises(ValueError, match=r"row 2: label 'c' is not one of the classes a, b. To fix"):
        prepare(DataSpec(kind="text-classification", vocab_size=300, **paths), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("text-classification", {"text": "a"}, "has no column for label_column; its rows have text. To fix: set"),
        ("text-classification", {"text": 3, "label": "a"}, "rows.jsonl, row 1: the text is int, not text"),
        ("text-classification", {"text": "", "label": "a"}, "row 1: the text is empty. To fix: add text, or remove"),
        (
            "text-classification",
            {"text": " \t\u200b", "label": "a"},
            "row 1: the text is .* has no visible character",
        ),
        ("embedding", {"anchor": "a", "positive": " \n"}, "the positive is .* has no visible character"),
        ("embedding", {"anchor": "a", "positive": "\x00\u3164\ufe0f"}, "the positive is .* has no visible character"),
        ("text-classification", {"text": "a", "label": 0.5}, "row 1: label 0.5 .* set data.kind to text-regression"),
        ("text-classification", {"text": "a", "label": None}, "line 1 has no value in 'label'. To fix: add the value"),
        ("text-classification", {"text": "a", "label": ""}, "row 1: label '' in column 'label' is not a class"),
        ("text-classification", {"text": "a", "label": "3.47"}, "label '3.47' .* set data.kind to text-regression"),
        ("text-classification", {"text": "a", "label": [1, 0, 1]}, "row 1: label 1 is twice among the labels of a row"),
        ("text-regression", {"text": "a", "label": "b"}, "row 1: label 'b' is not a finite number"),
        ("text-regression", {"text": "a", "label": 1e39}, r"row 1: label 1e\+39 is not a finite number of 32 bits"),
        ("text-classification", {"text": "\ud800", "label": "a"}, "line 1 has half of a surrogate pair"),
        ("token-classification", {"tokens": ["a"], "labels": ["x", "y"]}, "there are 1 tokens and 2 labels"),
        ("token-classification", {"tokens": "a", "labels": ["x"]}, "tokens are str, not a list"),
        ("chat", {"messages": []}, "row 1: messages are not a list with a message"),
        ("chat", {"messages": [{"role": "user"}]}, "message 1 has neither content nor tool_calls"),
        ("chat", {"messages": [{"content": "a"}]}, "message 1 has no role"),
        (
            "chat",
            {"messages": [{"role": "assistant", "content": 3}]},
            "row 1: message 1 has a content that is int, and only text is read. To fix: give a text",
        ),
        ("chat", {"messages": [{"role": "user", "content": "a"}]}, "no message is the assistant's"),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "c"}]},
            "chosen and rejected are of different types",
        ),
        ("embedding", {"anchor": "a", "positive": " "[:0]}, "the positive is empty"),
        ("seq2seq", {"input": ["a"], "target": "b"}, "the input is list, not text"),
        ("image-classification", {"image": "none.png", "label": "a"}, "none.png cannot be read"),
    ],
)
def test_wrong_rows_name_their_place(tmp_path, kind, row, says):
    with pytest.raises(ValueError, match=says):
        opened(tmp_path, kind, [row])


def test_wrong_rows_of_a_file_are_reported_together(tmp_path, chat_tokenizer):
    good, wrong = {"messages": conversation(1)}, {"messages": []}
    rows = [good, wrong, {"messages": [{"role": "user", "content": "a"}]}, good, *[wrong] * 4]
    said = refused(tmp_path, "chat", rows, tokenizer=chat_tokenizer)
    assert "row 2: messages are not a list with a message; " in said
    assert "row 3: no message is the assistant's, so there is nothing to learn; " in said
    assert "row 7: messages" in said
    assert "row 8" not in said
    assert said.count("To fix: ") == 1
    assert said.endswith("give [{role: user, content: ...}, ...]; remove the row")


def test_a_row_that_cannot_be_read_is_reported_with_wrong_ones_before_it(tmp_path, bert_tokenizer):
    rows = [*REVIEWS, {"text": ["a"], "label": "good"}, {"text": None, "label": "good"}]
    said = refused(tmp_path, "text-classification", rows, tokenizer=bert_tokenizer)
    assert f"row {len(rows) - 1}: the text is list, not text; " in said
    assert f"line {len(rows)} has no value in 'text'. To fix: " in said


def test_wrong_rows_to_train_on_and_held_out_are_reported_together(tmp_path, bert_tokenizer):
    held_out = jsonl(tmp_path / "held.jsonl", [{"text": None, "label": "good"}])
    said = refused(
        tmp_path,
        "text-classification",
        [*REVIEWS, {"text": "a", "label": None}],
        tokenizer=bert_tokenizer,
        held_out_path=held_out,
    )
    assert "has no value in 'label'; " in said
    assert "held.jsonl, line 1 has no value in 'text'. To fix: " in said


def test_all_broken_images_of_a_folder_are_reported(images):
    other, cut = (images / "images" / "cats" / name for name in ("other.png", "cut.png"))
    other.write_bytes(b"no image")
    cut.write_bytes((images / "images" / "cats" / "0.png").read_bytes()[:-30])
    spec = DataSpec(kind="image-classification", path=str(images / "images" / "**" / "*"), held_out=0)
    with pytest.raises(ValueError, match=r"To fix: replace the file, or remove it$") as caught:
        prepare(spec, cache_dir=images / "cache")
    assert f"{other}, row 1: is not an image that can be read" in str(caught.value)
    assert f"{cut}, row 1: is not an image that can be read" in str(caught.value)


def test_a_label_that_was_not_named_is_refused(tmp_path):
    said = refused(tmp_path, "text-classification", REVIEWS, labels=("good", "bad"))
    assert "row 3: label 'so so' is not one of the classes good, bad" in said


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path, bert_tokenizer):
    said = refused(tmp_path, "chat", [{"messages": conversation(1)}], tokenizer=bert_tokenizer)
    assert "the tokenizer has no chat template. To fix: set data.tokenizer" in said


CAUSAL, CLASSIFIER = "LlamaForCausalLM", "BertForSequenceClassification"


@pytest.mark.parametrize(
    ("row", "architecture", "kind"),
    [
        ({"messages": []}, CAUSAL, "chat"),
        ({"chosen": "", "rejected": ""}, CAUSAL, "preference"),
        ({"prompt": "", "completion": ""}, CAUSAL, "completion"),
        ({"prompt": "", "completion": "", "text": ""}, CAUSAL, None),
        ({"prompt": "", "completion": "", "label": True}, CAUSAL, "unpaired-preference"),
        ({"text": ""}, CAUSAL, None),
        ({"text": "", "label": ""}, CLASSIFIER, "text-classification"),
        ({"text": "", "stars": ""}, CLASSIFIER, "text-classification"),
        ({"text": ""}, "T5ForConditionalGeneration", None),
        ({"sentence1": "", "sentence2": "", "label": ""}, CLASSIFIER, "text-classification"),
        ({"tokens": [], "ner_tags": []}, "BertForTokenClassification", "token-classification"),
        ({"input": "", "target": ""}, "T5ForConditionalGeneration", "seq2seq"),
        ({"anchor": "", "positive": ""}, "BertModel", "embedding"),
        ({"image": "", "label": ""}, "ViTForImageClassification", "image-classification"),
        ({"messages": []}, None, "chat"),
        ({"prompt": "", "completion": ""}, None, None),
    ],
)
def test_the_kind_is_inferred_where_there_is_no_doubt(tmp_path, row, architecture, kind):
    spec = DataSpec(path=jsonl(tmp_path / "rows.jsonl", [row]))
    model = ModelSpec(factory="a:b") if architecture is None else ModelSpec(architecture=architecture)
    assert infer_kind(spec, model) == kind
