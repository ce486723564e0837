"""Profiles without trials: of gangs over several nodes, for jobs that no single node can train, and of dry runs.

A trial over nodes would need several of them at once, so none is made. What is predicted here counts the network for as
fast as the links within a node, so it is only offered where there is no other way; the speed that is measured while
such a gang runs corrects it within a few steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringmaster.tasks.profiling.search import Search
from ringmaster.techniques import Profile
from ringmaster.techniques.surveys import Candidate, Survey
from ringmaster.techniques.technique import GangShape

# Where nothing is known of a device's speed; corrected by the first steps.
GUESSED_STEP_S = 1.0
GUESSED_STARTUP_S = 15.0
GUESSED_STARTUP_ON_A_NODE_S = 1.0  # a fork from a process that has torch imported, and a GPU's context
PREDICTED = "predicted"
"""The source of a profile that no trial has measured."""


def shapes_over_nodes(node: GangShape, *, num_nodes: int) -> tuple[GangShape, ...]:
    """Gangs of all devices of 2, 4, ... and of all of `num_nodes` equal nodes; `node` is one of them, whole."""
    counts = {2**power for power in range(1, num_nodes.bit_length()) if 2**power <= num_nodes}
    counts |= {num_nodes} - {1}
    return tuple(
        GangShape(
            kind=node.kind,
            num_devices=node.num_devices * count,
            memory_bytes=node.memory_bytes,
            num_nodes=count,
        )
        for count in sorted(counts)
    )


def predicted_profiles(survey: Survey, *, shapes: Sequence[GangShape]) -> tuple[Profile, ...]:
    """Of each technique and shape that could train a job, the option that looks quickest, as a profile."""
    return tuple(
        _profile(best, startup_s=GUESSED_STARTUP_S, num_nodes=shape.num_nodes)
        for shape in shapes
        for best in _quickest(survey, shape)
    )


def foretold(searches: Sequence[Search]) -> tuple[Profile, ...]:
    """Of each technique and gang size that may train a job, the option that looks quickest, as a profile; no trials.

    What ran out of memory in an earlier trial is passed over.
    """
    firsts = (
        next((c for f, c in zip(s.fingerprints, s.candidates, strict=True) if f not in s.results), None)
        for s in searches
    )
    return tuple(
        _profile(candidate, startup_s=GUESSED_STARTUP_ON_A_NODE_S) for candidate in firsts if candidate is not None
    )


def _profile(candidate: Candidate, *, startup_s: float, num_nodes: int = 1) -> Profile:
    forecast = candidate.forecast
    return Profile(
        technique=candidate.technique,
        config=candidate.config,
        num_devices=candidate.num_devices,
        num_ranks=candidate.num_ranks,
        num_nodes=num_nodes,
        step_s=GUESSED_STEP_S if candidate.step_s is None else candidate.step_s,
        peak_bytes=candidate.least_bytes if forecast is None else forecast.device_bytes,
        startup_s=startup_s,
        source=PREDICTED,
    )


def _quickest(survey: Survey, shape: GangShape) -> Iterator[Candidate]:
    groups: dict[str, list[Candidate]] = {}
    for candidate in survey.candidates:
        if candidate.num_devices == shape.num_devices:
            groups.setdefault(candidate.technique, []).append(candidate)
    for group in groups.values():
        known = [candidate for candidate in group if candidate.step_s is not None]
        yield min(known, key=lambda candidate: candidate.step_s or 0.0) if known else group[0]
