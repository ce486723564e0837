"""Classes of rows: their names and order, in files that name them, number them, or have other ones held out."""

import pytest

from ringmaster.techniques.data import fetch, open_data, prepare
from ringmaster.techniques.job_specs import DataSpec
from tests.unit.data.prepared_rows import REVIEWS, jsonl, opened, refused


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


def test_a_class_that_only_another_parquet_file_names_is_refused(tmp_path, numbered):
    numbered(["a", "b"], "a", "b").to_parquet(tmp_path / "one.parquet")
    numbered(["c", "b", "a"], "a", "c").to_parquet(tmp_path / "two.parquet")
    paths = {"path": str(tmp_path / "one.parquet"), "held_out_path": str(tmp_path / "two.parquet")}
    with pytest.raises(ValueError, match=r"row 2: label 'c' is not one of the classes a, b. To fix"):
        prepare(DataSpec(kind="text-classification", vocab_size=300, **paths), cache_dir=tmp_path / "cache")


def test_a_label_that_was_not_named_is_refused(tmp_path):
    said = refused(tmp_path, "text-classification", REVIEWS, labels=("good", "bad"))
    assert "row 3: label 'so so' is not one of the classes good, bad" in said
