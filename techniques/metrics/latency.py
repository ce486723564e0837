"""Latency and throughput as metrics: `latency/MEASURE`, or `latency/MEASURE/batch=8,tokens=128`.

A request is a batch of random inputs, without queueing: what one client sees that waits for each answer. It is timed
where the model is evaluated, on as many threads or on the GPU that a rank has there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringmaster.techniques.metric import ModelMetric
from ringmaster.techniques.model_facts import num_positions

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values

FAMILY = "latency"
QUANTILES = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99}
TOKENS_PER_S, REQUESTS_PER_S = "tokens_per_s", "requests_per_s"
MEASURES = (*QUANTILES, TOKENS_PER_S, REQUESTS_PER_S)
OPTIONS = {"batch": 1, "tokens": 128, "new_tokens": 0}
"""What a request has: rows, tokens of each row (not of images), and tokens that the model writes to each."""
NUM_REQUESTS, WARM_UP_REQUESTS = 200, 5
TAIL_REQUESTS = 10
"""The requests beyond a quantile, at least. With n requests, its 95 % interval is from the order statistic of rank
n q - 2 s to that of n q + 2 s, s^2 = n q (1 - q): of 1000, p99 lies between the 17th and the 4th longest. Nothing that
200 requests show bounds it: with the probability 0.99^200 = 13 %, all of them are shorter."""


@cache
def latency_metric(rest: str) -> type[Latency]:
    """Returns the metric "MEASURE" or "MEASURE/OPTION=NUMBER,...". Raises ValueError on what it does not know."""
    measure, _, words = rest.partition("/")
    options, name = dict(OPTIONS), f"{FAMILY}/{rest}"
    for word in filter(None, words.split(",")):
        option, _, number = word.partition("=")
        if option not in options or not number.isdecimal() or int(number) < (option != "new_tokens"):
            raise ValueError(f"metric {name}: {word!r} is not an option. To fix: write {_example(OPTIONS)}")
        options[option] = int(number)
    if measure not in MEASURES:
        raise ValueError(f"metric {name}: there is no {measure!r}. To fix: name one of {', '.join(MEASURES)}")
    fields = {"name": name, "sums": (name,), "higher_is_better": measure not in QUANTILES, "kind": measure}
    return type("Latency", (Latency,), {**fields, "options": options})


def _example(options: Mapping[str, int]) -> str:
    return ",".join(f"{name}={number}" for name, number in options.items())


class Latency(ModelMetric):
    """One measure of the seconds that requests take.

    kind: one of `MEASURES`. options: see `OPTIONS`.
    """

    kind: ClassVar[str]
    options: ClassVar[Mapping[str, int]]

    def num_rows(self) -> int:
        """Returns the number of requests."""
        return max(NUM_REQUESTS, round(TAIL_REQUESTS / (1 - QUANTILES.get(self.kind, 0.0))))

    def measure(self, model: Any, rows: Sequence[int], *, tokenizer_dir: Path | None, batch_size: int) -> Values:
        """Returns the seconds of each request, after some that are not counted."""
        import torch

        answer = self._answer_of(model)
        with torch.inference_mode():
            for row in range(WARM_UP_REQUESTS if rows else 0):
                _timed(answer, self._inputs(model, seed=row))
            return np.asarray([_timed(answer, self._inputs(model, seed=row)) for row in rows], dtype=np.float64)

    def value_of_rows(self, rows: Mapping[str, Values], counts: Values) -> Values:
        """Returns the quantile of the requests' seconds, or what is computed in a second."""
        seconds = np.asarray(rows[self.name])
        if self.kind not in QUANTILES:
            tokens = self.options["batch"] * (self.options["new_tokens"] or self.options["tokens"])
            return np.asarray((tokens if self.kind == TOKENS_PER_S else 1) * counts.sum(-1) / (counts @ seconds))
        samples = np.atleast_2d(counts).astype(int)
        values = [np.quantile(np.repeat(seconds, each), QUANTILES[self.kind]) for each in samples]
        return np.asarray(values).reshape(counts.shape[:-1])

    def _answer_of(self, model: Any) -> Callable[[Mapping[str, Tensor]], Any]:
        number = self.options["new_tokens"]
        if not number:
            return lambda inputs: model(**inputs)
        if not model.can_generate():
            raise ValueError(f"metric {self.name}: {type(model).__name__} writes nothing. To fix: leave new_tokens out")
        return lambda inputs: model.generate(
            **inputs, min_new_tokens=number, max_new_tokens=number, do_sample=False, pad_token_id=0
        )

    def _inputs(self, model: Any, *, seed: int) -> dict[str, Tensor]:
        import torch

        config, draw = model.config, torch.Generator().manual_seed(seed)
        rows, device = self.options["batch"], next(model.parameters()).device
        if model.main_input_name == "pixel_values":
            size = config.image_size
            sides = (size, size) if isinstance(size, int) else tuple(size)
            pixels = torch.randn(rows, config.num_channels, *sides, generator=draw)
            return {"pixel_values": pixels.to(device)}
        text = config.get_text_config()
        limit = num_positions(text) or self.options["tokens"]
        length = min(self.options["tokens"], limit - self.options["new_tokens"])
        ids = torch.randint(text.vocab_size, (rows, length), generator=draw).to(device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.is_encoder_decoder and not self.options["new_tokens"]:
            inputs["decoder_input_ids"] = ids[:, :1]
        return inputs


def _timed(answer: Callable[[Mapping[str, Tensor]], Any], inputs: Mapping[str, Tensor]) -> float:
    import torch

    is_cuda = next(iter(inputs.values())).is_cuda
    if is_cuda:
        torch.cuda.synchronize()
    started_s = time.perf_counter()
    answer(inputs)
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started_s
