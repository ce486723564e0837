"""Data on which no model can be trained, or whose evaluation would say nothing, is refused by jobs that train on it."""

import json
import os
import shutil

import datasets
import pytest
from PIL import Image

from ringmaster.codec import from_json
from ringmaster.techniques.data import prepare
from ringmaster.techniques.job_specs import DataSpec


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared_of(tmp_path, kind, rows, **spec):
    options = {"kind": kind, "vocab_size": 300, "held_out": 0, **spec}
    if rows is not None:
        options["path"] = jsonl(tmp_path / "d.jsonl", rows)
    return prepare(from_json(DataSpec, options), cache_dir=tmp_path / "cache")


def faults_of(tmp_path, kind, rows, **spec):
    return "; ".join(prepared_of(tmp_path, kind, rows, **spec).training_faults)


# Nothing to learn


@pytest.fixture(params=["trained", "given"])
def tokenizer(request, numbers_tokenizer):
    """A tokenizer that is trained on the data, or one that is given, whose samples are kept."""
    return None if request.param == "trained" else numbers_tokenizer


def image(*colour):
    """An image whose first pixel has a colour; the others are black."""
    result = Image.new("RGB", (4, 4))
    result.putpixel((0, 0), colour)
    return result


def texts(labels):
    return [{"text": f"one {n}", "label": label} for n, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("kind", "rows", "what"),
    [
        ("text-classification", texts(["pos"] * 9), "the label pos in column 'label'"),
        ("text-classification", texts([["a", "b"]] * 9), "the labels a, b in column 'label'"),
        ("text-classification", texts([0] * 9), "the label 0 in column 'label'"),
        ("text-regression", texts([0.5] * 9), "the label 0.5 in column 'label'"),
        ("text-regression", texts(["1"] * 9), "the label 1.0 in column 'label'"),
        ("token-classification", [{"tokens": ["one", "two"], "tags": ["O", "O"]}] * 9, "the label O in column 'tags'"),
        ("embedding", [{"anchor": "one", "positive": "two"}] * 9, "the same"),
    ],
)
def test_data_of_one_label_is_refused(tmp_path, tokenizer, kind, rows, what):
    said = faults_of(tmp_path, kind, rows, tokenizer=tokenizer)
    assert what in said
    assert "so that there is nothing to learn. To fix: " in said


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("text-classification", texts(["pos"] * 9 + ["neg"])),
        ("text-classification", texts([["a", "b"]] * 9 + [["a"]])),
        ("text-regression", texts([0.5] * 9 + [0.25])),
        ("token-classification", [{"tokens": ["one", "two"], "tags": ["O", "X"]}] * 9),
        ("token-classification", [{"tokens": ["one"], "tags": ["O"]}] * 9 + [{"tokens": ["it"], "tags": ["X"]}]),
        ("preference", [{"prompt": f"{n} ", "chosen": "one", "rejected": "one"} for n in range(4)]
            + [{"prompt": "is ", "chosen": "one", "rejected": "two"}] * 4),
        ("embedding", [{"anchor": word, "positive": word} for word in ("one", "two", "three")]),
        ("seq2seq", [{"input": "one", "target": "two"}] * 9),
        ("chat", [{"messages": [{"role": "user", "content": "is"}, {"role": "assistant", "content": "it"}]}] * 9),
    ],
)  # fmt: skip
def test_other_data_is_trained_on(tmp_path, tokenizer, kind, rows):
    assert faults_of(tmp_path, kind, rows, tokenizer=tokenizer) == ""


def test_one_class_is_refused_whatever_classes_are_named(tmp_path, tokenizer):
    said = faults_of(tmp_path, "text-classification", texts(["b"] * 9), tokenizer=tokenizer, labels=("a", "b"))
    assert "all 9 rows to train on have the label b in column 'label'" in said


def test_one_class_to_train_on_is_refused_whatever_is_held_out(tmp_path, tokenizer):
    held_out = jsonl(tmp_path / "h.jsonl", [{"text": "what", "label": "a"}, {"text": "is", "label": "a"}])
    said = faults_of(tmp_path, "text-classification", texts(["a"] * 9), tokenizer=tokenizer, held_out_path=held_out)
    assert "have the label a" in said


