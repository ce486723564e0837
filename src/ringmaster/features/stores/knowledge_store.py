"""Knowledge stores: passages, their embeddings and an index, in a folder that never changes.

A store is read by models that retrieve passages (REALM: Guu et al., arXiv:2002.08909; RAG: Lewis et al.,
arXiv:2005.11401) and is searched with FAISS (Johnson et al., arXiv:1702.08734). Its folder has

    store.json       `StoreManifest`
    passages.arrow   the columns key, id and text, in the order of the rows
    vectors.npy      [passages, features] in fp32
    index.faiss      of inverted lists alone; an exact index is made of the vectors when it is read
    encoder/         the encoder that has made the vectors, and makes those of questions

Vectors are stored and never computed again, as their bits depend on the batch. An update writes another folder, whose
digest contains the chain of updates.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringmaster.codec import digest, from_json
from ringmaster.extras import require_extra
from ringmaster.features.stores.job import FLAT, INDEXES, IVF, StoreSettings
from ringmaster.features.stores.passage_encoder import PassageEncoder, Vectors, copy_encoder, encoder_digest
from ringmaster.features.stores.passages import ids_and_texts
from ringmaster.files import write_value
from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.data.arrow_files import ArrowWriter, open_split, read_table, table_of, texts_column
from ringmaster.techniques.data.row_kind import MANIFEST, PASSAGES_FILE, SampleContext
from ringmaster.techniques.models.model_folders import few

VECTORS, INDEX, ENCODER = "vectors.npy", "index.faiss", "encoder"
SPARE = 8
"""Further passages to retrieve, from which the exact scores select the requested ones."""
CLUSTER_ITERATIONS, CLUSTER_POINTS = 6, 40
"""Of k-means: its rounds, and the vectors for each centroid. With 10 and 256, as FAISS has them, training takes three
times as long and as many clusters are searched for the same recall (100,000 vectors of 128 features).
"""
NUM_QUERIES, RECALL_AT = 500, 10
"""Passages of a store whose neighbours are compared to measure the recall of its index, and how many of them."""


@dataclass(frozen=True)
class Passage:
    """A text that can be found, under a name that is unique in its store."""

    id: str
    text: str


@dataclass(frozen=True)
class RetrievedPassage:
    """A passage that was found. score: its product with the question's vector; a cosine where these are normalized."""

    id: str
    text: str
    score: float


@dataclass(frozen=True, kw_only=True)
class StoreManifest:
    """What a store was made of.

    Attributes:
        digest: of all that follows but the recall.
        passages: a digest of the ids and texts, in their order.
        encoder: a digest of the encoder's files.
        chain: a digest of each update since the store was built, the first one first.
        centroids: a digest of the centroids of an IVF index; "" for others.
        num_probes: the clusters that are searched; 0 for an exact index.
        recall: the share of the 10 nearest passages that the index finds, measured when it was built.
    """

    digest: str = ""
    num_passages: int
    num_features: int
    passages: str
    encoder: str
    settings: StoreSettings
    chain: tuple[str, ...] = ()
    centroids: str = ""
    num_probes: int = 0
    recall: float = 1.0

    @property
    def signed(self) -> StoreManifest:
        """The manifest with its digest."""
        return replace(self, digest=digest(replace(self, digest="", recall=1.0)))


@dataclass(frozen=True, kw_only=True)
class StoreIndex:
    """The index of some vectors. index: that of FAISS; None for an exact one. The others are as in `StoreManifest`."""

    index: Any = None
    centroids: str = ""
    num_probes: int = 0
    recall: float = 1.0


