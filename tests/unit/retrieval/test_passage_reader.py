"""Samples of questions with passages of a store: what they read, and what they are known by."""

import json
from dataclasses import replace

import pytest

from ringmaster.features.stores.job import StoreSettings
from ringmaster.features.stores.knowledge_store import KnowledgeStore, Passage
from ringmaster.tasks.batch import parse_batch
from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.data.row_files import RowErrors
from ringmaster.techniques.data.row_kind import Retriever
from ringmaster.techniques.data.row_tokenizer import RowTokenizer
from ringmaster.techniques.job_specs import DataSpec
from tests.unit.retrieval.encoders import build_store, save_encoder

PASSAGES = [f"city{i} color{i}" for i in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an encoder, a store, and rows of questions."""
    folder = tmp_path_factory.mktemp("reading")
    encoder = save_encoder(folder / "encoder")
    passages = [Passage(f"p{i}", text) for i, text in enumerate(PASSAGES)]
    build_store(folder / "store", passages=passages, encoder=encoder, settings=StoreSettings())
    rows = [{"prompt": f"city{i}", "completion": f" color{i}"} for i in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"anchor": f"city{i}", "positive": PASSAGES[i]} for i in range(20)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return folder


def spec(folder, kind="completion", rows="rows", **retriever):
    return DataSpec(
        kind=kind,
        path=str(folder / f"{rows}.jsonl"),
        tokenizer=str(folder / "encoder"),
        held_out=0.0,
        options={"retriever": {"store": str(folder / "store"), **retriever}},
    )


def samples(spec, cache_dir):
    prepared = prepare(spec, cache_dir=cache_dir)
    return open_data(spec, cache_dir=cache_dir, prepared=prepared)[0]


def words(folder, tokens):
    text = RowTokenizer(folder / "encoder")._tokenizer.decode(tokens, skip_special_tokens=True)
    return text.split()


def found(folder, question, number):
    (passages,) = KnowledgeStore.open(folder / "store").search_texts(texts=[question], num_passages=number)
    return passages


def test_passages_are_put_before_the_prompt_by_the_template(folder, tmp_path):
    rows = samples(spec(folder, k=3, template="river1 {passages} river2 {prompt}"), tmp_path)
    for i in (0, 7):
        ids, labels = rows[i]["input_ids"], rows[i]["labels"]
        texts = " ".join(each.text for each in found(folder, f"city{i}", 3))
        expected = f"river1 {texts} river2 city{i} color{i}".split()
        assert words(folder, ids)[-len(expected) :] == expected
        assert words(folder, ids[labels != -100]) == [f"color{i}"]


def test_passages_that_leave_no_room_for_the_answer_are_left_out(folder, tmp_path):
    rows = samples(replace(spec(folder, k=5), seq_len=9), tmp_path)
    for i in range(20):
        read = words(folder, rows[i]["input_ids"])
        best = found(folder, f"city{i}", 1)[0].text
        assert f" {best} " in f" {' '.join(read)} "
        assert read[-2:] == [f"city{i}", f"color{i}"]


def test_another_version_of_the_store_makes_other_data(folder, tmp_path):
    plain = prepare(spec(folder, k=2), cache_dir=tmp_path)
    again = prepare(spec(folder, k=2), cache_dir=tmp_path / "other")
    assert again.digest == plain.digest
    store = KnowledgeStore.open(folder / "store")
    store.update(removed=["p3"], added=[Passage("p3", "city3 river9")], folder=tmp_path / "new")
    moved = replace(spec(folder), options={"retriever": {"store": str(tmp_path / "new"), "k": 2}})
    prepared = prepare(moved, cache_dir=tmp_path)
    assert prepared.digest != plain.digest
    # At the same place, the store is known by its content.
    (tmp_path / "here").symlink_to(folder / "store")
    here = replace(spec(folder), options={"retriever": {"store": str(tmp_path / "here"), "k": 2}})
    assert prepare(here, cache_dir=tmp_path).digest == plain.digest
    (tmp_path / "here").unlink()
    (tmp_path / "here").symlink_to(tmp_path / "new")
    assert prepare(here, cache_dir=tmp_path).digest == prepared.digest


def test_a_sample_of_kind_rag_is_a_row_for_each_passage_with_its_score(folder, tmp_path):
    rows = samples(spec(folder, "rag", k=4), tmp_path)
    for i in (2, 11):
        passages = found(folder, f"city{i}", 4)
        assert rows[i]["passage_scores"].tolist() == pytest.approx([each.score for each in passages], rel=1e-5)
        for ids, labels, passage in zip(rows[i]["input_ids"], rows[i]["labels"], passages, strict=True):
            assert words(folder, ids)[-4:] == [*passage.text.split(), f"city{i}", f"color{i}"]
            assert words(folder, ids[labels != -100]) == [f"color{i}"]


def test_hard_negatives_are_mined_without_the_positive(folder, tmp_path):
    rows = samples(spec(folder, "embedding", "pairs", k=3), tmp_path)
    for i in range(20):
        negatives = [each.text for each in found(folder, f"city{i}", 4) if each.text != PASSAGES[i]][:3]
        texts = [" ".join(words(folder, ids)[:2]) for ids in rows[i]["input_ids"]]
        assert texts[1:] == [PASSAGES[i], *negatives]


def test_a_contrastive_loss_knows_the_number_of_mined_negatives(folder):
    data = {"path": "pairs.jsonl", "retriever": {"store": "./store", "k": 3}}
    job = {"name": "a", "model": {"architecture": "BertModel"}, "data": data, "loss": "contrastive", "num_steps": 1}
    (read,) = parse_batch(json.dumps({"jobs": [job]}), folder=folder, name="batch.json").jobs
    assert read.loss_options["hard_negatives"] == 3
    assert read.data.options["retriever"]["store"] == str(folder / "store")


@pytest.mark.parametrize(
    ("retriever", "said"),
    [
        ({"store": "nowhere"}, "nowhere is not a folder of a knowledge store"),
        ({"k": 3}, "names no store"),
        ({"store": "a", "kk": 3}, "has no setting kk"),
        ({"store": "a", "template": "{passages} {question}"}, "is not of passages and a prompt"),
        ({"store": "a", "template": "{passages} {"}, "is not of passages and a prompt"),
    ],
)
def test_wrong_retrievers_are_refused(folder, tmp_path, retriever, said):
    wrong = replace(spec(folder), options={"retriever": retriever})
    with pytest.raises(ValueError, match=said):
        prepare(wrong, cache_dir=tmp_path)


def test_too_few_passages_and_conversations_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="the store has 20 passages for a question, and k is 21"):
        prepare(spec(folder, k=21), cache_dir=tmp_path)
    with pytest.raises(ValueError, match="kind rag reads passages"):
        prepare(replace(spec(folder, "rag"), options={}), cache_dir=tmp_path)
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": "city1"}], "completion": []})
    )
    with pytest.raises(RowErrors, match="prompts of text alone"):
        prepare(replace(spec(folder), path=str(tmp_path / "chat.jsonl")), cache_dir=tmp_path)


def test_a_prompt_with_braces_stays_as_it_is():
    assert Retriever(store="a").prompt([], "{passages} {x}") == "\n\n{passages} {x}"
