"""Conversations with images as samples: what is learnt, in which forms rows may be, and which are refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ringmaster.techniques.data import fetch, open_data, prepare
from ringmaster.techniques.job_specs import DataSpec
from tests import image_texts

ANSWER = "It is red."


@pytest.fixture(scope="module")
def processor():
    return image_texts.smol_processor()


@pytest.fixture(scope="module")
def model(processor, tmp_path_factory):
    """The folder of a model's processor."""
    folder = tmp_path_factory.mktemp("model")
    processor.save_pretrained(folder)
    return folder


@pytest.fixture
def make(tmp_path, model):
    """A function make(rows, **settings) that returns the spec of rows, which may name images a.png to c.png."""
    for seed, (name, width, height) in enumerate((("a.png", 40, 20), ("b.png", 15, 30), ("c.png", 9, 9))):
        image_texts.write_image(tmp_path / name, width=width, height=height, seed=seed)

    def spec(rows, **settings):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        plain = DataSpec(kind="image-text", path=str(file), tokenizer=str(model), held_out=0.0, seq_len=200)
        return replace(plain, **settings)

    return spec


def conversation(*parts, answer=ANSWER):
    return {"messages": [{"role": "user", "content": [*parts]}, {"role": "assistant", "content": answer}]}


def image(name):
    return {"type": "image", "image": name}


def text(words):
    return {"type": "text", "text": words}


def samples_of(spec, folder):
    prepared = prepare(spec, cache_dir=folder / "cache")
    training, _ = open_data(spec, cache_dir=folder / "cache", prepared=prepared)
    return prepared, training


def called(processor, row, folder):
    """What the processor makes of a row's rendered text and its images."""
    from PIL import Image

    messages = [
        {**each, "content": [text(each["content"])] if isinstance(each["content"], str) else each["content"]}
        for each in row["messages"]
    ]
    names = [part["image"] for each in messages for part in each["content"] if part["type"] == "image"]
    rendered = processor.apply_chat_template(messages)
    images = [Image.open(folder / name) for name in names]
    return rendered, processor(text=[rendered], images=[images], return_tensors="pt", add_special_tokens=False)


ROWS = [
    conversation(image("a.png"), text("What colour?")),
    conversation(text("Is "), image("b.png"), text(" as "), image("a.png"), image("c.png"), text("?")),
]
ROWS[1]["messages"] += [
    {"role": "user", "content": [text("And "), image("c.png")]},
    {"role": "assistant", "content": "Yes, that one."},
]


def test_a_sample_is_what_the_processor_makes_of_the_rendered_row(make, tmp_path, processor):
    prepared, training = samples_of(make(ROWS), tmp_path)
    for number, row in enumerate(ROWS):
        rendered, expected = called(processor, row, tmp_path)
        sample = fetch(training, [number])
        width = expected["input_ids"].shape[1]
        assert torch.equal(sample["input_ids"][:, :width], expected["input_ids"])
        assert set(sample["input_ids"][0, width:].tolist()) <= {processor.tokenizer.pad_token_id}
        assert torch.equal(sample["pixel_values"], expected["pixel_values"])
        assert torch.equal(sample["pixel_attention_mask"], expected["pixel_attention_mask"].bool())
        learnt = processor.decode(sample["labels"][0][sample["labels"][0] >= 0])
        answers = [each.partition(":")[2] for each in rendered.split("Assistant")[1:]]
        assert learnt == "".join(each.partition("User:")[0] for each in answers)
        assert (sample["labels"] == sample["input_ids"])[sample["labels"] >= 0].all()
    assert prepared.images == {"token": processor.image_token_id, "counts": [12, 12, 20, 20], "arrays": {}}
    assert prepared.seq_len == 200


def test_a_batch_is_filled_up_with_images_of_zeros(make, tmp_path):
    _, training = samples_of(make(ROWS), tmp_path)
    batch = fetch(training, [0, 1])
    alone = [fetch(training, [row]) for row in range(2)]
    number = alone[0]["pixel_values"].shape[1]
    assert torch.equal(batch["pixel_values"][:1, :number], alone[0]["pixel_values"])
    assert not batch["pixel_values"][0, number:].any()
    assert torch.equal(batch["pixel_values"][1:], alone[1]["pixel_values"])


