"""Numbers, labels, byte order marks and images that other programs would read otherwise are refused with their row."""

import json
import math
from decimal import Decimal

import numpy as np
import pytest
from PIL import Image

from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.class_labels import read_number
from ringmaster.techniques.data.images import read_image
from ringmaster.techniques.job_specs import DataSpec

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def prepared(path, **fields):
    spec = DataSpec(path=str(path), vocab_size=300, held_out=0, **fields)
    return prepare(spec, cache_dir=path.parent / "cache")


def fault_of(path, **fields):
    with pytest.raises(ValueError) as caught:
        prepared(path, **fields)
    return str(caught.value)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "value", [True, False, "1_000", "nan", "inf", "Infinity", "\u0661\u0662", "1\u00a0", "", " ", "1,5", "0x10", "1e",
              b"1.5", [1], None, 1j, Decimal("sNaN")],
)  # fmt: skip
def test_what_is_no_plain_number_is_not_read(value):
    assert math.isnan(read_number(value))


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3), (2.5, 2.5), ("3", 3), (" -3.5 ", -3.5), ("+1e-3", 1e-3), (".5", 0.5), ("5.", 5), ("1E3", 1000),
     (Decimal("1.5"), 1.5), (np.float32(0.5), 0.5), (np.int64(7), 7)],
)  # fmt: skip
def test_plain_numbers_are_read(value, number):
    assert read_number(value) == number


@pytest.mark.parametrize("value", ["1_000", True, "\u0663"])
def test_a_label_that_is_no_plain_number_is_refused_with_its_row(tmp_path, value):
    rows = [*({"text": f"word {n}", "label": n / 2} for n in range(4)), {"text": "x", "label": value}]
    path = jsonl(tmp_path / "d.jsonl", rows)
    assert f"d.jsonl, row 5: label {value!r} is not a finite number" in fault_of(path, kind="text-regression")


@pytest.mark.parametrize("name", ["input_ids", "labels"])
@pytest.mark.parametrize(("value", "what"), [(2**40, "more than 32 bits"), (2**70, "more than 32 bits"),
                                             (True, "not whole numbers")])  # fmt: skip
def test_token_ids_that_are_none_are_refused_with_their_row(tmp_path, name, value, what):
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [1, 2], name: [1, value]}]
    said = fault_of(jsonl(tmp_path / "d.jsonl", rows), kind="tokenized")
    assert "d.jsonl, row 2: " in said and name in said and what in said