class KnowledgeStore:
    """A store that is read; `open` returns it, `build` and `update` make one."""

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.digest = manifest.digest
        self._table = read_table(folder / PASSAGES_FILE)

    @classmethod
    def open(cls, folder: Path) -> KnowledgeStore:
        """Returns the store in a folder. Raises ValueError, with a remedy, where it holds none or a damaged one."""
        require_extra("retrieval", feature="a knowledge store")
        try:
            manifest = from_json(StoreManifest, json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
            store = cls(folder, manifest)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{folder} holds no knowledge store that can be read: {error}. To fix: give the folder that "
                "a job of kind store has written"
            ) from error
        shape = (manifest.num_passages, manifest.num_features)
        if manifest.signed != manifest or store.vectors.shape != shape or store._table.num_rows != shape[0]:
            raise ValueError(f"the files of the store in {folder} do not belong together. To fix: copy it again")
        return store

    @cached_property
    def passages(self) -> Sequence[Passage]:
        """The passages, in the order of the rows."""
        columns = (self._table[name].to_pylist() for name in ("id", "text"))
        return tuple(Passage(*each) for each in zip(*columns, strict=True))

    @cached_property
    def vectors(self) -> Vectors:
        """The embeddings of the passages, [passages, features], memory-mapped."""
        vectors: Vectors = np.load(self.folder / VECTORS, mmap_mode="r")
        return vectors

    @cached_property
    def encoder(self) -> PassageEncoder:
        """The encoder, read when it is first needed."""
        if encoder_digest(self.folder / ENCODER) != self.manifest.encoder:
            raise ValueError(f"the encoder of the store in {self.folder} has changed. To fix: copy the store again")
        return encoder_in(self.folder / ENCODER, self.manifest.settings)

    def encode(self, *, texts: Sequence[str]) -> Vectors:
        """Returns the embeddings of texts, [texts, features]."""
        return self.encoder.encode(texts)

    def search(self, *, vectors: NDArray[Any], num_passages: int) -> list[list[RetrievedPassage]]:
        """Returns the passages with the largest scores for each vector, the best first.

        Scores are computed in double precision, one question at a time, and passages with equal scores are in the
        order of the store. So what is found for a vector does not depend on the vectors that are searched with it.

        Args:
            vectors: [questions, features].
            num_passages: passages for each question; fewer where the store has no more.
        """
        wanted = np.ascontiguousarray(vectors, dtype=np.float32)
        _, nearest = self.index.search(wanted, min(num_passages + SPARE, len(self._keys)))  # keys; -1 for none
        texts, ids = self._table["text"], self._table["id"]
        result = []
        for vector, keys in zip(wanted, nearest, strict=True):
            rows = np.searchsorted(self._keys, keys[keys >= 0])
            scores = (self.vectors[rows].astype(np.float64) * vector.astype(np.float64)).sum(1)
            best = np.lexsort((rows, -scores))[:num_passages]
            result.append(
                [RetrievedPassage(ids[row].as_py(), texts[row].as_py(), score)
                 for row, score in zip(rows[best].tolist(), scores[best].tolist(), strict=True)]
            )  # fmt: skip
        return result

    def search_texts(self, *, texts: Sequence[str], num_passages: int) -> list[list[RetrievedPassage]]:
        """Returns the passages that are most similar to each text, the best first."""
        return self.search(vectors=self.encode(texts=texts), num_passages=num_passages)

    def ids_of(self, names: Collection[str], *, may_lack: bool = False) -> set[str]:
        """Returns the ids of passages by their names; of a text that was divided, those of all parts.

        may_lack: whether the store may lack some; else they are a ValueError.
        """

        def text_of(name: str) -> str:
            return re.sub(r"#\d+$", "", name) if self.manifest.settings.words else name

        wanted, own = {*map(text_of, names)}, self._table["id"].to_pylist()
        if not may_lack and (missing := sorted(wanted.difference(map(text_of, own)))):
            raise ValueError(f"the store has no passage {few(list(map(repr, missing)))}. To fix: give ids that it has")
        return {each for each in own if text_of(each) in wanted}

    def update(self, *, removed: Collection[str], added: Sequence[Passage], folder: Path) -> KnowledgeStore:
        """Writes another version of the store to `folder`, of which only the added passages are encoded.

        Args:
            removed: ids of passages; an id that is among the added ones too is replaced.
            added: passages, behind those that stay.
            folder: of the new version.

        Raises ValueError where ids are missing, or there twice.
        """
        gone = set(removed)
        own = self._table["id"].to_pylist()
        faults = [f"{each!r} is removed and not there" for each in sorted(gone.difference(own))]
        faults += _repeated(added, before=set(own) - gone)
        if faults or len(gone) == len(own) + len(added):
            raise ValueError(
                f"the store in {self.folder} cannot be updated: {few(faults) or 'nothing would be left'}. To fix: "
                "remove ids that it has, and add those that it will not have"
            )
        stays = np.array([each not in gone for each in own])
        encoded = self.encode(texts=[each.text for each in added]).reshape(-1, self.manifest.num_features)
        first_key = int(self._keys[-1]) + 1
        keys = np.arange(first_key, first_key + len(added))
        delta = digest([sorted(gone), [[each.id, each.text] for each in added]])
        own_index, manifest = None, self.manifest
        if manifest.settings.index == IVF:
            own_index = _faiss().clone_index(self.index)
            own_index.remove_ids(np.ascontiguousarray(self._keys[~stays]))
            own_index.add_with_ids(encoded, keys)
        return write_store(
            folder,
            passages=[each for each, is_kept in zip(self.passages, stays, strict=True) if is_kept] + list(added),
            vectors=np.concatenate([self.vectors[stays], encoded]),
            encoder=self.folder / ENCODER,
            settings=self.manifest.settings,
            keys=np.concatenate([self._keys[stays], keys]),
            index=StoreIndex(
                index=own_index,
                centroids=manifest.centroids,
                num_probes=manifest.num_probes,
                recall=manifest.recall,
            ),
            before=manifest,
            delta=delta,
        )

    @cached_property
    def index(self) -> Any:
        """The index of FAISS, whose ids are the keys of the rows."""
        if self.manifest.settings.index == FLAT:
            return _exact_index(self.vectors, self._keys)
        index = _faiss().read_index(str(self.folder / INDEX))
        index.nprobe = self.manifest.num_probes
        return index

    @cached_property
    def _keys(self) -> NDArray[np.int64]:
        """A number of each row, ascending, that it keeps in later versions."""
        keys: NDArray[np.int64] = self._table["key"].to_numpy()
        return keys