PLACES = {"messages": [{"role": "user", "content": [{"type": "image"}, text("What colour?")]}]}
PLACES["messages"].append({"role": "assistant", "content": ANSWER})
PLAIN = [{"role": "user", "content": "What colour?"}, {"role": "assistant", "content": ANSWER}]
FORMS = {
    "a column of images": {**PLACES, "images": ["a.png"]},
    "a column of one image": {**PLACES, "image": "a.png"},
    "datasets' form of a file": {**PLACES, "images": [{"bytes": None, "path": "a.png"}]},
    "texts alone, as TRL reads them": {"messages": PLAIN, "images": ["a.png"]},
    "a path": conversation({"type": "image", "path": "a.png"}, text("What colour?")),
    "OpenAI's parts": conversation({"type": "image_url", "image_url": {"url": "a.png"}}, text("What colour?")),
    "LLaVA's files": {
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>What colour?"}, {"from": "gpt", "value": ANSWER}],
    },
    "JSON in columns": {"images": json.dumps(["a.png"]), "messages": json.dumps(PLACES["messages"])},
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_every_form_become_the_same_sample(make, tmp_path, form):
    _, expected = samples_of(make(ROWS[:1]), tmp_path)
    _, training = samples_of(make([FORMS[form]]), tmp_path)
    for name, values in fetch(expected, [0]).items():
        assert torch.equal(fetch(training, [0])[name], values), name


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_parquet_files_hold_images_as_datasets_writes_them(make, tmp_path, is_in_parts):
    from datasets import Dataset, Features, Image, List, Value

    _, expected = samples_of(make(ROWS[:1]), tmp_path)
    row = {**PLACES, "images": [{"bytes": (tmp_path / "a.png").read_bytes(), "path": None}]}
    content = List({"type": Value("string"), "text": Value("string")}) if is_in_parts else Value("string")
    messages = PLACES["messages"] if is_in_parts else PLAIN
    messages = [
        {
            **each,
            "content": [text(each["content"])] if is_in_parts and isinstance(each["content"], str) else each["content"],
        }
        for each in messages
    ]
    features = Features({"messages": List({"role": Value("string"), "content": content}), "images": List(Image())})
    table = Dataset.from_list([{**row, "messages": messages}] * 2, features=features)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    spec = make([])
    for where in ({"path": str(tmp_path / "rows.parquet")}, {"path": None, "dataset": str(tmp_path / "saved")}):
        _, training = samples_of(replace(spec, **where), tmp_path)
        for name, values in fetch(expected, [0]).items():
            assert torch.equal(fetch(training, [1])[name], values), name


def test_wrong_rows_are_refused_at_once_with_their_numbers(make, tmp_path):
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    rows = [
        ROWS[0],
        conversation(image("gone.png"), image("broken.png")),
        conversation(text("no image")),
        {**PLACES, "images": ["a.png", "b.png"]},
        conversation(image("a.png"), text("<image> as text")),
    ]
    with pytest.raises(ValueError) as caught:
        prepare(make(rows), cache_dir=tmp_path / "cache")
    problems, _, remedies = str(caught.value).partition(". To fix: ")
    lines = problems.split(f"{tmp_path / 'rows.jsonl'}, row ")[1:]
    assert [line.partition(":")[0] for line in lines] == ["2", "3", "4", "5"]
    assert "image 1 of 2: " in lines[0] and "gone.png" in lines[0] and "image 2 of 2: " in lines[0]
    assert "no image" in lines[1]
    assert "1 places for images, and the row has 2 images" in lines[2]
    assert "<image> 2 times" in lines[3]
    assert "replace the files" in remedies


def test_images_that_do_not_fit_into_the_length_are_refused_and_text_is_cut(make, tmp_path):
    prepared, training = samples_of(
        make([conversation(image("c.png"), text("?"), answer=ANSWER * 20)], seq_len=64), tmp_path
    )
    assert prepared.num_truncated == 1 and training[0]["input_ids"].shape == (64,)
    with pytest.raises(ValueError, match=r"row 2: its images end at token 160, and a sample has at most 40 tokens"):
        prepare(make(ROWS, seq_len=40), cache_dir=tmp_path / "cache")


def test_another_image_behind_the_same_path_is_prepared_anew(make, tmp_path):
    spec = make(ROWS[:1])
    first = prepare(spec, cache_dir=tmp_path / "cache")
    assert prepare(spec, cache_dir=tmp_path / "cache") == first
    shutil.copyfile(tmp_path / "b.png", tmp_path / "a.png")
    second, training = samples_of(spec, tmp_path)
    assert second.digest != first.digest
    assert fetch(training, [0])["pixel_values"].shape[1] == 3


def test_another_image_processor_is_other_data(make, tmp_path, processor):
    first = prepare(make(ROWS), cache_dir=tmp_path / "cache")
    image_texts.smol_processor(splits=False).save_pretrained(tmp_path / "whole")
    spec, training = samples_of(make(ROWS, tokenizer=str(tmp_path / "whole")), tmp_path)
    assert spec.digest != first.digest
    assert fetch(training, [0])["pixel_values"].shape[1] == 1


def test_a_tokenizer_without_tokens_of_images_is_refused(make, tmp_path, model):
    folder = tmp_path / "text"
    shutil.copytree(model, folder)
    tokenizer = image_texts.tiny_tokenizer(["<|im_start|>"])
    tokenizer.chat_template = image_texts.SMOL_TEMPLATE
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="no token <image>"):
        prepare(make(ROWS, tokenizer=str(folder)), cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"needs data\.tokenizer"):
        prepare(make(ROWS, tokenizer=None), cache_dir=tmp_path / "cache")


