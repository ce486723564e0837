"""Adapters of one base scored together, against one after another: CPU seconds of all, on one core.

    python -m benchmarks.scoring [--num 8] [--hidden 128 256] [--rows 64] [--tokens 64] [--cases 40]

Both run in this process, in alternation, each starting from the models' folders: on the held-out rows of a text, and on
the short cases of a behavioural test. Their scores are checked to be bit-equal. The adapters' weights are random, from
a seed: nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec
from ringmaster.techniques.data import prepare
from ringmaster.techniques.models.adapters import first_state, sites
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_adapter, export_model
from ringmaster.techniques.scoring import ScoringResults, score_together

ROUNDS = 3


def main() -> None:
    """Prints a line for each size of the base and kind of rows, and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=8)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for hidden in options.hidden:
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(Path(folder), hidden, options)
    print(json.dumps(rows))


def compare(folder: Path, hidden: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compares the two for one size of the base."""
    config = {"hidden_size": hidden, "intermediate_size": 8 * hidden // 3 // 8 * 8, "num_hidden_layers": 4}
    config |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    spec = ModelSpec(architecture="LlamaForCausalLM", config=config)
    data = DataSpec(source="python-stdlib", seq_len=options.tokens, vocab_size=2048)
    prepared = prepare(data, cache_dir=folder)
    model = build_model(spec, data=prepared, seed=0)
    export_model(folder / "base", spec=spec, model=model, state=model.state_dict(), prepared=prepared)
    models = {}
    for i in range(options.num):
        adapter, draw = Adapter(rank=options.rank), torch.Generator().manual_seed(i)
        state = first_state(model, adapter, sites(model, adapter), seed=i)
        state = {name: value + 0.01 * torch.randn(value.shape, generator=draw) for name, value in state.items()}
        models[f"adapter-{i}"] = folder / f"adapter-{i}"
        export_adapter(
            models[f"adapter-{i}"],
            adapter=adapter,
            spec=spec,
            base=str(folder / "base"),
            state=state,
            prepared=prepared,
        )
    asked: dict[str, dict[str, Any]] = {
        "held-out rows": {"job": Job(name="it", model=spec, data=data, num_steps=1), "max_rows": options.rows},
        "short cases": {"texts": [f"for {'x' * (i % 7)} in range({i}): print({i})" for i in range(options.cases)]},
    }
    found = []
    for kind, given in asked.items():
        seconds: dict[bool, list[float]] = {True: [], False: []}
        said: dict[bool, ScoringResults] = {}
        for _ in range(ROUNDS + 1):
            for together in (True, False):
                ask = partial(score_together, models, cache_dir=folder, shares_batches=together, **given)
                spent_s, said[together] = timed(ask)
                seconds[together].append(spent_s)
        check(said[True], said[False], num=options.num)
        row = {"hidden_size": hidden, "num_adapters": options.num, "rows": kind}
        row |= {"alone_s": statistics.median(seconds[False][1:]), "together_s": statistics.median(seconds[True][1:])}
        row["ratio"] = row["alone_s"] / row["together_s"]
        print(
            {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, file=sys.stderr
        )
        found.append(row)
    return found


def check(one: ScoringResults, two: ScoringResults, *, num: int) -> None:
    """Raises AssertionError where the two differ in a bit."""
    assert len(one.scores) == len(two.scores) == num, (one.faults, two.faults)
    for name, scores in one.scores.items():
        for key, values in scores.arrays.items():
            assert np.array_equal(values, two.scores[name].arrays[key]), (name, key)


def timed(action: Callable[[], ScoringResults]) -> tuple[float, ScoringResults]:
    """Returns the CPU seconds of the only thread, and the result of the action."""
    started_s = time.process_time()
    found = action()
    return time.process_time() - started_s, found


if __name__ == "__main__":
    main()
