"""The making of a knowledge store by a gang: a step encodes some batches of passages, and a checkpoint has the vectors.

With n batches of all passages, sorted by length, and S steps, step s encodes the batches s, s + S, s + 2S, ..., so that
all steps take about as long; rank r of R takes every R-th of these. Batches are those of `PassageEncoder.batches`
whatever the gang, so the vectors depend on no plan.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ringmaster.errors import CheckpointError
from ringmaster.features.stores.job import StoreSettings
from ringmaster.features.stores.knowledge_store import (
    Passage,
    StoreIndex,
    build_index,
    encoder_in,
    write_store,
)
from ringmaster.features.stores.passage_encoder import ENCODER_FILES, Vectors
from ringmaster.features.stores.passages import ids_and_texts
from ringmaster.techniques.checkpoints.checkpoint import WritePieces, store_model
from ringmaster.techniques.checkpoints.state import HostCopies, Reader, piece_writer
from ringmaster.techniques.data.arrow_files import TOKENS, open_split, values_of
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_model
from ringmaster.techniques.models.peft_format import is_adapter
from ringmaster.techniques.models.sentence_embeddings import local_folder
from ringmaster.techniques.processes.gang_events import JobResult
from ringmaster.techniques.processes.order import TRIAL, GangOrder
from ringmaster.techniques.processes.ranks import RankContext, join
from ringmaster.techniques.processes.reporter import Reporter
from ringmaster.techniques.training.rank_job import RankJob, Root, prepared_data
from ringmaster.techniques.training.segment_loop import BUILD_TIMEOUT_S, train_segment
from ringmaster.techniques.training.trainer import StepReport
from ringmaster.techniques.training.trial import trial

VECTORS = "vectors"
"""The tensor of a checkpoint: [passages that are encoded, features], in the order of the steps."""


class StoreBuilder(RankJob):
    """A store's job on one rank: the vectors of the steps so far, which all ranks have."""

    def __init__(self, order: GangOrder, ranks: RankContext, *, encoder: Path, beat: Callable[[], None]) -> None:
        super().__init__(order, ranks)
        settings = self.job.feature(StoreSettings)
        assert settings is not None
        self._settings, self._beat = settings, beat
        self._folder = encoder
        self._encoder = encoder_in(self._folder, self._settings, device=ranks.device)
        self._samples = open_split(Path(self.prepared.folder), "training")
        values, lengths = values_of(self._samples[TOKENS])
        assert lengths is not None
        self._tokens = np.split(values, np.cumsum(lengths)[:-1])
        self._batches = list(self._encoder.batches(self._tokens))
        size = self.job.global_batch_size
        self._num_steps = self.job.num_steps or max(round(len(self._tokens) / size), 1)
        self._vectors: Vectors = np.empty((len(self._tokens), 0), np.float32)
        self._index: StoreIndex | None = None

    def _rows(self, *steps: int) -> NDArray[np.int64]:
        """Returns the passages of some steps, in the order in which they are encoded."""
        batches = [batch for step in steps for batch in self._batches[step % self._num_steps :: self._num_steps]]
        return np.concatenate([*batches, np.empty(0, np.int64)])

    def step(self, votes: tuple[float, ...] = ()) -> StepReport:
        """Encodes the passages of the next step; `votes` are summed over the ranks."""
        started_s, num_ranks = time.perf_counter(), self.ranks.num_ranks
        batches = self._batches[self.next_step % self._num_steps :: self._num_steps]
        own = [torch.empty(0)]
        for batch in batches[self.ranks.rank :: num_ranks]:
            own.append(torch.from_numpy(self._encoder.encode_batch([self._tokens[row] for row in batch])).flatten())
            self._beat()
        (of_ranks,) = self.ranks.gather([torch.cat(own).double()])
        for rank, values in enumerate(of_ranks):
            rows = np.concatenate([*batches[rank::num_ranks], np.empty(0, np.int64)])
            if len(rows):
                self._place(rows, values.reshape(len(rows), -1).float().numpy())
        report = StepReport(
            index=self.next_step,
            loss=0.0,
            seconds=time.perf_counter() - started_s,
            vote_sums=tuple(self.ranks.sum(list(votes))),
            num_samples=sum(map(len, batches)),
            num_tokens=sum(len(self._tokens[row]) for batch in batches for row in batch),
        )
        self.next_step += 1
        return report

    def _place(self, rows: NDArray[np.int64], vectors: Vectors) -> None:
        if not self._vectors.shape[1]:
            self._vectors = np.zeros((len(self._tokens), vectors.shape[1]), np.float32)
        self._vectors[rows] = vectors

    def save(self, root: Root) -> float:
        """Checkpoints the vectors; returns the seconds."""
        started_s = time.perf_counter()
        self.store(root).save(self.next_step, self.pieces(), self.checkpoint_meta())
        return time.perf_counter() - started_s

    def pieces(self, *, copies: HostCopies | None = None) -> WritePieces:
        """Returns the pieces that this rank writes into a checkpoint: rank 0 those of all."""
        rows = self._rows(*range(min(self.next_step, self._num_steps)))
        encoded = {VECTORS: torch.from_numpy(self._vectors[rows])} if self.ranks.rank == 0 else {}
        return piece_writer(encoded, copies=copies)

    def checkpoint_meta(self) -> dict[str, Any]:
        """Returns the metadata of the job that a checkpoint stores."""
        return self.model_meta(self._encoder.model)

    def restore(self, root: Root, *, known_step: int = 0) -> int:
        """Loads the vectors of the newest checkpoint, if any; returns the number of completed steps."""
        checkpoint = self.newest_checkpoint(root, known_step=known_step)
        if checkpoint is None:
            return 0
        self.next_step = checkpoint.manifest.step
        with Reader(checkpoint) as reader:
            vectors = reader.whole(VECTORS).numpy()
        rows = self._rows(*range(self.next_step))
        if len(rows) != len(vectors):
            raise CheckpointError(f"{checkpoint.location} has {len(vectors)} vectors, not {len(rows)}: of other steps")
        self._place(rows, vectors)
        return self.next_step

    def num_evaluated_batches(self) -> int:
        """Returns 0: a trial measures no evaluation."""
        return 0

    def evaluate(self, *, max_batches: int | None = None) -> dict[str, float]:
        """Builds the index on rank 0; returns the share of the nearest passages that it finds, on every rank."""
        if max_batches is not None:
            return {}
        keys = np.arange(len(self._tokens))
        if self.ranks.rank == 0:
            self._index = build_index(self._vectors, keys, self._settings)
        recall = self._index.recall if self._index is not None else 0.0
        return {"index_recall": self.ranks.sum([recall])[0], "num_passages": float(len(keys))}

    def export(self, folder: Path, root: Root) -> None:
        """Writes the store. Rank 0 does it; a trial has none to write."""
        if self.ranks.rank == 0 and self.order.purpose != TRIAL:
            passages = [Passage(*each) for each in ids_and_texts(self._samples)]
            write_store(
                folder,
                passages=passages,
                vectors=self._vectors,
                encoder=self._folder,
                settings=self._settings,
                index=self._index,
            )
            if self.order.model_url is not None:
                self._beat()
                store_model(folder, self.order.model_url)
        self._beat()