def test_transparent_and_turned_images_are_read_as_they_are_seen(make, tmp_path):
    from PIL import Image

    Image.new("RGBA", (16, 16), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    turned = Image.open(tmp_path / "a.png")
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    rows = [conversation(image("clear.png")), conversation(image("turned.png"))]
    _, training = samples_of(make(rows), tmp_path)
    assert np.allclose(training[0]["pixel_values"].numpy(), 1)
    upright = fetch(training, [1])["input_ids"][0].tolist()
    assert upright.count(258) == 4 * 3  # 20 x 40 pixels: two rows of one tile, and the whole


def test_paths_are_relative_to_their_file(make, tmp_path):
    spec = make(ROWS)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("rows.jsonl", "a.png", "b.png", "c.png"):
        shutil.move(tmp_path / name, moved / name)
    prepared, _ = samples_of(replace(spec, path=str(moved / "rows.jsonl")), tmp_path)
    assert prepared.num_samples == 2
    assert Path(prepared.folder, "processor", "processor_config.json").is_file()


def test_a_pair_of_answers_has_the_images_of_its_prompt(make, tmp_path, processor):
    prompt, answers = ROWS[0]["messages"][:1], ("It is red.", "It is some other colour.")
    pair = {"prompt": prompt, **dict(zip(("chosen", "rejected"), answers, strict=True))}
    as_messages = {role: [{"role": "assistant", "content": pair[role]}] for role in ("chosen", "rejected")}
    as_text = {"prompt": "What colour?", "images": ["a.png"], "chosen": answers[0], "rejected": answers[1]}
    rows = [pair, {"prompt": prompt, **as_messages}, as_text]
    _, training = samples_of(make(rows, kind="image-preference"), tmp_path)
    batch = fetch(training, range(3))
    for place, answer in enumerate(answers):
        row = {"messages": [*prompt, {"role": "assistant", "content": answer}]}
        _, expected = called(processor, row, tmp_path)
        width = expected["input_ids"].shape[1]
        for number in range(3):
            assert torch.equal(batch["input_ids"][number, place, :width], expected["input_ids"][0])
            learnt = batch["labels"][number, place]
            assert processor.decode(learnt[learnt >= 0]) == f" {answer}<end_of_utterance>\n"
            assert torch.equal(batch["pixel_values"][number, place], expected["pixel_values"][0])


def test_wrong_pairs_are_refused(make, tmp_path):
    prompt = ROWS[0]["messages"][:1]
    rows = [
        {"prompt": prompt, "chosen": PLAIN, "rejected": ANSWER},
        {"prompt": [{"role": "user", "content": "?"}], "chosen": ANSWER, "rejected": "No."},
        {"prompt": [{"role": "user", "content": [image("gone.png")]}], "chosen": ANSWER, "rejected": "No."},
    ]
    with pytest.raises(ValueError) as caught:
        prepare(make(rows, kind="image-preference"), cache_dir=tmp_path / "cache")
    for part in (
        "row 1: ",
        "chosen begins with a message",
        "row 2: it has no image",
        "row 3: image 1 of 1: ",
        "gone.png",
    ):
        assert part in str(caught.value)
