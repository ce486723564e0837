"""A gang over the nodes of a pool: who runs which ranks, and what it has come to when all of them have ended."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from ringmaster.tasks.execution.orders import CANCELLED, LOST, SegmentCall
from ringmaster.tasks.pool.mail import Share
from ringmaster.techniques.engine.gang import CRASHED, DONE, INVALID, OUT_OF_MEMORY, PREEMPTED, Outcome

PRECEDENCE = (OUT_OF_MEMORY, INVALID, LOST, CRASHED, CANCELLED, PREEMPTED, DONE)
"""Of a gang's shares the first of these explains the others: ranks whose peers vanish crash too."""

FAILURES = (OUT_OF_MEMORY, INVALID, LOST, CRASHED)
"""After one of these the other shares cannot come to a good end."""

PORTS = range(20_000, 32_000)  # below those that Linux gives to connections


def shares_of(call: SegmentCall, *, addresses: Mapping[str, str]) -> dict[str, Share]:
    """Each node's share of a segment, the one with rank 0 first. addresses: by node, where others reach it.

    Where there are several nodes, each has the ranks of its devices, and they meet at the first one, at a port that is
    drawn: should somebody have it, the gang crashes and its next attempt meets elsewhere.
    """
    slots = list(zip(call.devices, call.order.slots, strict=True))
    nodes = list(dict.fromkeys(node for (node, _), _ in slots))
    meeting = "" if len(nodes) == 1 else f"{addresses[nodes[0]]}:{random.choice(PORTS)}"
    shares: dict[str, Share] = {}
    first_rank = 0
    for node in nodes:
        mine = tuple(slot for (name, _), slot in slots if name == node)
        num_ranks = call.num_ranks * len(mine) // len(slots)
        shares[node] = Share(
            order=replace(call.order, slots=mine),
            num_ranks=num_ranks,
            first_rank=first_rank,
            num_ranks_in_all=call.num_ranks,
            meeting=meeting,
        )
        first_rank += num_ranks
    assert first_rank == call.num_ranks, f"{call.num_ranks} ranks cannot be shared by the devices of {nodes}"
    return shares


def merged(outcomes: Mapping[str, Outcome], *, speaker: str) -> Outcome:
    """What a gang has come to, from the outcomes of its shares by node; speaker: the node of rank 0."""
    first = min(outcomes.values(), key=lambda outcome: PRECEDENCE.index(outcome.status))
    return replace(first, result=outcomes[speaker].result or first.result)
