import numpy as np
import pytest
from PIL import Image

from ringmaster.techniques.data import fetch, open_data, prepare
from ringmaster.techniques.data.sources.builtin import load_splits
from ringmaster.techniques.job_specs import DataSpec


@pytest.fixture
def saved(tmp_path):
    """A function saved(columns, features=None) that saves a data set: several splits where `columns` is by split."""

    def save(columns, features=None):
        import datasets  # local: the import takes seconds, and each test process imports all files

        folder = str(tmp_path / "saved")
        if all(isinstance(value, dict) for value in columns.values()):
            splits = {name: datasets.Dataset.from_dict(part, features=features) for name, part in columns.items()}
            datasets.DatasetDict(splits).save_to_disk(folder)
        else:
            datasets.Dataset.from_dict(columns, features=features).save_to_disk(folder)
        return folder

    return save


def image(value, size=6):
    return Image.fromarray(np.full((size, size, 3), value, dtype=np.uint8))


def test_a_text_column_becomes_tokens(saved, text, tmp_path):
    folder = saved({"text": [text(3, seed) for seed in range(40)]})
    spec = DataSpec(dataset=folder, seq_len=16, vocab_size=300, held_out=0.2)
    prepared = prepare(spec, cache_dir=tmp_path)
    training, held_out = open_data(spec, cache_dir=tmp_path)
    assert (prepared.kind, prepared.vocab_size) == ("tokens", 300)
    assert len(training) > len(held_out) > 0
    assert training[0]["input_ids"].shape == (16,)


def test_named_splits_are_taken_as_they_are(saved, text, tmp_path):
    parts = {name: {"body": [text(9, seed)]} for seed, name in enumerate(("fit", "check"))}
    spec = DataSpec(
        dataset=saved(parts),
        options={"text_column": "body"},
        split="fit",
        held_out_split="check",
        seq_len=8,
        vocab_size=300,
    )
    prepared = prepare(spec, cache_dir=tmp_path)
    assert prepared.num_samples > 1
    assert prepared.num_held_out > 1


def files_of(picture, tmp_path, **options):
    picture.save(tmp_path / "x.png", **options)
    return {"bytes": (tmp_path / "x.png").read_bytes(), "path": None}


def nested(part):
    """A data set of two splits whose rows have a list of images, and a mapping with one."""
    import datasets

    features = datasets.Features(views=datasets.List(datasets.Image()), shown={"as": datasets.Image()})
    rows = {"views": [[part, part], [part, part]], "shown": [{"as": part}] * 2}
    return {"train": rows, "test": rows}, features


