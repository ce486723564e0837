"""Profiles without trials: for gangs over several nodes, and for dry runs.

A trial over several nodes would occupy several of them at once, so none is made. The predictions assume that the
network is as fast as the links within a node. Gangs over nodes are therefore offered only to jobs that no single node
can train. The speed that is measured while such a gang runs corrects the prediction within a few steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringmaster.tasks.profiling.search import ConfigSearch
from ringmaster.techniques import Profile
from ringmaster.techniques.interface.preflight import Candidate, Preflight
from ringmaster.techniques.interface.technique import GangShape

# Assumed if nothing is known of a device's speed; corrected by the first steps.
GUESSED_STEP_S = 1.0
GUESSED_STARTUP_S = 15.0
GUESSED_STARTUP_ON_A_NODE_S = 1.0  # a fork from a process that has torch imported, and a GPU's context
PREDICTED = "predicted"
"""The source of a profile that no trial has measured."""


def shapes_over_nodes(node: GangShape, *, num_nodes: int) -> tuple[GangShape, ...]:
    """Returns gangs of all devices of 2, 4, ... and all of `num_nodes` nodes; `node` is the gang of one whole node."""
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


def predicted_profiles(preflight: Preflight, *, shapes: Sequence[GangShape]) -> tuple[Profile, ...]:
    """Returns the option with the shortest predicted step of each technique and shape that can train a job."""
    return tuple(
        _profile(best, startup_s=GUESSED_STARTUP_S + (best.startup_s or 0.0), num_nodes=shape.num_nodes)
        for shape in shapes
        for best in _quickest(preflight, shape)
    )


def foretold(searches: Sequence[ConfigSearch]) -> tuple[Profile, ...]:
    """Returns the option with the shortest predicted step of each technique and gang size, as profiles without trials.

    Options that ran out of memory in an earlier trial are skipped.
    """
    firsts = (
        next((c for f, c in zip(s.fingerprints, s.candidates, strict=True) if f not in s.results), None)
        for s in searches
    )
    return tuple(
        _profile(candidate, startup_s=candidate.startup_s or GUESSED_STARTUP_ON_A_NODE_S)
        for candidate in firsts
        if candidate is not None
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
        save_s=candidate.save_s or 0.0,
        evaluate_s=candidate.evaluate_s or 0.0,
        export_s=candidate.export_s or 0.0,
        stall_s=candidate.stall_s,
        source=PREDICTED,
    )


def _quickest(preflight: Preflight, shape: GangShape) -> Iterator[Candidate]:
    groups: dict[str, list[Candidate]] = {}
    for candidate in preflight.candidates:
        if candidate.num_devices == shape.num_devices:
            groups.setdefault(candidate.technique, []).append(candidate)
    for group in groups.values():
        known = [candidate for candidate in group if candidate.step_s is not None]
        yield min(known, key=lambda candidate: candidate.step_s or 0.0) if known else group[0]