def find_passages(
    context: SampleContext, questions: Sequence[str], *, but: Sequence[str] | None = None
) -> list[list[RetrievedPassage]]:
    """Returns the k passages of the context's store that are most similar to each question, the best first.

    Where the store is not made yet, these are its first passages: samples of the number and about the size of the later
    ones, by which steps and memory are predicted.

    but: for each question the text that is left out, with passages that hold it.

    Raises ValueError where the store has too few passages.
    """
    retriever = context.retriever
    if not questions or retriever is None:
        return []
    num_wanted = retriever.k if but is None else retriever.k + SPARE
    if retriever.is_made:
        if retriever.store not in context.opened:
            context.opened[retriever.store] = KnowledgeStore.open(Path(retriever.store))
        nearest = context.opened[retriever.store].search_texts(texts=questions, num_passages=num_wanted)
    else:
        first = open_split(Path(retriever.store), "training").slice(0, num_wanted)
        nearest = [[RetrievedPassage(*each, 0.0) for each in ids_and_texts(first)]] * len(questions)
    if but is not None:
        pairs = zip(nearest, but, strict=True)
        nearest = [[each for each in passages if left_out.strip() not in each.text] for passages, left_out in pairs]
    if (fewest := min(map(len, nearest))) < retriever.k:
        raise ValueError(
            f"data.retriever: the store has {fewest} passages for a question, and k is {retriever.k}. To fix: give a "
            "smaller k, or a store with more passages"
        )
    return [passages[: retriever.k] for passages in nearest]


def encoder_in(folder: Path, settings: StoreSettings, **device: Any) -> PassageEncoder:
    """Returns the encoder in a folder, with the batches of a store."""
    return PassageEncoder(folder, batch_size=settings.batch_size, max_length=settings.max_length, **device)


