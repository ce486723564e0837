"""Images as rows: how they are resized and normalised, and those that are refused."""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.job_specs import DataSpec


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


def test_all_broken_images_of_a_folder_are_reported(images):
    other, cut = (images / "images" / "cats" / name for name in ("other.png", "cut.png"))
    other.write_bytes(b"no image")
    cut.write_bytes((images / "images" / "cats" / "0.png").read_bytes()[:-30])
    spec = DataSpec(kind="image-classification", path=str(images / "images" / "**" / "*"), held_out=0)
    with pytest.raises(ValueError, match=r"To fix: replace the file, or remove it$") as caught:
        prepare(spec, cache_dir=images / "cache")
    assert f"{other}, row 1: is not an image that can be read" in str(caught.value)
    assert f"{cut}, row 1: is not an image that can be read" in str(caught.value)
