"""The adapter benchmarks' tables in docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.adapters import baselines
from benchmarks.adapters import sweep as sweeps

RATIO_GOAL, MEMORY_GOAL, SWEEP_GOAL, ERROR_GOAL = 1.6, 2.0, 1.5, 0.1


def page(known: Mapping[str, Mapping], *, machine: str) -> str:
    """Returns the tables of the measured parts, each with its date and the machine's load at its end."""
    blocks = []
    for part, lines in TABLES.items():
        if part in known:
            said = known[part]
            load = "" if said["load"] is None else f", a load of {said['load']} at the end"
            when = f"{said['date']}, {machine}{load}."
            blocks.append("\n".join(lines(said["found"], when)) + "\n")
    return "\n".join(blocks)


def engine_lines(rows: Sequence[Mapping], when: str) -> Iterator[str]:
    yield f"**A step of all adapters**, rank 8, 1 x 64 tokens each: {when}"
    yield "CPU seconds of one thread; a plain loop over peft's models, gangs of one, and the group take turns, step by"
    yield "step. Ours end in the same weights bit by bit, peft's up to floating-point order. In brackets the least and"
    yield f"the most of the rounds. Goal: {RATIO_GOAL} times as fast as one after another."
    yield ""
    yield "| base | adapters | peft, one after another | ours, one after another | together | times peft | times ours |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in rows:
        milliseconds = " | ".join(f"{row[f'{who}_ms']:.0f} ms" for who in ("peft", "alone", "together"))
        times = " | ".join(
            f"{row[f'{who}_ratio']:.2f} ({row[f'{who}_least']:.2f} to {row[f'{who}_most']:.2f})"
            for who in ("peft", "alone")
        )
        yield f"| {row['base']} | {row['adapters']} | {milliseconds} | {times} |"


def memory_lines(rows: Sequence[Mapping], when: str) -> Iterator[str]:
    yield f"**Memory of the process that trains them**, beyond its imports (peak of its resident set): {when}"
    yield f"Goal: 16 in at most {MEMORY_GOAL:.0f} times that of one."
    yield ""
    yield "| base | recompute | adapters | MiB | times one | times as many processes of one |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    one = {(row["base"], row["recompute"]): row["peak_mib"] for row in rows if row["adapters"] == 1}
    for row in rows:
        alone = one[row["base"], row["recompute"]]
        times = row["peak_mib"] / alone
        yield (
            f"| {row['base']} | {row['recompute']} | {row['adapters']} | {row['peak_mib']:.0f} | {times:.2f} | "
            f"{times / row['adapters']:.2f} |"
        )


def process_lines(found: Mapping, when: str) -> Iterator[str]:
    seconds = found["seconds"]
    num, steps = found["adapters"], found["steps"]
    yield f"**Whole processes** that train the same {num} adapters (ranks 4 and 8) for {steps} steps of 1 x 64 tokens"
    yield f"on a Llama of 4 layers of 128, from the start of Python to the last saved adapter: {when}"
    yield f"The one process of the Trainer had {found['threads']} thread(s), which was quickest."
    yield ""
    yield "| who | seconds | times the groups side by side | weights apart from ours alone |"
    yield "| --- | ---: | ---: | ---: |"
    for name, mine in seconds.items():
        times = ratios(mine, seconds[baselines.FUSED_BESIDE])
        apart = found["apart"][name]
        yield (
            f"| {name} | {statistics.median(mine):.1f} | {statistics.median(times):.2f} | "
            f"{'none' if apart == 0 else f'{apart:.0e}'} |"
        )


def ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Returns the ratios of one contender's seconds to another's, by round."""
    return [one / other for one, other in zip(mine, others, strict=True)]


def sweep_lines(rows: Sequence[Mapping], when: str) -> Iterator[str]:
    num_rounds = len({row["round"] for row in rows})
    num_trials = len(rows[0]["losses"])
    yield f"**A sweep of {num_trials} trials as a whole command** (`ringmaster sweep`), medians of {num_rounds}"
    yield "round(s), every one with fresh homes, cold and then warm:"
    yield f"{when} Goals: never slower than the trials by"
    yield f"themselves, and {SWEEP_GOAL} times as fast as one after another."
    yield ""
    yield "| profiles | how | seconds | of them training | profiling | times the first |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for row in sweeps.summary(rows):
        yield (
            f"| {row['profiles']} | {row['who']} | {row['seconds']:.1f} | {row['training_s']:.1f} | "
            f"{row['profiling_s']:.1f} | {row['times']:.2f} |"
        )


def prediction_lines(rows: Sequence[Mapping], when: str) -> Iterator[str]:
    yield f"**Step times and memory of groups, foretold and measured** while the other core trains the same: {when}"
    yield f"*Tried*: profiling measures groups of that size, and goes by them. Goal: within {ERROR_GOAL:.0%}."
    yield ""
    yield "| adapters | tried | one by one | foretold | measured | off by | memory, off by |"
    yield "| ---: | --- | ---: | ---: | ---: | ---: | ---: |"
    for row in rows:
        alone, foretold, measured = (f"{1e3 * row[key]:.0f} ms" for key in ("alone_s", "predicted_s", "measured_s"))
        yield (
            f"| {row['size']} | {'yes' if row['is_fitted'] else 'no'} | {alone} | {foretold} | {measured} | "
            f"{row['off']:+.1%} | {row['peak_off']:+.1%} |"
        )


TABLES: dict[str, Callable[..., Iterator[str]]] = {
    "engine": engine_lines,
    "memory": memory_lines,
    "processes": process_lines,
    "sweep": sweep_lines,
    "prediction": prediction_lines,
}