def test_true_and_false_are_no_text(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", [{"input_ids": [True, False] * 9}] * 9)
    assert "line 1 has no text in column 'input_ids'" in fault_of(path, kind="language-modeling", seq_len=2)


@pytest.mark.parametrize(("first", "is_told"), [(2**24 - 4, False), (2**24, True)])
def test_whole_numbers_that_are_rounded_are_told(tmp_path, first, is_told):
    rows = [{"text": f"word {n}", "label": first + n} for n in range(4)]
    notes = prepared(jsonl(tmp_path / "d.jsonl", rows), kind="text-regression").notes
    assert any("whole number of more digits than 32 bits hold" in note for note in notes) is is_told


@pytest.mark.parametrize("value", ["1_000", True])
def test_a_feature_that_is_no_plain_number_is_refused_with_its_row(tmp_path, value):
    rows = [*({"x": n, "y": "ab"[n % 2]} for n in range(4)), {"x": value, "y": "a"}]
    features = [{"name": "x", "type": "number"}, {"name": "y", "type": "category", "is_output": True}]
    said = fault_of(jsonl(tmp_path / "d.jsonl", rows), kind="features", kwargs={"features": features})
    assert f"d.jsonl, row 5: x is {value!r}, which is not a number" in said


@pytest.mark.parametrize("options", [{}, {"labels": ["pos", "neg"]}])
@pytest.mark.parametrize(("first", "last", "said"), [("pos", ["pos"], "a list"), (["pos"], "pos", "not a list")])
def test_labels_of_which_some_are_lists_are_refused_with_their_row(tmp_path, options, first, last, said):
    rows = [{"text": f"word {n}", "label": first} for n in range(600)]
    path = jsonl(tmp_path / "d.jsonl", [*rows, {"text": "x", "label": last}])
    fault = fault_of(path, kind="text-classification", options=options)
    assert f"d.jsonl, row 601: label {last!r} is {said}" in fault
    assert "To fix: write all labels as lists" in fault


@pytest.mark.parametrize("held_out_path", [None, "b.jsonl"])
@pytest.mark.parametrize("options", [{}, {"labels": ["neg", "pos"]}])
@pytest.mark.parametrize("is_list_first", [True, False])
def test_labels_of_another_form_in_another_file_are_refused_with_their_row(
    tmp_path, chat_tokenizer, options, is_list_first, held_out_path
):
    plain = [{"text": f"word {n}", "label": ["neg", "pos"][n % 2]} for n in range(6)]
    lists = [{**row, "label": [row["label"]]} for row in plain]
    first, second = jsonl(tmp_path / "a.jsonl", plain), jsonl(tmp_path / "b.jsonl", lists)
    if is_list_first:
        first, second = jsonl(tmp_path / "a.jsonl", lists), jsonl(tmp_path / "b.jsonl", plain)
    separate = {"held_out_path": str(second)} if held_out_path else {}
    path = first if held_out_path else tmp_path / "*.jsonl"
    said = fault_of(path, kind="text-classification", options=options, tokenizer=chat_tokenizer, **separate)
    assert "b.jsonl, row 1: its label is " + ("not a list" if is_list_first else "a list") in said
    assert "a.jsonl, row 1 is " + ("one" if is_list_first else "none") in said
    assert "To fix: write all labels as lists" in said


@pytest.mark.parametrize("num_marks", [1, 2, 3])
def test_byte_order_marks_at_the_head_are_no_part_of_a_column(tmp_path, num_marks):
    head = "\ufeff" * num_marks
    for name, rows in (
        ("d.csv", 'text,label\n"one, two",a\nthree,b\n'),
        ("e.csv", '\n"text","label"\none,a\ntwo,b\n'),
        ("f.jsonl", '{"text": "one", "label": "a"}\n{"text": "two", "label": "b"}\n'),
    ):
        (tmp_path / name).write_text(head + rows)
        assert dict(prepared(tmp_path / name, kind="text-classification").columns)["text"] == "text"


def test_an_image_of_a_format_that_starts_programs_is_refused_with_its_file(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    for number in range(4):
        (tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "images" / "ab"[number % 2] / f"{number}.png")
    (tmp_path / "images" / "a" / "9.png").write_bytes(EPS)
    path = str(tmp_path / "images" / "**" / "*")
    spec = DataSpec(path=path, kind="image-classification", held_out=0, kwargs={"image_size": 8})
    with pytest.raises(ValueError, match=r"a/9\.png, row 1: is EPS, not one of PNG, .*\. To fix: replace the file"):
        prepare(spec, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kind", ["image-classification", None])
def test_an_image_of_a_hugging_face_data_set_is_refused_too(tmp_path, monkeypatch, kind):
    import datasets
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
    images = [*(Image.new("RGB", (8, 8), (n, 0, 0)) for n in range(3)), {"bytes": EPS, "path": None}]
    datasets.Dataset.from_dict({"image": images, "label": [0, 1, 0, 1]}, features=features).save_to_disk(
        str(tmp_path / "saved")
    )
    spec = DataSpec(dataset=str(tmp_path / "saved"), kind=kind, held_out=0)
    with pytest.raises(ValueError, match=r"(row 4|column 'image'): the image is EPS, not one of PNG"):
        prepare(spec, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "MPO"])
def test_images_of_raster_formats_are_read(tmp_path, format):
    frames = {"save_all": True, "append_images": [Image.new("RGB", (8, 8))]} if format == "MPO" else {}
    Image.new("RGB", (8, 8), (200, 0, 0)).save(tmp_path / "image", format=format, **frames)
    assert read_image(str(tmp_path / "image")).size == (8, 8)