def test_images_of_one_class_are_refused(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        image(len(name), 9, ord(name[0])).save(tmp_path / "images" / name / "x.png")
    spec = {"path": str(tmp_path / "images" / "**" / "*"), "kwargs": {"image_size": 4}}
    assert faults_of(tmp_path, "image-classification", None, **spec) == ""
    shutil.rmtree(tmp_path / "images" / "dog")
    assert "have the label cat in column 'label'" in faults_of(tmp_path, "image-classification", None, **spec)


def test_saved_columns_of_one_label_are_refused(tmp_path):
    for labels, is_refused in (([1] * 9, True), ([1] * 8 + [2], False), ([1.0] * 9, True)):
        rows = {"x": [[float(n)] for n in range(9)], "label": labels}
        datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / f"saved {labels}"))
        said = faults_of(tmp_path, None, None, dataset=str(tmp_path / f"saved {labels}"))
        assert ("so that there is nothing to learn" in said) == is_refused


# Labels


def test_labels_that_differ_in_white_space_are_refused_with_their_rows(tmp_path, tokenizer):
    rows = texts(["pos", "neg"] * 9)
    rows[4]["label"], rows[7]["label"] = "pos ", "\tneg"
    with pytest.raises(ValueError) as caught:
        prepared_of(tmp_path, "text-classification", rows, tokenizer=tokenizer)
    assert "d.jsonl, row 5: label 'pos ' is not one of the classes neg, pos; " in str(caught.value)
    assert "d.jsonl, row 8: label '\\tneg' is not one of" in str(caught.value)
    assert prepared_of(tmp_path, "text-classification", texts([" pos", " neg"]), tokenizer=tokenizer).num_labels == 2
    labels = ("neg", "pos", "pos ", "\tneg")
    found = prepared_of(tmp_path, "text-classification", rows, tokenizer=tokenizer, labels=labels)
    assert found.labels == labels


def test_labels_that_differ_in_case_are_told(tmp_path, tokenizer):
    found = prepared_of(tmp_path, "text-classification", texts(["pos", "neg", "Pos"]), tokenizer=tokenizer)
    assert "classes that differ in case alone: Pos, pos" in found.summary("text-classification")
    labels = ("neg", "pos", "Pos")
    found = prepared_of(tmp_path, "text-classification", texts(labels), tokenizer=tokenizer, labels=labels)
    assert "case" not in found.summary("text-classification")


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["1", "1.0", "2"], "'1', '1.0'"),
        (["01", "1", "x"], "'01', '1'"),
        ([True, 1, 0], "'1', 'true'"),
        (["0", "FALSE", "x"], "'0', 'FALSE'"),
        (["caf\u00e9", "cafe\u0301", "tea"], "'cafe\\u0301', 'caf\\xe9'"),
        (["pos", "p\u200bos", "neg"], "'pos', 'p\\u200bos'"),
        (["so so", "so\u00a0So", "neg"], "'so so', 'so\\xa0So'"),
        (["\uff21", "a", "b"], "'a', '\\uff21'"),
        (["spam", "sp\u0430m", "b"], "'spam', 'sp\\u0430m'"),
        (["5.", "+5", "5e400"], "'+5', '5.'"),
        (["3E-9000", "0", "9e-99999999"], "'0', '3E-9000', '9e-99999999'"),
    ],
)
def test_labels_that_differ_in_how_they_are_written_are_told(tmp_path, tokenizer, labels, names):
    found = prepared_of(tmp_path, "text-classification", texts(labels), tokenizer=tokenizer)
    note = next(each for each in found.notes if each.startswith("classes that differ in how they are written alone"))
    assert note.endswith(f": {names}")
    others = ["1", "10", "one", "On e", 2**60, 2**60 + 1, "9" * 5000]
    found = prepared_of(tmp_path, "text-classification", texts(others), tokenizer=tokenizer)
    assert "written" not in "".join(found.notes)


@pytest.mark.parametrize(("several", "is_told"), [("a,b", True), ("a | b", True), ("b; c", True), ("1,000", False)])
def test_a_class_that_may_be_several_is_told(tmp_path, tokenizer, several, is_told):
    found = prepared_of(tmp_path, "text-classification", texts(["a", "b", several]), tokenizer=tokenizer)
    note = f"classes that may be several in one text, to be written as a list: {several}"
    assert (note in found.notes) is is_told


def test_a_label_of_a_word_that_is_not_seen_is_told(tmp_path, tokenizer):
    rows = [{"tokens": ["one", "\u200b"], "tags": ["O", "P"]}, {"tokens": ["one", " "], "tags": ["P", -100]}]
    found = prepared_of(tmp_path, "token-classification", rows, tokenizer=tokenizer)
    note = "1 row: a word without a visible character has a label; tokenizers may have no token for it"
    assert note in found.notes


@pytest.mark.parametrize(("missing", "is_told"), [("NaN", True), ("NA", True), ("None", True), ("none", False)])
def test_a_class_that_other_programs_read_as_missing_is_told(tmp_path, tokenizer, missing, is_told):
    found = prepared_of(tmp_path, "text-classification", texts(["a", "b", missing]), tokenizer=tokenizer)
    note = f"classes that pandas reads as missing values, and that are learnt as the others are: {missing}"
    assert (note in found.notes) is is_told


