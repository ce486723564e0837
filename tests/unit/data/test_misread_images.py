"""Images are read as they are shown, and what is not an image of a class is refused or counted."""

import csv
import io

import datasets
import numpy as np
import pytest
from PIL import Image

from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.job_specs import DataSpec

ORIENTATIONS = range(1, 9)
ORIENTATION = 0x0112


def picture(value=0, size=(8, 8), mode="RGB"):
    """An image whose four corners differ."""
    pixels = np.full((size[1], size[0]), value, np.uint8)
    pixels[: size[1] // 2, : size[0] // 2] = 250
    pixels[size[1] // 2 :, : size[0] // 2] = 120
    return Image.fromarray(pixels).convert(mode)


def as_stored(shown, orientation):
    """The image that is shown as `shown` by an EXIF orientation, as a viewer turns it."""
    back = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return (shown.transpose(back[orientation]) if orientation in back else shown), exif


@pytest.fixture
def folder(tmp_path):
    """A folder of three images in each of two classes."""
    for number in range(6):
        name = ("cat", "dog")[number % 2]
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        picture(number).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


def spec_of(folder, **fields):
    options = {"kind": "image-classification", "path": str(folder / "**" / "*"), "held_out": 0}
    return DataSpec(**{**options, "kwargs": {"image_size": 8}, **fields})


def prepared_of(folder, **fields):
    return prepare(spec_of(folder, **fields), cache_dir=folder.parent / "cache")


def fault_of(folder, **fields):
    with pytest.raises(ValueError) as caught:
        prepared_of(folder, **fields)
    return str(caught.value)


def pixels_of(folder, **fields):
    return open_data(spec_of(folder, **fields), cache_dir=folder.parent / "cache")[0][0]["pixel_values"].numpy()


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("where", ["folder", "table", "saved", "columns"])
def test_images_are_turned_as_they_are_shown(tmp_path, orientation, where):
    shown = picture(size=(8, 16))
    stored, exif = as_stored(shown, orientation)
    written = io.BytesIO()
    stored.save(written, "png", exif=exif)
    wanted = np.moveaxis(np.asarray(shown.resize((8, 8), Image.Resampling.BILINEAR)), -1, 0) / 127.5 - 1
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "x.png").write_bytes(written.getvalue())
    fields = {}
    if where == "table":
        (tmp_path / "t.csv").write_text("image,label\nimages/a/x.png,a\nimages/b/x.png,b\n")
        fields = {"path": str(tmp_path / "t.csv")}
    elif where != "folder":
        rows = {"image": [{"bytes": written.getvalue(), "path": None}] * 2, "label": [0, 1]}
        features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
        fields = {"path": None, "dataset": str(tmp_path / "saved")}
        if where == "columns":
            fields |= {"kind": None, "kwargs": {}}
            wanted = np.moveaxis(np.asarray(shown), -1, 0) / 127.5 - 1
    np.testing.assert_allclose(pixels_of(tmp_path / "images", **fields), wanted, atol=1e-6)


def test_an_orientation_that_cannot_be_read_is_none(folder):
    picture(9).save(folder / "cat" / "a.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12")
    assert prepared_of(folder).num_samples == 7


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
@pytest.mark.parametrize("is_dataset", [False, True])
def test_pixels_of_more_than_eight_bits_are_refused(folder, mode, is_dataset):
    deep = Image.fromarray(np.full((8, 8), 3000, np.uint16)).convert(mode)
    name = "16.png" if mode == "I;16" else "16.tiff"
    deep.save(folder / "cat" / name)
    fields = {}
    if is_dataset:
        rows = {"image": [str(folder / "cat" / name), str(folder / "dog" / "1.png")], "label": [0, 1]}
        features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder.parent / "saved"))
        fields = {"path": None, "dataset": str(folder.parent / "saved"), "kind": None, "kwargs": {}}
    said = fault_of(folder, **fields)
    assert "more than 8 bits" in said
    assert name in said or is_dataset
    assert "To fix: save it with 8 bits" in said


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_other_modes_are_read_as_ever(folder, mode):
    suffix = "tif" if mode == "CMYK" else "png"
    image = picture(mode=mode)
    image.save(folder / "cat" / f"0.{suffix}")
    wanted = np.moveaxis(np.asarray(image.convert("RGB")), -1, 0) / 127.5 - 1
    found = open_data(spec_of(folder), cache_dir=folder.parent / "cache")[0]
    place = 1 if mode == "CMYK" else 0
    np.testing.assert_allclose(found[place]["pixel_values"].numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize(
    "content", [b"", b"no image", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF____WEBPVP8 "], ids=range(5)
)
def test_files_that_are_no_images_are_refused(folder, content):
    (folder / "cat" / "x.png").write_bytes(content)
    said = fault_of(folder)
    assert "cat/x.png" in said
    assert "To fix: replace the file, or remove it" in said


@pytest.mark.parametrize("is_table", [False, True])
def test_images_that_are_cut_off_or_too_large_are_refused(folder, is_table, monkeypatch):
    picture(size=(64, 64)).save(folder / "cat" / "x.jpg")
    fields = {}
    if is_table:
        with (folder.parent / "t.csv").open("w") as file:
            csv.writer(file).writerows([["image", "label"], ["images/cat/x.jpg", "cat"], ["images/dog/1.png", "dog"]])
        fields = {"path": str(folder.parent / "t.csv")}
    content = (folder / "cat" / "x.jpg").read_bytes()
    (folder / "cat" / "x.jpg").write_bytes(content[:-100])
    assert "cannot be read: Truncated File Read" in (said := fault_of(folder, **fields))
    assert ("t.csv, row 2" if is_table else "x.jpg, row 1") in said
    (folder / "cat" / "x.jpg").write_bytes(content)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert "cannot be read: Image size" in fault_of(folder, **fields)


# Folders


def test_hidden_folders_are_no_classes(folder):
    for name in (".ipynb_checkpoints", "__MACOSX/cat", "cat/.thumbs", "@eaDir", "dog/$RECYCLE.BIN"):
        (folder / name).mkdir(parents=True)
        picture().save(folder / name / "x.png")
    prepared = prepared_of(folder)
    assert (prepared.num_samples, prepared.labels) == (6, ("cat", "dog"))


@pytest.mark.parametrize("stray", ["stray.png", "cat/2021/x.png", "cat/2021/08/x.png"])
def test_images_beside_folders_of_images_are_refused(folder, stray):
    (folder / stray).parent.mkdir(parents=True, exist_ok=True)
    picture().save(folder / stray)
    said = fault_of(folder)
    assert ("images/stray.png" if stray == "stray.png" else "images/cat/0.png") in said
    assert "To fix: move" in said


def test_tables_are_not_asked_for_the_folders_of_images(folder):
    picture().save(folder / "stray.png")
    (folder.parent / "t.csv").write_text("image,label\nimages/stray.png,cat\nimages/dog/1.png,dog\n")
    assert prepared_of(folder, path=str(folder.parent / "t.csv")).num_samples == 2


def test_images_of_a_class_at_any_depth_are_read(folder):
    (folder / "birds" / "owl").mkdir(parents=True)
    picture(7).save(folder / "birds" / "owl" / "x.png")
    assert prepared_of(folder).labels == ("cat", "dog", "owl")


def test_folders_of_one_name_are_told_to_be_one_class(folder):
    kind = "image-classification"
    assert "one class" not in prepared_of(folder).summary(kind)
    for number, name in enumerate(("wolf/2021", "fox/2021", "fox/2022")):
        (folder / name).mkdir(parents=True)
        picture(number + 7).save(folder / name / "x.png")
    said = prepared_of(folder).summary(kind)
    assert "folders of one name are one class: fox/2021 and wolf/2021 as 2021" in said
    assert "2022," not in said.partition("folders of one name")[2]


@pytest.mark.parametrize("suffix", ["tif", "TIFF", "gif"])
def test_other_endings_of_images_are_read(folder, suffix):
    (folder / "bird").mkdir()
    picture(7).save(folder / "bird" / f"x.{suffix}", format="gif" if suffix == "gif" else "tiff")
    assert prepared_of(folder).labels == ("bird", "cat", "dog")


def test_files_that_are_left_out_are_counted(folder):
    for name in ("bird/x.svg", "bird/y.heic", "cat/notes.txt", "LICENSE", "fish/.keep", "cat/Thumbs.db"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    said = prepared_of(folder).summary("image-classification")
    assert "files left out, as they do not end as images do: 1 without an ending, 1 .heic, 1 .svg, 1 .txt" in said
    assert "folders without images: bird, fish" in said
    assert "left out" not in prepared_of(folder, path=str(folder / "*" / "*.png")).summary("image-classification")


def test_images_of_held_out_tables_are_those_beside_them(tmp_path):
    for part, shade in (("train", 0), ("test", 77)):
        (tmp_path / part).mkdir()
        for number in range(2):
            Image.new("RGB", (8, 8), (shade + number,) * 3).save(tmp_path / part / f"{number}.png")
        (tmp_path / part / "labels.csv").write_text("image,label\n0.png,a\n1.png,b\n")
    spec = spec_of(
        tmp_path / "x", path=str(tmp_path / "train" / "labels.csv"), held_out_path=str(tmp_path / "test" / "labels.csv")
    )
    training, held_out = open_data(spec, cache_dir=tmp_path / "cache")
    shades = [round((float(each["pixel_values"].mean()) + 1) * 127.5) for part in (training, held_out) for each in part]
    assert shades == [0, 1, 77, 78]
