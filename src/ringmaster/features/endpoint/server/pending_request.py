"""A request that waits or is computed, in the parts in which it is computed, and the answer that their results make.

What the parts are depends on the request alone: so it gets the bits that it would get alone, whoever else is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ringmaster.features.endpoint.server.store import EndpointRequestKind, StoredRequest

PIECE_TOKENS = 8192  # of a loss that are computed at a time, at least a row
SAMPLE_TOKENS = 16  # of each sequence that are sampled at a time
MAX_SEQUENCES = 512  # of samples that are begun and not complete; a request stays whole
OF_ANSWERS = ("last_n", "target_layout")
"""Keys of the work of a sample that are no matter of the process that computes."""


class PendingRequest:
    """A request that waits or is computed.

    pieces: of a loss, what is left of it; of others, its work until it is answered.
    is_begun: whether it is a sample that had a turn.
    used_s, used_tokens: what it has used of the device since it was started.
    num_deaths: of the process that computes, during this request.
    """

    def __init__(self, request: StoredRequest) -> None:
        self.request, self.num_deaths = request, 0
        self.start_again()

    def start_again(self) -> None:
        """Forgets what was computed of it, as the process that computes does that has died."""
        self.pieces = pieces_of(self.request)
        self._results: list[Mapping[str, Any]] = []
        self.is_begun, self.used_s, self.used_tokens = False, 0.0, 0

    @property
    def share_of(self) -> str:
        """The client, or else the sampler, whose device time it uses."""
        return self.request.model or self.request.stream

    @property
    def has_results(self) -> bool:
        """Whether a piece of it was computed."""
        return bool(self._results)

    @property
    def num_tokens(self) -> int:
        """The tokens of the piece, or the most of the turn, that comes next."""
        work = self.pieces[0]
        if "rows" in work:
            return sum(len(row["tokens"]) for row in work["rows"])
        if "prompt" in work:
            prompt = 0 if self.is_begun else len(work["prompt"])
            return int(prompt + work["num_samples"] * min(SAMPLE_TOKENS, work["max_tokens"]))
        return 1

    def take(self, result: Mapping[str, Any] | None, *, used_s: float) -> dict[str, Any] | None:
        """Takes the result of a piece or turn, None for a sample that goes on; returns the answer once it is whole."""
        self.used_s += used_s
        self.used_tokens += self.num_tokens
        if result is None:
            self.is_begun = True
            return None
        if "refusal" in result:
            return {"error": result["refusal"], "category": result.get("category", "user")}
        if self.request.kind is EndpointRequestKind.SAMPLE:
            return _sample_answer(result, self.request.work)
        self._results.append(result)
        if len(self.pieces) == 1:
            return _joined(self._results)
        self.pieces.pop(0)
        return None


def within_sequences(waiting: Sequence[PendingRequest]) -> Iterator[PendingRequest]:
    """Yields the requests that may be computed: samples only while those that are begun have few enough sequences.

    Their keys and values are in memory until they are complete. No client has more than half of the sequences, so none
    keeps the others from sampling by itself.
    """
    used: Counter[str] = Counter()
    for each in waiting:
        if each.is_begun:
            used[each.share_of] += each.request.work["num_samples"]
    for each in waiting:
        if each.is_begun or each.request.kind is not EndpointRequestKind.SAMPLE:
            yield each
            continue
        client, num = each.share_of, each.request.work["num_samples"]
        fits = used.total() + num <= MAX_SEQUENCES and used[client] + num <= MAX_SEQUENCES // 2
        if fits or not used:
            used[client] += num
            yield each


def pieces_of(request: StoredRequest) -> list[Mapping[str, Any]]:
    """Returns the parts in which a request is computed; they depend on nothing else."""
    if request.kind is not EndpointRequestKind.LOSS:
        return [request.work]
    return [{**request.work, "rows": rows} for rows in _row_groups(request.work["rows"])]


def _row_groups(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    group: list[Mapping[str, Any]] = []
    num_tokens = 0
    for row in rows:
        num_tokens += len(row["tokens"])
        if group and num_tokens > PIECE_TOKENS:
            yield group
            group, num_tokens = [], len(row["tokens"])
        group.append(row)
    yield group


def _joined(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the answer of all pieces. The ending of a metric's name says how its values join."""
    outputs = [output for result in results for output in result["outputs"]]
    counts = [len(result["outputs"]) for result in results]
    metrics = {}
    for name in results[0]["metrics"]:
        values = [result["metrics"][name] for result in results]
        ending = name.rpartition(":")[2]
        joins: Mapping[str, Callable[[Sequence[float]], float]] = {"sum": sum, "min": min, "max": max}
        if ending in joins:
            metrics[name] = joins[ending](values)
        else:
            metrics[name] = sum(value * n for value, n in zip(values, counts, strict=True)) / sum(counts)
    return {"outputs": outputs, "metrics": metrics}


def sample_of(work: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the process that computes takes of the work of a sample."""
    return {"client": None, **{key: value for key, value in work.items() if key not in OF_ANSWERS}}


def _sample_answer(result: Mapping[str, Any], work: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a sampling result with what was asked of the last places of the prompt alone, and as it was asked."""
    answer = dict(result)
    if (last_n := work["last_n"]) is not None:
        for key in ("prompt_logprobs", "topk_prompt_logprobs"):
            if (values := result.get(key)) is not None:
                answer[key] = [None] * (len(values) - last_n) + list(values[-last_n:])
    if (layout := work.get("target_layout")) is not None:
        flat = [value for place in result["target_prompt_logprobs"] for value in place]
        listed = layout["listed"]
        answer["target_prompt_logprobs"] = {
            "data": flat if listed is None else [flat[i] for i in listed],
            "dtype": "float32",
            **{key: value for key, value in layout.items() if key != "listed"},
        }
    if (drawn := result.get("prompt_alt_tokens")) is not None:
        shape = [len(drawn), work["prompt_alt_tokens"]]
        answer["prompt_alt_tokens"] = {
            "tokens": {"data": [pair[0] for place in drawn for pair in place], "dtype": "int64", "shape": shape},
            "logprobs": {"data": [pair[1] for place in drawn for pair in place], "dtype": "float32", "shape": shape},
        }
    return answer
