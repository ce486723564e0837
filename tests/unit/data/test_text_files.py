import json
import re

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer

from ringmaster.techniques.data import fetch, open_data, prepare
from ringmaster.techniques.data.stored_source import TextProgress
from ringmaster.techniques.data.tokenizer_folders import _training_pieces
from ringmaster.techniques.job_specs import DataSpec


def spec_of(path, **fields):
    return DataSpec(path=str(path), **{"seq_len": 16, "vocab_size": 300, "held_out": 0.2, **fields})


def decoded(prepared, dataset):
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_dir / "tokenizer.json"))
    stream = [token for index in range(len(dataset)) for token in dataset[index]["input_ids"].tolist()]
    return tokenizer.decode(stream, skip_special_tokens=False)


def test_one_text_file_is_cut_where_its_held_out_share_begins(tmp_path, text):
    whole = text(100)
    (tmp_path / "book.txt").write_text(whole)
    spec = spec_of(tmp_path / "book.txt")
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    training, held_out = open_data(spec, cache_dir=tmp_path / "cache")
    seen, kept = decoded(prepared, training), decoded(prepared, held_out)
    assert whole.startswith(seen)
    assert kept.removesuffix("<|endoftext|>") in whole
    assert 0.7 < whole.index(kept[:200]) / len(whole) <= 0.8
    assert whole[whole.index(kept[:200]) - 1] == "\n"
    assert (len(training), len(held_out)) == (prepared.num_samples, prepared.num_held_out)


def test_several_files_are_split_by_file(tmp_path, text):
    for number in range(6):
        (tmp_path / f"part-{number}.txt").write_text(f"[{number}]" + text(20, number))
    spec = spec_of(tmp_path / "part-*.txt", held_out=0.3)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    sides = [decoded(prepared, side) for side in open_data(spec, cache_dir=tmp_path / "cache")]
    numbers = [{n for n in range(6) if f"[{n}]" in side} for side in sides]
    assert numbers[0]
    assert numbers[1]
    assert not numbers[0] & numbers[1]


def test_a_new_file_moves_none_of_the_old_to_the_other_side(tmp_path, text):
    def held_out_files(num_files):
        for number in range(num_files):
            (tmp_path / f"part-{number:02}.txt").write_text(f"[{number}]" + text(20, number))
        spec = spec_of(tmp_path / "part-*.txt", held_out=0.3)
        prepared = prepare(spec, cache_dir=tmp_path / "cache")
        held_out = decoded(prepared, open_data(spec, cache_dir=tmp_path / "cache")[1])
        return {n for n in range(num_files) if f"[{n}]" in held_out}

    before, after = held_out_files(12), held_out_files(14)
    assert before == {n for n in after if n < 12}


def test_rows_of_jsonl_are_split_by_their_content(jsonl, tmp_path):
    spec = spec_of(jsonl("rows.jsonl", 60))
    first = prepare(spec, cache_dir=tmp_path / "cache")
    assert first.kind == "tokens"
    assert 0 < first.num_held_out < first.num_samples
    assert first.vocab_size <= 300


def test_parquet_says_the_same_as_jsonl(jsonl, tmp_path, text):
    rows = [text(3, seed) for seed in range(40)]
    jsonl("rows.jsonl", [{"body": row} for row in rows])
    pyarrow.parquet.write_table(pyarrow.table({"body": rows, "n": list(range(40))}), tmp_path / "rows.parquet")
    digests = {
        prepare(spec_of(tmp_path / name, options={"text_column": "body"}), cache_dir=tmp_path / "cache").digest
        for name in ("rows.jsonl", "rows.parquet")
    }
    assert len(digests) == 1


def test_rows_that_are_token_ids_stay_what_they_are(jsonl, tmp_path):
    file = jsonl("ids.jsonl", [{"input_ids": [n, n + 1, n + 2, n + 3]} for n in range(50)])
    spec = spec_of(file, seq_len=None)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    training, held_out = open_data(spec, cache_dir=tmp_path / "cache")
    assert (prepared.seq_len, prepared.vocab_size, prepared.tokenizer_dir) == (4, 53, None)
    firsts = [int(side[i]["input_ids"][0]) for side in (training, held_out) for i in range(len(side))]
    assert sorted(firsts) == list(range(50))
    longer = spec_of(file, seq_len=8)
    assert open_data(longer, cache_dir=tmp_path / "cache")[0][0]["input_ids"].shape == (8,)


def test_samples_come_alone_or_stacked(jsonl, tmp_path):
    spec = spec_of(jsonl("rows.jsonl", 40))
    training, _ = open_data(spec, cache_dir=tmp_path / "cache")
    batch = fetch(training, [5, 0, 5])
    assert batch["input_ids"].shape == (3, 16)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["labels"], batch["input_ids"])
    for row, index in enumerate([5, 0, 5]):
        assert torch.equal(batch["input_ids"][row], training[index]["input_ids"])
    with pytest.raises(IndexError):
        training[len(training)]


