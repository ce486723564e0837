"""Images become what the library's own image processor makes of them, or they are refused."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import is_torchvision_available

from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.data.class_labels import ClassLabels
from ringmaster.techniques.data.image_processors import PROCESSOR
from ringmaster.techniques.data.inference import with_processor_of
from ringmaster.techniques.data.row_kind import SampleContext
from ringmaster.techniques.data_source import data_source_named
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.scoring.scored_rows import read_alike, read_by

KIND = "image-classification"
SIDE = {"height": 16, "width": 16}
VIT = {"image_processor_type": "ViTImageProcessor", "size": SIDE}
CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 20}, "crop_size": SIDE}
CONVNEXT = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 14}, "crop_pct": 0.875}
OFFSET = {"image_processor_type": "EfficientNetImageProcessor", "size": SIDE, "rescale_offset": True}
PERCEIVER = {"image_processor_type": "PerceiverImageProcessor", "size": SIDE, "crop_size": {"height": 20, "width": 20}}
OLD = {"feature_extractor_type": "ViTFeatureExtractor", "size": 16, "image_mean": [0.4, 0.5, 0.6]}
CONFIGS = {
    "vit": VIT,
    "bicubic": VIT | {"resample": 3, "image_mean": [0.1, 0.2, 0.3]},
    "nearest": VIT | {"resample": 0},
    "of old": OLD,
    "fast": VIT | {"image_processor_type": "ViTImageProcessorFast"},
    "rectangle": VIT | {"size": {"height": 8, "width": 24}},
    "not normalized": VIT | {"do_normalize": False},
    "not rescaled": VIT | {"do_rescale": False, "do_normalize": False},
    "rescaled by another factor": VIT | {"rescale_factor": 1 / 127.5},
    "grey": VIT | {"image_mean": [0.5], "image_std": [0.25]},
    "padded": VIT | {"do_resize": False, "do_pad": True, "pad_size": {"height": 64, "width": 64}},
    "crop": CLIP,
    "crop, to RGB": CLIP | {"do_convert_rgb": True},
    "crop of a share": CONVNEXT | {"resample": 3},
    "crop before": PERCEIVER,
    "offset": OFFSET | {"rescale_factor": 1 / 127.5, "include_top": True},
    "patches": {"image_processor_type": "Siglip2ImageProcessor", "patch_size": 4, "max_num_patches": 16},
}


def noise(seed, size=(30, 22), channels=3):
    pixels = np.random.default_rng(seed).integers(256, size=(size[1], size[0], channels), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def folder(tmp_path):
    """A folder of three images in each of two classes, of different sizes."""
    for number in range(6):
        name = ("cat", "dog")[number % 2]
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        noise(number, size=(30 + number, 22)).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


def base_of(folder, config, name="base"):
    (folder.parent / name).mkdir(exist_ok=True)
    (folder.parent / name / PROCESSOR).write_text(json.dumps(config))
    return str(folder.parent / name)


def spec_of(folder, **kwargs):
    return DataSpec(kind=KIND, path=str(folder / "**" / "*"), held_out=0, kwargs=kwargs)


def opened(spec, folder):
    prepared = prepare(spec, cache_dir=folder.parent / "cache")
    return prepared, open_data(spec, cache_dir=folder.parent / "cache", prepared=prepared)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_samples_are_what_the_library_makes_of_images(folder, name):
    base = base_of(folder, CONFIGS[name])
    prepared, training = opened(spec_of(folder, processor=base), folder)
    theirs = AutoImageProcessor.from_pretrained(base, backend="pil")
    files = sorted(folder.rglob("*.png"))
    assert len(training) == len(files)
    for file, sample in zip(files, training, strict=True):
        image = Image.open(file).convert("L" if name == "grey" else "RGB")
        wanted = theirs(image, return_tensors="pt")
        assert sample.keys() == {*wanted, "labels"}
        for key, values in wanted.items():
            np.testing.assert_array_equal(sample[key].numpy(), values[0].numpy())
    assert (prepared.processor_dir / PROCESSOR).read_bytes() == (folder.parent / "base" / PROCESSOR).read_bytes()


@pytest.mark.parametrize("name", ["of no file", *CONFIGS])
def test_the_reference_is_the_librarys_own_call(folder, name):
    kind = data_source_named(KIND)
    spec = spec_of(folder, **({} if name == "of no file" else {"processor": base_of(folder, CONFIGS[name])}))
    context = SampleContext(spec=spec, options=kind.options(spec), max_length=1, labels=ClassLabels(("cat", "dog")))
    row = {"image": str(folder / "cat" / "0.png"), "label": "cat"}
    sample, reference = kind.sample(row, context=context), kind.reference(row, context=context)
    assert reference.keys() == sample.keys() - {"labels"}
    for key, values in reference.items():
        np.testing.assert_array_equal(sample[key], values)
    is_small = name in ("of no file", "vit", "nearest", "fast", "rectangle", "crop of a share")
    assert (sample["pixel_values"].dtype == np.uint8) == is_small


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"image_processor_type": "NoImageProcessor"}, "cannot be loaded: Unrecognized .*To fix: give a folder with"),
        ({"size": SIDE}, "cannot be loaded: Unrecognized .*To fix: give a folder with"),
        (VIT | {"do_resize": False}, r"dog/1.png, row 1: .* makes 31 x 22 pixels .* made 30 x 22 .*To fix: save"),
        (VIT | {"size": {"shortest_edge": 16}}, r"makes .* pixels of the image, and made .*give image_size, mean"),
        (VIT | {"image_mean": [0.5, 0.5]}, r"cat/0.png, row 1: .*refuses the image of 30 x 22 pixels, mode RGB: mean"),
        (VIT | {"size": {"height": 8, "width": 5000}}, "makes 5000 x 8 pixels .* at most 4096 a side"),
        ({"image_processor_type": "ImageGPTImageProcessor", "clusters": [[0, 0, 0], [1, 1, 1]], "size": SIDE},
         "gives input_ids, and no pixel_values. To fix: use another model"),
        pytest.param(
            {"image_processor_type": "DINOv3ViTImageProcessor"},
            "cannot be loaded: .*To fix: (install torchvision|give a folder)",
            marks=pytest.mark.skipif(is_torchvision_available(), reason="torchvision is there"),
        ),
    ],
)  # fmt: skip
def test_processors_that_cannot_be_called_are_refused(folder, config, says):
    with pytest.raises(ValueError, match=says):
        prepare(spec_of(folder, processor=base_of(folder, config)), cache_dir=folder.parent / "cache")


def test_a_processor_and_other_options_contradict_each_other(folder):
    spec = spec_of(folder, processor=base_of(folder, VIT), image_size=16)
    with pytest.raises(ValueError, match=r"image_size and processor both define .*To fix: remove one"):
        data_source_named(KIND).check(spec)
    data_source_named(KIND).check(spec_of(folder, processor=base_of(folder, VIT), mode="RGB"))


def test_another_processor_is_other_data(folder):
    spec = spec_of(folder, processor=base_of(folder, VIT))
    first, _ = opened(spec, folder)
    base_of(folder, VIT | {"resample": 3})
    second, _ = opened(spec, folder)
    assert first.digest != second.digest


# What is in the files


def icon(number, mode):
    """A black icon: its shape, a bar in another place for each number, is in the transparency alone."""
    alpha = np.zeros((16, 16), np.uint8)
    alpha[number : number + 4] = 255
    if mode in ("P", "L", "RGB"):  # with a colour that represents transparency
        image = Image.fromarray(255 - alpha // 255 * 254).convert(mode)
        image.info["transparency"] = {"L": 255, "RGB": (255, 255, 255)}.get(mode)
        if mode == "P":
            image = Image.fromarray(alpha // 255, mode="P")
            image.putpalette([0, 0, 0, 1, 1, 1])
            image.info["transparency"] = 0
        return image
    image = Image.new(mode, (16, 16), 0)
    image.putalpha(Image.fromarray(alpha))
    return image


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
@pytest.mark.parametrize("to", ["RGB", "L"])
def test_transparent_images_lie_over_white(tmp_path, mode, to):
    for number in range(4):
        (tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        picture = icon(number, mode)
        picture.save(
            tmp_path / "images" / "ab"[number % 2] / f"{number}.png", transparency=picture.info.get("transparency")
        )
    prepared, training = opened(spec_of(tmp_path / "images", image_size=16, mode=to), tmp_path / "images")
    for number, sample in zip((0, 2, 1, 3), training, strict=True):
        pixels = sample["pixel_values"].numpy()
        assert pixels.shape[0] == len(to)
        is_shape = np.zeros((16, 16), bool)
        is_shape[number : number + 4] = True
        assert (pixels[:, ~is_shape] == 1).all()
        assert (pixels[:, is_shape] < -0.98).all()
    assert "4 images with transparent parts, which become white here" in prepared.summary(KIND)


@pytest.mark.parametrize("is_dataset", [False, True])
def test_unusual_images_are_counted(folder, is_dataset):
    noise(7).convert("RGBA").save(folder / "cat" / "opaque.png")
    frames = [Image.new("RGB", (30, 22), colour) for colour in ("red", "blue", "green")]
    for name in ("a.gif", "b.webp", "c.tiff"):
        frames[0].save(
            folder / "cat" / name,
            save_all=True,
            append_images=frames[1:],
            **({"lossless": True} if name == "b.webp" else {}),
        )
    spec = spec_of(folder, image_size=16)
    if is_dataset:
        files = sorted(str(each) for each in folder.rglob("*.*"))
        features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
        rows = {"image": files, "label": [number % 2 for number in range(len(files))]}
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder.parent / "saved"))
        spec = replace(spec, path=None, dataset=str(folder.parent / "saved"))
    prepared, training = opened(spec, folder)
    said = prepared.summary(KIND)
    assert "3 images with several frames or pages, of which the first one is read" in said
    assert "transparent" not in said
    red = [each["pixel_values"] for each in training if each["pixel_values"][0].min() > 0.95]
    assert len(red) == 3
    assert all((pixels[1:] < -0.9).all() for pixels in red)


def test_colours_that_are_lost_are_said(folder):
    noise(1, channels=3).convert("L").save(folder / "cat" / "grey.png")
    prepared, _ = opened(spec_of(folder, image_size=16, mode="L"), folder)
    assert "6 images in colour, which are read as grey (mode L)" in prepared.summary(KIND)
    assert "grey" not in opened(spec_of(folder, image_size=16), folder)[0].summary(KIND)


# The size of images


@pytest.mark.parametrize("are_options", [False, True])
@pytest.mark.parametrize(
    ("config", "kwargs", "added"),
    [
        ({"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2] * 3}, {"image_size": 16},
         {"mean": [0.4, 0.5, 0.6], "std": [0.2] * 3}),
        ({"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2] * 3}, {"image_size": 16, "std": 0.5},
         {"mean": [0.4, 0.5, 0.6]}),
        ({"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2] * 3}, {"mean": 0.5}, {"std": [0.2] * 3}),
        ({"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2] * 3}, {"image_size": 16, "mean": 0, "std": 1}, {}),
        ({"do_normalize": False}, {"image_size": 16}, {"mean": 0.0, "std": 1.0}),
        ({"rescale_factor": 1 / 510, "image_mean": [0.1] * 3, "image_std": [0.2] * 3}, {"image_size": 16},
         {"mean": [0.2] * 3, "std": [0.4] * 3}),
        ({"image_processor_type": "NoImageProcessor"}, {"image_size": 16}, {"processor": "{base}"}),
    ],
)  # fmt: skip
def test_a_size_alone_keeps_the_mean_and_std_of_the_models_processor(folder, config, kwargs, added, are_options):
    base = base_of(folder, VIT | config)
    spec = DataSpec(kind=KIND, path="images", **{"options" if are_options else "kwargs": kwargs})
    result = with_processor_of(spec, ModelSpec(from_pretrained=base))
    given = {**result.kwargs, **result.options}
    wanted = {**kwargs, **added}
    if "processor" in added:
        assert given == {**kwargs, "processor": base}
        with pytest.raises(ValueError, match="and processor both define"):
            data_source_named(KIND).check(result)
        return
    assert given.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(given[key], value)


def test_images_of_a_size_are_normalised_as_the_models_processor_does(folder):
    base = base_of(folder, VIT | {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]})
    theirs = AutoImageProcessor.from_pretrained(base, backend="pil", size={"height": 20, "width": 20})
    spec = with_processor_of(spec_of(folder, image_size=20), ModelSpec(from_pretrained=base))
    _, training = opened(spec, folder)
    image = Image.open(sorted(folder.rglob("*.png"))[0]).convert("RGB")
    np.testing.assert_allclose(training[0]["pixel_values"], theirs(image, return_tensors="pt")["pixel_values"][0])


@pytest.mark.parametrize(
    ("model", "kwargs", "wanted"),
    [
        ({"config": {"image_size": 16}}, {}, {"image_size": 16}),
        ({"config": {"image_size": [16, 16]}}, {}, {"image_size": 16}),
        ({"config": {"image_size": 16}}, {"image_size": 32}, {"image_size": 32}),
        ({"config": {"image_size": 16}}, {"mean": 0}, {"mean": 0, "image_size": 16}),
        ({"config": {"vision_config": {"image_size": 16}}}, {}, {"image_size": 16}),
        ({"config": {"num_channels": 1}}, {}, {"mode": "L"}),
        ({"config": {"num_channels": 1}}, {"mode": "RGB"}, {"mode": "RGB"}),
        ({"config": {}}, {}, {}),
        ({"config": {"image_size": 224}}, {}, {}),
        ({"from_pretrained": "{vit}"}, {}, {"processor": "{vit}"}),
        ({"from_pretrained": "{vit}"}, {"std": 1}, {"std": 1, "image_size": 16}),
        ({"from_pretrained": "{vit}"}, {"processor": "other"}, {"processor": "other"}),
        ({"from_pretrained": "{bare}"}, {}, {"image_size": 16, "mode": "L"}),
        ({"from_pretrained": "{bare}", "config": {"image_size": 8}}, {}, {"image_size": 8, "mode": "L"}),
        ({"from_pretrained": "on/hub"}, {}, {"processor": "on/hub"}),
    ],
)
@pytest.mark.parametrize("are_options", [False, True])
def test_images_are_of_the_size_of_the_model(tmp_path, model, kwargs, wanted, are_options):
    for name, channels in (("vit", 3), ("bare", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"image_size": 16, "num_channels": channels}))
    (tmp_path / "vit" / "processor_config.json").write_text(json.dumps({"image_processor": VIT}))

    def filled(values):
        places = {"vit": str(tmp_path / "vit"), "bare": str(tmp_path / "bare")}
        return {name: value.format(**places) if isinstance(value, str) else value for name, value in values.items()}

    spec = DataSpec(kind=KIND, path="images", **{"options" if are_options else "kwargs": kwargs})
    result = with_processor_of(spec, ModelSpec(**filled(model)))
    assert {**result.kwargs, **result.options} == filled(wanted)
    text = replace(spec, kind="text-classification")
    assert with_processor_of(text, ModelSpec(**filled(model))) == text


def test_models_of_other_processors_read_images_by_their_own(folder):
    first, same, other = (
        Path(base_of(folder, VIT | more, name)) for name, more in (("a", {}), ("b", {}), ("c", {"resample": 3}))
    )
    bare = folder.parent / "bare"
    bare.mkdir()
    spec = with_processor_of(spec_of(folder), ModelSpec(from_pretrained=str(first)))
    assert [read_alike(spec, first, each) for each in (first, same, bare, other)] == [True, True, True, False]
    assert read_by(spec, other).kwargs["processor"] == str(other)
    pixels = [opened(read_by(spec, each), folder)[1][0]["pixel_values"].numpy() for each in (first, same, other)]
    np.testing.assert_array_equal(pixels[0], pixels[1])
    assert not np.array_equal(pixels[0], pixels[2])


def test_models_of_other_tokenizers_read_texts_by_their_own(tmp_path):
    spec = DataSpec(kind="text-classification", path="x.csv")
    for name, content in (("a", "{}"), ("b", "{}"), ("c", '{"other": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(content)
    (tmp_path / "d").mkdir()
    first, same, other, without = (tmp_path / name for name in "abcd")
    assert [read_alike(spec, first, each) for each in (same, other, without)] == [True, False, True]
    (same / "chat_template.jinja").write_text("{{ messages }}")
    assert not read_alike(spec, first, same)
    assert read_by(spec, other).tokenizer == str(other)
    assert read_alike(replace(spec, kind=None, path=None, source="digits"), first, other)