def test_images_inside_lists_are_read_as_other_images_are(saved, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 3  # it is shown upside down
    stored = np.arange(6 * 6 * 3, dtype=np.uint8).reshape(6, 6, 3)
    folder = saved(*nested(files_of(Image.fromarray(stored), tmp_path, exif=exif)))
    training, _ = open_data(DataSpec(dataset=folder, held_out_split="test"), cache_dir=tmp_path)
    np.testing.assert_array_equal(training[0]["views"].numpy(), [stored[::-1, ::-1]] * 2)
    for split in load_splits(DataSpec(dataset=folder)):
        assert isinstance(split[0]["views"][0], dict) and isinstance(split[0]["shown"]["as"], dict)


def test_what_is_no_image_inside_a_list_is_refused_with_its_place(saved, tmp_path):
    folder = saved(*nested({"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n", "path": None}))
    with pytest.raises(ValueError, match=r"column '(views|shown)': the image .*To fix: "):
        prepare(DataSpec(dataset=folder), cache_dir=tmp_path)


def test_images_become_pixels_with_labels(saved, tmp_path):
    import datasets

    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["dark", "light"]),
            "id": datasets.Value("string"),
        }
    )
    shades = [0, 255] * 10
    rows = {"image": [image(s) for s in shades], "label": [s // 255 for s in shades], "id": ["x"] * 20}
    spec = DataSpec(dataset=saved(rows, features), held_out=0.3)
    prepared = prepare(spec, cache_dir=tmp_path)
    assert (prepared.kind, prepared.num_labels, prepared.image_size, prepared.num_channels) == ("images", 2, 6, 3)
    assert "columns that are not read: id" in prepared.notes
    training, held_out = open_data(spec, cache_dir=tmp_path)
    assert len(training) + len(held_out) == 20
    batch = fetch(training, range(len(training)))
    assert sorted(batch) == ["labels", "pixel_values"]
    assert batch["pixel_values"].shape[1:] == (3, 6, 6)
    assert batch["pixel_values"][:, 0, 0, 0].tolist() == [2.0 * label - 1 for label in batch["labels"].tolist()]


def test_numbers_stay_what_they_are(saved, tmp_path):
    rows = {"x": [[float(n), 0.5] for n in range(30)], "label": [n % 3 for n in range(30)]}
    spec = DataSpec(dataset=saved(rows), held_out=0.2)
    prepared = prepare(spec, cache_dir=tmp_path)
    training, _ = open_data(spec, cache_dir=tmp_path)
    assert (prepared.kind, prepared.num_labels) == ("other", 3)
    batch = fetch(training, [0, 1])
    assert batch["x"].shape == (2, 2)
    assert [int(x) % 3 for x in batch["x"][:, 0]] == batch["labels"].tolist()


def test_rows_that_are_tokenised_keep_their_labels(saved, tmp_path):
    rows = {"input_ids": [[n, 1, 2] for n in range(20)], "attention_mask": [[1, 1, 0]] * 20, "label": [1] * 20}
    spec = DataSpec(dataset=saved(rows), held_out=0.2)
    prepared = prepare(spec, cache_dir=tmp_path)
    sample = open_data(spec, cache_dir=tmp_path)[0][0]
    assert (prepared.kind, prepared.seq_len, prepared.vocab_size) == ("tokens", 3, 20)
    assert sorted(sample) == ["attention_mask", "input_ids", "labels"]
    assert sample["labels"].shape == ()


def test_a_folder_of_files_is_loaded_as_datasets_does(jsonl, tmp_path):
    file = jsonl("rows.jsonl", 30)
    spec = DataSpec(
        dataset="json",
        kwargs={"data_files": str(file), "cache_dir": str(tmp_path / "hf")},
        seq_len=16,
        vocab_size=300,
        held_out=0.2,
    )
    assert prepare(spec, cache_dir=tmp_path).num_samples > 0


@pytest.mark.parametrize(
    ("columns", "fields", "says"),
    [
        ({"train": {"text": ["a"]}}, {"split": "fit"}, "no split 'fit'; it has train"),
        ({"text": ["a b"]}, {"seq_len": None}, "seq_len is missing"),
        ({"text": [""]}, {"seq_len": 8}, "fewer than one sample"),
        ({"name": ["a"] * 9}, {}, "neither text in 'text'.*it has name"),
        ({"x": [[1], [1, 2]] * 5}, {}, "column 'x': rows differ in shape"),
    ],
)
def test_a_fault_says_what_to_do(saved, tmp_path, columns, fields, says):
    spec = DataSpec(dataset=saved(columns), **{"vocab_size": 300, **fields})
    with pytest.raises(ValueError, match=says):
        prepare(spec, cache_dir=tmp_path)


def test_a_folder_that_is_no_data_set_is_told(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"cannot be loaded.*check the name or folder"):
        prepare(DataSpec(dataset=str(tmp_path / "empty")), cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("names", "labels"), [(["light", "dark"], [1, 0]), (["dark", "light"], [0, 1]), (["dark", "grey"], None)]
)
def test_columns_of_splits_that_number_their_classes_in_another_order_are_read_by_name(saved, tmp_path, names, labels):
    import datasets

    folder, both = (
        saved({"x": [[0.0], [1.0]], "label": [0, 1]}),
        datasets.Features(
            x=datasets.List(datasets.Value("float32")), label=datasets.ClassLabel(names=["dark", "light"])
        ),
    )
    training = datasets.load_from_disk(folder).cast(both)
    held_out = datasets.load_from_disk(folder).cast(
        datasets.Features({**both, "label": datasets.ClassLabel(names=names)})
    )
    datasets.DatasetDict(train=training, test=held_out).save_to_disk(str(tmp_path / "splits"))
    spec = DataSpec(dataset=str(tmp_path / "splits"), held_out_split="test")
    if labels is None:
        with pytest.raises(
            ValueError, match=r"the classes of the split 'train' are dark, light, and those of 'test' dark"
        ):
            prepare(spec, cache_dir=tmp_path)
        return
    assert prepare(spec, cache_dir=tmp_path).labels == ("dark", "light")
    _, evaluated = open_data(spec, cache_dir=tmp_path)
    assert fetch(evaluated, [0, 1])["labels"].tolist() == labels


def test_labels_that_are_no_numbers_of_classes_are_described(saved, tmp_path):
    rows = {"x": [[float(n)] for n in range(20)], "labels": [[float(n % 2), 1.0, 0.0] for n in range(20)]}
    prepared = prepare(DataSpec(dataset=saved(rows)), cache_dir=tmp_path)
    assert [(each.name, each.dtype, each.shape) for each in prepared.tensors if each.name == "labels"] == [
        ("labels", "float32", (3,))
    ]


COMMIT = "68ba7694e23014788dcc8ab5afe613824f45a05c"


@pytest.mark.parametrize("kind", [None, "text-classification"])
@pytest.mark.parametrize(
    ("folder", "kwargs", "source"),
    [
        (COMMIT, {}, f"hf://someone/reviews@{COMMIT}"),
        (COMMIT, {"revision": "main"}, f"hf://someone/reviews@{COMMIT}"),
        ("elsewhere", {"revision": "v1.0"}, "hf://someone/reviews@v1.0"),
        ("elsewhere", {}, "hf://someone/reviews"),
    ],
)
def test_the_revision_of_a_data_set_of_the_hub_is_recorded(tmp_path, monkeypatch, kind, folder, kwargs, source):
    import datasets
    from datasets.arrow_writer import ArrowWriter

    file = tmp_path / "default" / "0.0.0" / folder / "reviews-train.arrow"
    file.parent.mkdir(parents=True)
    with ArrowWriter(path=str(file)) as writer:
        for number in range(20):
            writer.write({"text": f"some text {number}", "label": number % 2})
        writer.finalize()

    def load_dataset(name, **given):
        assert (name, given) == ("someone/reviews", kwargs)
        return datasets.DatasetDict(train=datasets.Dataset.from_file(str(file)))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    spec = DataSpec(dataset="someone/reviews", kind=kind, kwargs=kwargs, vocab_size=300, seq_len=8, held_out=0)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    assert prepared.source == source
    assert any("revision of someone/reviews that was read is not known" in each for each in prepared.notes) == (
        "@" not in source
    )