@pytest.mark.parametrize(("labels", "is_told"), [([-1, 0, 1], True), ([-1, 1, 1], False), (["-1", "0", "x"], False)])
def test_a_class_that_may_stand_for_none_is_told(tmp_path, tokenizer, labels, is_told):
    found = prepared_of(tmp_path, "text-classification", texts(labels), tokenizer=tokenizer)
    assert any(note.startswith("the class -1 is learnt as the others are") for note in found.notes) is is_told


def test_classes_without_a_row_to_train_on_are_told(tmp_path, tokenizer):
    rows = texts(["pos", "neg"] * 20)
    rows += [{"text": f"it {n}", "label": "rare"} for n in range(1)]
    for share in (0.3, 0.0):
        shares = {}
        for n in range(40):
            rows[-1]["text"] = f"it {n}"
            found = prepared_of(tmp_path, "text-classification", rows, tokenizer=tokenizer, held_out=share)
            shares[n] = "classes without a row to train on: rare" in found.summary("text-classification")
            if shares[n]:
                break
        assert any(shares.values()) == (share > 0)


# Rows on both sides


SENTENCES = [{"text": f"sentence {n}", "label": ["a", "b"][n % 2]} for n in range(60)]
KINDS = ("text-classification", None)


def splits(tmp_path, held_out, *, rows=SENTENCES, kind="text-classification", **spec):
    return faults_of(tmp_path, kind, rows, held_out_path=str(held_out), seq_len=8, **spec)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["same", "relative", "link", "hard link", "glob"])
def test_the_same_file_is_refused(tmp_path, tokenizer, kind, how):
    path, other = tmp_path / "d.jsonl", tmp_path / "other" / "h.jsonl"
    other.parent.mkdir()
    jsonl(path, SENTENCES)
    match how:
        case "same":
            other = path
        case "relative":
            other = tmp_path / "other" / ".." / "d.jsonl"
        case "link":
            other.symlink_to(path)
        case "hard link":
            os.link(path, other)
        case "glob":
            other = tmp_path / "[dh].jsonl"
    said = splits(tmp_path, other, kind=kind, tokenizer=tokenizer)
    assert f"held_out_path {str(other)!r} has the same rows as path: it names {tmp_path}/" in said
    assert "To fix: name other files" in said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["h.jsonl", "h.csv"])
def test_copies_are_refused(tmp_path, tokenizer, kind, name):
    if name == "h.csv":
        (tmp_path / name).write_text("label,text\n" + "".join(f"{r['label']},{r['text']}\n" for r in SENTENCES[::-1]))
    else:
        jsonl(tmp_path / name, SENTENCES)
    said = splits(tmp_path, tmp_path / name, kind=kind, tokenizer=tokenizer)
    assert "all 60 rows of the evaluation split are among those that are trained on" in said


@pytest.mark.parametrize("kind", KINDS)
def test_rows_on_both_sides_are_refused_with_their_number(tmp_path, tokenizer, kind):
    others = [{"text": f"another {n}", "label": "a"} for n in range(20)]
    held_out = jsonl(tmp_path / "h.jsonl", [*others[:7], *SENTENCES[30:33], *others[7:]])
    said = splits(tmp_path, held_out, kind=kind, tokenizer=tokenizer)
    assert "3 rows of the evaluation split are among those that are trained on, the first at " in said
    assert "h.jsonl, line 8, which is " in said
    assert "d.jsonl, line 31. To fix: " in said
    jsonl(tmp_path / "h.jsonl", others)
    assert splits(tmp_path, held_out, kind=kind, tokenizer=tokenizer) == ""


def test_equal_rows_on_one_side_are_no_fault(tmp_path, tokenizer):
    assert faults_of(tmp_path, "text-classification", SENTENCES * 3, tokenizer=tokenizer, held_out=0.2) == ""


def test_a_window_of_the_same_file_is_refused(tmp_path, tokenizer):
    rows = [{**row, "at": f"2026-01-{1 + n % 28:02}"} for n, row in enumerate(SENTENCES)]
    window = {"window": {"last_days": 9}, "time_column": "at"}
    said = splits(tmp_path, jsonl(tmp_path / "h.jsonl", rows), rows=rows, tokenizer=tokenizer, **window)
    assert "rows of the evaluation split are among those" in said
    early = [row for row in rows if row["at"] < "2026-01-10"]
    assert splits(tmp_path, jsonl(tmp_path / "h.jsonl", early), rows=rows, tokenizer=tokenizer, **window) == ""