def write_store(
    folder: Path,
    *,
    passages: Sequence[Passage],
    vectors: Vectors,
    encoder: Path,
    settings: StoreSettings,
    keys: NDArray[np.int64] | None = None,
    index: StoreIndex | None = None,
    before: StoreManifest | None = None,
    delta: str = "",
) -> KnowledgeStore:
    """Writes a store of encoded passages, aside and then renamed, and returns it.

    Args:
        folder: the store's.
        passages: in the order of the rows.
        vectors: [passages, features].
        encoder: the folder of what has made them.
        settings: of the index and the batches.
        keys: of the rows, ascending; None for their numbers.
        index: of these vectors; None to build it.
        before: the manifest of the version that was updated.
        delta: a digest of the update.
    """
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    keys = np.arange(len(passages)) if keys is None else keys
    index = build_index(vectors, keys, settings) if index is None else index
    manifest = StoreManifest(
        num_passages=len(passages),
        num_features=vectors.shape[1],
        passages=hashlib.sha256(json.dumps([[each.id, each.text] for each in passages]).encode()).hexdigest()[:16],
        encoder=encoder_digest(encoder) if before is None else before.encoder,
        settings=settings,
        chain=() if before is None else (*before.chain, delta),
        centroids=index.centroids,
        num_probes=index.num_probes,
        recall=index.recall,
    )
    with publish(folder) as aside:
        copy_encoder(encoder, aside / ENCODER, as_links=before is not None)
        with ArrowWriter(aside / PASSAGES_FILE) as file:
            columns = {name: texts_column([getattr(each, name) for each in passages]) for name in ("id", "text")}
            file.write(table_of({"key": keys, **columns}))
        np.save(aside / VECTORS, vectors)
        if index.index is not None:
            _faiss().write_index(index.index, str(aside / INDEX))
        write_value(manifest.signed, aside / MANIFEST)
    return KnowledgeStore.open(folder)


def build_index(vectors: Vectors, keys: NDArray[np.int64], settings: StoreSettings) -> StoreIndex:
    """Returns an index; one of clusters searches as many of them as its recall needs.

    Such an index keeps ids of its own: `IndexIDMap2` around it confuses them once some are removed.

    Raises ValueError where the settings name an unknown index.
    """
    require_extra("retrieval", feature="a knowledge store")
    if settings.index not in INDEXES:
        raise ValueError(f"index {settings.index!r} is unknown. To fix: give {' or '.join(INDEXES)}")
    if settings.index == FLAT:
        return StoreIndex()
    faiss, num_features = _faiss(), vectors.shape[1]
    num_lists = min(settings.num_lists or round(4 * math.sqrt(len(vectors))), len(vectors))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(num_features), num_features, num_lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed, index.cp.min_points_per_centroid = settings.seed + 1, 1
    index.cp.niter, index.cp.max_points_per_centroid = CLUSTER_ITERATIONS, CLUSTER_POINTS
    index.train(vectors)
    index.add_with_ids(vectors, keys)
    index.nprobe, drawn = 1, np.random.default_rng(settings.seed).permutation(len(vectors))[:NUM_QUERIES]
    _, exact = _exact_index(vectors, keys).search(vectors[drawn], min(RECALL_AT + 1, len(vectors)))
    while (
        recall := _recall(index, vectors[drawn], keys[drawn], exact)
    ) < settings.least_recall and index.nprobe < num_lists:
        index.nprobe = min(2 * index.nprobe, num_lists)
    centroids = hashlib.sha256(index.quantizer.reconstruct_n(0, num_lists).tobytes()).hexdigest()[:16]
    return StoreIndex(index=index, centroids=centroids, num_probes=index.nprobe, recall=recall)


def _recall(index: Any, vectors: Vectors, keys: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    """Returns the share of the nearest passages of some, without themselves, that an index finds.

    exact: the keys of the nearest passages of each, [passages, neighbours].
    """
    _, nearest = index.search(vectors, exact.shape[1])
    shares = [
        len({*ours}.intersection(theirs) - {own}) / max(exact.shape[1] - 1, 1)
        for own, ours, theirs in zip(keys.tolist(), exact.tolist(), nearest.tolist(), strict=True)
    ]
    return min(float(np.mean(shares)), 1.0)


def _exact_index(vectors: Vectors, keys: NDArray[np.int64]) -> Any:
    faiss = _faiss()
    index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
    index.add_with_ids(np.ascontiguousarray(vectors), keys)
    return index


def _faiss() -> Any:
    import faiss

    return faiss


def _repeated(passages: Sequence[Passage], *, before: set[str]) -> list[str]:
    counts = Counter([*before, *(each.id for each in passages)])
    return [f"{name!r} is there twice" for name, number in counts.items() if number > 1]