def encoder_folder(order: GangOrder, rank: int) -> Path:
    """Returns the folder of the encoder; one is written of an adapter, and of a base that is not trained yet.

    To be called before the ranks meet, as afterwards only the first of them can save a model.
    """
    job, base = order.job, order.weights_from or order.job.model.from_pretrained
    weights = None if base is None else local_folder(base, patterns=(*ENCODER_FILES, "adapter*"))
    if weights is not None and not is_adapter(weights):
        return weights
    assert weights is not None or order.purpose == TRIAL, "the base's folder was not ordered"
    folder, prepared = Path(order.folder) / f"encoder-{rank}", prepared_data(order)
    model = build_model(job.model, data=prepared, seed=job.seed, weights_from=weights)
    export_model(folder, spec=job.model, model=model, state=model.state_dict(), prepared=prepared, base=base)
    return folder


def run(order: GangOrder, rank: int, reporter: Reporter) -> JobResult:
    """Runs one rank of a trial or a segment; returns the result of the loops of training."""
    encoder = encoder_folder(order, rank)
    ranks = join(order, rank, num_ranks=order.num_devices, axes={"dp_replicate": order.num_devices})
    reporter.phase("loading passages and encoder", timeout_s=BUILD_TIMEOUT_S)
    builder = StoreBuilder(order, ranks, encoder=encoder, beat=reporter.beat)
    loop = trial if order.purpose == TRIAL else train_segment
    result = loop(builder, order, reporter)
    ranks.agree(True)  # no rank ends while a peer may still wait for it
    return result
