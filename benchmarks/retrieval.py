"""Knowledge stores: encoding compared with a plain loop of transformers, indexes, and an update of 1 %.

    python -m benchmarks.retrieval [--passages 100000] [--layers 2] [--hidden 128]

Passages have 13 tokens on average, and the encoder is a BERT with fresh weights. All runs on one thread. As machines
are shared, times are CPU seconds; the two ways of encoding take turns on the same passages, in two rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import faiss
import numpy as np
import torch
import transformers

from ringmaster.features.stores.job import IVF, StoreSettings
from ringmaster.features.stores.knowledge_store import Passage, build_index, encoder_in, write_store
from tests.unit.retrieval.encoders import WORDS, save_encoder

ROUNDS, COMPARED = 2, 10_000


def main() -> None:
    """Measures, and prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    draw, figures = random.Random(0), dict[str, float]()
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(4, 18))) for _ in range(options.passages)]
    passages = [Passage(f"p{i}", text) for i, text in enumerate(texts)]
    settings = StoreSettings(max_length=64)
    with tempfile.TemporaryDirectory() as aside:
        folder = Path(aside)
        encoder = save_encoder(folder / "encoder", hidden_size=options.hidden, num_hidden_layers=options.layers)
        store_encoder, plain, some = encoder_in(encoder, settings), plain_encoder(encoder), texts[:COMPARED]
        rates: dict[str, list[float]] = {"plain": [], "store": []}
        for _ in range(ROUNDS):
            for name, encode in (("plain", plain), ("store", store_encoder.encode)):
                with cpu_seconds() as taken:
                    encode(some)
                rates[name].append(len(some) / taken[0])
        figures |= {f"{name}_passages_per_cpu_s": statistics.median(each) for name, each in rates.items()}
        with cpu_seconds() as taken:
            vectors = encoder_in(encoder, settings).encode([each.text for each in passages])
            store = write_store(
                folder / "store", passages=passages, vectors=vectors, encoder=encoder, settings=settings
            )
        figures["build_cpu_s"] = taken[0]
        with cpu_seconds() as taken:
            _ = store.index
        figures["flat_index_cpu_s"] = taken[0]
        vectors, keys = np.array(store.vectors), np.arange(len(passages))
        with cpu_seconds() as taken:
            index = build_index(vectors, keys, StoreSettings(index=IVF))
        figures |= {"ivf_index_cpu_s": taken[0], "ivf_recall": index.recall, "ivf_probes": index.num_probes}
        num_swapped = len(passages) // 100
        added = [Passage(f"p{i}", f"{texts[i]} color1") for i in range(num_swapped)]
        _ = store.encoder
        with cpu_seconds() as taken:
            store.encode(texts=[each.text for each in added])
        figures["encoding_of_one_percent_cpu_s"] = taken[0]
        with cpu_seconds() as taken:
            store.update(removed=[each.id for each in added], added=added, folder=folder / "swapped")
        figures["update_of_one_percent_cpu_s"] = taken[0]
        with cpu_seconds() as taken:
            store.search(vectors=vectors[:256], num_passages=8)
        figures["ms_a_question_in_a_batch"] = 1000 * taken[0] / 256
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=2))


@contextmanager
def cpu_seconds() -> Iterator[list[float]]:
    """Yields a list, which afterwards has the seconds of this process's cores."""
    result, started_s = [0.0], time.process_time()
    yield result
    result[0] = time.process_time() - started_s


def plain_encoder(folder: Path) -> Callable[[list[str]], np.ndarray]:
    """Returns the loop that a script has: batches of 64 in the order of the texts, padded, normalized means."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def encode(texts: list[str]) -> np.ndarray:
        result = []
        for first in range(0, len(texts), 64):
            batch = tokenizer(texts[first : first + 64], padding=True, truncation=True, return_tensors="pt")
            states = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            result.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1).numpy())
        return np.concatenate(result)

    return encode


if __name__ == "__main__":
    main()