def test_a_given_tokenizer_is_used_and_kept(jsonl, tmp_path):
    first = prepare(spec_of(jsonl("rows.jsonl", 40)), cache_dir=tmp_path / "cache")
    other = jsonl("other.jsonl", 20)
    given = spec_of(other, tokenizer=str(first.tokenizer_dir))
    prepared = prepare(given, cache_dir=tmp_path / "cache")
    assert prepared.vocab_size == first.vocab_size
    assert prepared.end_of_text_id == first.end_of_text_id == 0
    vocabularies = [
        json.loads((data.tokenizer_dir / "tokenizer.json").read_text())["model"]["vocab"] for data in (first, prepared)
    ]
    assert vocabularies[0] == vocabularies[1]


@pytest.mark.parametrize("given", [False, True])
def test_text_that_spells_out_the_end_of_text_does_not_end_there(tmp_path, text, given):
    (tmp_path / "a.txt").write_text(text(40) + "<|endoftext|>" + text(40))
    spec = spec_of(tmp_path / "a.txt", held_out=0.0)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    if given:
        spec = spec_of(tmp_path / "a.txt", held_out=0.0, tokenizer=str(prepared.tokenizer_dir))
    training, _ = open_data(spec, cache_dir=tmp_path / "cache")
    ids = fetch(training, range(len(training)))["input_ids"].flatten()
    assert prepared.end_of_text_id not in ids[:-16].tolist()


def test_other_content_has_another_digest_and_the_same_content_the_same(tmp_path, text):
    def digest(folder, content):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.txt").write_text(content)
        return prepare(spec_of(tmp_path / folder / "*.txt"), cache_dir=tmp_path / "cache").digest

    here = digest("here", text(50))
    assert digest("there", text(50)) == here
    assert digest("here", text(50) + "more\n" * 20) != here
    assert digest("here", text(50)) == here


def test_without_a_held_out_share_all_is_trained_on(jsonl, tmp_path):
    spec = spec_of(jsonl("rows.jsonl", 10), held_out=0.0)
    training, held_out = open_data(spec, cache_dir=tmp_path / "cache")
    assert len(training) > 0
    assert len(held_out) == 0


@pytest.mark.parametrize(
    ("name", "content", "fields", "says"),
    [
        ("a.txt", "few words", {}, "fewer than one sample.*lower seq_len"),
        ("a.txt", "word\n" * 400, {"held_out": 0.01}, "held_out part.*raise held_out"),
        ("a.txt", "word\n" * 400, {"seq_len": None}, "seq_len is missing"),
        ("a.txt", "word\n" * 400, {"vocab_size": 200}, "vocab_size 200 is too small"),
        ("a.txt", b"\xff\xfe\xfa", {}, "cannot be read"),
        ("a.txt", "word\n" * 400, {"tokenizer": "/no/such/folder"}, "tokenizer '/no/such/folder' cannot be loaded"),
        ("a.jsonl", "\n", {}, "holds no text"),
        ("a.jsonl", '{"text": "x"}\n{"text"\n', {}, "line 2 is not valid JSON"),
        ("a.jsonl", '{"body": "x"}\n', {}, r"no text.*it has \['body'\].*text_column"),
        ("a.jsonl", '{"text": 3}\n', {}, "no text"),
        ("a.jsonl", '{"input_ids": [1, -100]}\n', {}, "token ids below 0"),
        ("a.jsonl", '{"input_ids": [1]}\n{"input_ids": [1, 2]}\n', {"seq_len": None}, "seq_len is missing"),
        ("a.parquet", "no parquet", {}, "not a valid Parquet file"),
        ("a.xml", "x,y", {}, "unknown form: .*.xml.*.jsonl"),
    ],
)
def test_a_fault_says_what_to_do_and_leaves_nothing_behind(tmp_path, name, content, fields, says):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=says):
        prepare(spec_of(tmp_path / name, **fields), cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("data/**/data.json"))


def test_a_glob_without_files_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"matches no file.*check the glob"):
        prepare(spec_of(tmp_path / "*.jsonl"), cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"name its files, e.g. .*\*.jsonl"):
        prepare(spec_of(tmp_path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("text", ["a " + "x" * 10_000 + " b", "a" + " " * 10_000 + "b", "many short words " * 1000])
def test_a_tokenizer_is_trained_on_pieces_without_long_words(text):
    pieces = list(_training_pieces([text], TextProgress("training")))
    assert "".join(pieces) == text
    assert all(len(run) <= 1000 for piece in pieces for run in re.findall(r"\S+|\s+", piece))