def test_texts_in_several_files_are_told(tmp_path, tokenizer):
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("one two three " * 9 if number % 2 else f"one {number} " * 9)
    found = prepared_of(
        tmp_path, None, None, path=str(tmp_path / "*.txt"), seq_len=8, held_out=0.4, tokenizer=tokenizer
    )
    assert found.training_faults == ()
    assert "of the evaluation split are among those that are trained on" in found.summary("language-modeling")


def test_copies_of_images_are_refused(tmp_path):
    for part in ("train", "test"):
        for number in range(4):
            folder = tmp_path / part / ("cat", "dog")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            shade = number if part == "train" else (number, 99)[number > 0]
            image(shade, number, 1).save(folder / f"{part[:number]}{number}.png")
        rows = "".join(f"x{n}.png,{'ab'[n]}\n" for n in range(2))
        (tmp_path / part / "t.csv").write_text(f"image,label\n{rows}")
        for number in range(2):
            image(len(part), number, 7).save(tmp_path / part / f"x{number}.png")
    spec = {"kwargs": {"image_size": 4}}
    paths = {name: str(tmp_path / part / "*" / "*") for name, part in (("path", "train"), ("held_out_path", "test"))}
    said = faults_of(tmp_path, "image-classification", None, **paths, **spec)
    assert "1 row of the evaluation split are among those that are trained on" in said
    assert "test/cat/0.png" in said
    same = {**paths, "held_out_path": paths["path"]}
    assert "has the same rows as path" in faults_of(tmp_path, "image-classification", None, **same, **spec)
    tables = {name: str(tmp_path / part / "t.csv") for name, part in (("path", "train"), ("held_out_path", "test"))}
    assert faults_of(tmp_path, "image-classification", None, **tables, **spec) == ""
    shutil.copy(tmp_path / "train" / "x1.png", tmp_path / "test" / "x1.png")
    (tmp_path / "test" / "t.csv").touch()
    assert "1 row of the evaluation" in faults_of(tmp_path, "image-classification", None, **tables, **spec)


@pytest.mark.parametrize("kind", ["text-classification", None])
def test_one_split_on_both_sides_is_refused(tmp_path, kind):
    rows = {"text": [row["text"] for row in SENTENCES], "label": [row["label"] for row in SENTENCES]}
    datasets.DatasetDict(train=datasets.Dataset.from_dict(rows)).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"held_out_split 'train' is the split that is trained on\. To fix: "):
        prepared_of(tmp_path, kind, None, dataset=str(tmp_path / "saved"), held_out_split="train", seq_len=8)


@pytest.mark.parametrize("kind", ["text-classification", None])
def test_rows_of_both_splits_are_refused_with_their_number(tmp_path, kind, monkeypatch):
    others = [{"text": f"another {n}", "label": "ab"[n % 2]} for n in range(20)]
    parts = {"train": SENTENCES, "test": [*others[:7], *SENTENCES[30:33], *others[7:]], "clean": others}
    folder = str(tmp_path / "saved")
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(folder)
    said = faults_of(tmp_path, kind, None, dataset=folder, held_out_split="test", seq_len=8)
    assert (
        f"3 rows of the evaluation split are among those that are trained on, the first at dataset {folder!r}, " in said
    )
    assert "split 'test', line 8, which is " in said
    assert "split 'train', line 31. To fix: " in said
    assert faults_of(tmp_path, kind, None, dataset=folder, held_out_split="clean", seq_len=8) == ""
    loaded = datasets.load_from_disk(folder)
    monkeypatch.setattr(datasets, "load_dataset", lambda name: loaded)
    spec = {"dataset": "of/the-hub", "seq_len": 8}
    assert faults_of(tmp_path, kind, None, **spec, held_out_split="test") == ""
    found = prepared_of(tmp_path, kind, None, **spec, held_out_split="test")
    assert "3 rows of the evaluation split" in "".join(found.notes)
    loaded["copy"] = loaded["train"]
    assert "all 60 rows" in faults_of(tmp_path, kind, None, **spec, held_out_split="copy")


@pytest.mark.parametrize("kind", ["image-classification", None])
def test_images_of_both_splits_are_refused(tmp_path, kind):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    shades = {"train": range(8), "test": range(6, 12)}
    parts = {
        name: datasets.Dataset.from_list(
            [{"image": image(n, 0, 1), "label": n % 2} for n in numbers], features=features
        )
        for name, numbers in shades.items()
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    options = {} if kind is None else {"kwargs": {"image_size": 4}}
    said = faults_of(tmp_path, kind, None, dataset=str(tmp_path / "saved"), held_out_split="test", **options)
    assert "2 rows of the evaluation split are among those that are trained on" in said
