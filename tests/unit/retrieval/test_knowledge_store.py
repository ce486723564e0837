"""Knowledge stores: what is found, what an update changes, and what a digest depends on."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from ringmaster.features.stores.knowledge_store import (
    IVF,
    KnowledgeStore,
    Passage,
    StoreSettings,
)
from ringmaster.techniques.checkpoints.checkpoint import fetch_model, store_model
from tests.unit.retrieval.encoders import WORDS, build_store, save_encoder

EXACT = StoreSettings(batch_size=16)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder") / "model")


@pytest.fixture(scope="module")
def passages():
    draw = random.Random(0)
    return [Passage(f"p{i}", " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))) for i in range(300)]


@pytest.fixture(scope="module")
def store(encoder, passages, tmp_path_factory):
    return build_store(tmp_path_factory.mktemp("store") / "a", passages=passages, encoder=encoder, settings=EXACT)


@pytest.fixture(scope="module")
def clustered(encoder, passages, tmp_path_factory):
    settings = replace(EXACT, index=IVF, num_lists=16)
    return build_store(tmp_path_factory.mktemp("store") / "ivf", passages=passages, encoder=encoder, settings=settings)


def test_a_store_finds_what_a_plain_product_finds(store, passages):
    assert list(store.passages) == passages
    found = store.search_texts(texts=[each.text for each in passages[:40]], num_passages=5)
    products = store.vectors[:].astype(float) @ store.encode(texts=[each.text for each in passages[:40]]).T.astype(
        float
    )
    for row, results in enumerate(found):
        best = np.argsort(-products[:, row], kind="stable")[:5]
        assert [each.id for each in results] == [passages[i].id for i in best]
        np.testing.assert_allclose([each.score for each in results], products[best, row], rtol=1e-12)


def test_vectors_are_those_of_sentence_transformers(store, encoder, passages):
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    model = library.SentenceTransformer(
        modules=[modules.Transformer(str(encoder)), modules.Pooling(32, pooling_mode="mean"), modules.Normalize()],
        device="cpu",
    )
    np.testing.assert_allclose(store.vectors, model.encode([each.text for each in passages]), atol=2e-6)


def test_what_is_found_for_a_question_depends_on_no_other_question(store):
    vectors = np.array(store.vectors[:64])
    together = store.search(vectors=vectors, num_passages=7)
    assert [store.search(vectors=vector[None], num_passages=7)[0] for vector in vectors] == together


def test_equal_passages_are_found_in_the_order_of_the_store(store, encoder, tmp_path):
    same = [Passage(name, "city1 river2") for name in ("z", "a", "m")]
    (found,) = store.update(removed=[], added=same, folder=tmp_path / "b").search_texts(
        texts=["city1 river2"], num_passages=3
    )
    assert [each.id for each in found] == ["z", "a", "m"]


def test_fewer_passages_than_are_asked_for(encoder, passages, tmp_path):
    store = build_store(tmp_path / "s", passages=passages[:3], encoder=encoder, settings=EXACT)
    assert len(store.search_texts(texts=["city1"], num_passages=8)[0]) == 3


def test_an_update_encodes_the_new_passages_alone(store, passages, tmp_path, monkeypatch):
    encoded = []
    real = type(store.encoder).encode_batch
    monkeypatch.setattr(
        type(store.encoder), "encode_batch", lambda self, tokens: encoded.append(len(tokens)) or real(self, tokens)
    )
    new = store.update(
        removed=["p7", "p8"], added=[Passage("p7", "color1"), Passage("n", "color2")], folder=tmp_path / "b"
    )
    assert sum(encoded) == 2
    assert [each.id for each in new.passages] == [p.id for p in passages if p.id not in ("p7", "p8")] + ["p7", "n"]
    kept = [i for i in range(300) if i not in (7, 8)]
    assert np.array_equal(new.vectors[:298], store.vectors[kept])
    assert new.search_texts(texts=["color1"], num_passages=1)[0][0].id == "p7"
    assert new.digest != store.digest
    assert KnowledgeStore.open(store.folder).digest == store.digest  # the old version stays


@pytest.mark.parametrize("kind", ["store", "clustered"])
def test_an_updated_store_finds_what_a_new_one_of_its_passages_finds(kind, request, passages, encoder, tmp_path):
    store = request.getfixturevalue(kind)
    removed = [each.id for each in passages[50:80]]
    added = [Passage(f"n{i}", f"{WORDS[i]} {WORDS[-i - 1]} {WORDS[2 * i]}") for i in range(30)]
    first = store.update(removed=removed[:10], added=added[:20], folder=tmp_path / "b")
    new = first.update(removed=[*removed[10:], "n3"], added=added[20:], folder=tmp_path / "c")
    assert len(new.manifest.chain) == 2
    settings = EXACT if kind == "store" else replace(EXACT, index=IVF, num_lists=1)
    fresh = build_store(tmp_path / "fresh", passages=list(new.passages), encoder=encoder, settings=settings)
    texts = [each.text for each in new.passages[:100]]
    ours, theirs = (
        [[each.id for each in found] for found in each.search_texts(texts=texts, num_passages=5)]
        for each in (new, fresh)
    )
    shared = np.mean([len({*a} & {*b}) / 5 for a, b in zip(ours, theirs, strict=True)])
    assert shared == 1.0 if kind == "store" else shared > 0.9
    assert not {*removed, "n3"} & {name for found in ours for name in found}


def test_an_index_of_clusters_records_its_recall(clustered):
    assert clustered.manifest.recall >= 0.95
    assert 1 <= clustered.manifest.num_probes <= 16
    assert clustered.index.nprobe == clustered.manifest.num_probes


def test_the_digest_depends_on_all_that_a_store_is_made_of(store, clustered, encoder, passages, tmp_path):
    other = save_encoder(tmp_path / "other", seed=1)
    made = {
        "same": build_store(tmp_path / "1", passages=passages, encoder=encoder, settings=EXACT),
        "text": build_store(
            tmp_path / "2", passages=[Passage("p0", "river1"), *passages[1:]], encoder=encoder, settings=EXACT
        ),
        "order": build_store(tmp_path / "3", passages=passages[::-1], encoder=encoder, settings=EXACT),
        "encoder": build_store(tmp_path / "4", passages=passages, encoder=other, settings=EXACT),
        "batches": build_store(
            tmp_path / "5", passages=passages, encoder=encoder, settings=replace(EXACT, batch_size=32)
        ),
        "index": clustered,
        "chain": store.update(removed=["p0"], added=[passages[0]], folder=tmp_path / "6"),
    }
    assert made.pop("same").digest == store.digest
    assert len({store.digest, *(each.digest for each in made.values())}) == 1 + len(made)


def test_wrong_updates_are_refused_with_all_their_faults(store, tmp_path):
    with pytest.raises(ValueError, match="'x' is removed and not there, 'p1' is there twice, 'q' is there twice"):
        store.update(
            removed=["x"], added=[Passage("p1", "a"), Passage("q", "a"), Passage("q", "b")], folder=tmp_path / "b"
        )
    with pytest.raises(ValueError, match="nothing would be left"):
        store.update(removed=[each.id for each in store.passages], added=[], folder=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_damaged_stores_are_refused(store, tmp_path):
    with pytest.raises(ValueError, match="holds no knowledge store"):
        KnowledgeStore.open(tmp_path)
    copy = store.update(removed=["p0"], added=[], folder=tmp_path / "copy")
    content = json.loads((copy.folder / "store.json").read_text())
    (copy.folder / "store.json").write_text(json.dumps({**content, "num_passages": 3}))
    with pytest.raises(ValueError, match="do not belong together"):
        KnowledgeStore.open(copy.folder)


def test_a_store_is_copied_between_machines_like_a_model(clustered, tmp_path):
    store_model(clustered.folder, "memory://shared/models/wiki")
    fetch_model("memory://shared/models/wiki", tmp_path / "other" / "wiki")
    copy = KnowledgeStore.open(tmp_path / "other" / "wiki")
    assert copy.digest == clustered.digest
    assert copy.search_texts(texts=["city1"], num_passages=3) == clustered.search_texts(texts=["city1"], num_passages=3)
