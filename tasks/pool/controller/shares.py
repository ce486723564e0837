"""Shares of gangs over the nodes of a pool: the ranks that each node runs, and the merged outcome of a gang."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from ringmaster.tasks.execution.engine import SegmentCall
from ringmaster.tasks.storage.message_store import Share
from ringmaster.techniques.processes.events import OutcomeStatus
from ringmaster.techniques.processes.gang import Outcome

PRECEDENCE = (
    OutcomeStatus.OUT_OF_MEMORY,
    OutcomeStatus.INVALID,
    OutcomeStatus.LOST,
    OutcomeStatus.CRASHED,
    OutcomeStatus.PREEMPTED,
    OutcomeStatus.DONE,
)
"""The first of these outcomes among a gang's shares explains the others: ranks whose peers vanish crash too."""

FAILURES = (OutcomeStatus.OUT_OF_MEMORY, OutcomeStatus.INVALID, OutcomeStatus.LOST, OutcomeStatus.CRASHED)
"""The outcomes after which the other shares of a gang cannot succeed."""

PORTS = range(20_000, 32_000)  # below the ports that Linux assigns to connections


def shares_of(call: SegmentCall, *, addresses: Mapping[str, str]) -> dict[str, Share]:
    """Returns each node's share of a segment, by node; the share with rank 0 comes first.

    On several nodes, each node has the ranks of its devices. The ranks meet at the first node, at a random port. If
    another process uses that port, the gang crashes, and its next attempt uses another port.

    addresses: by node, the address at which other nodes reach it.
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
    """Returns the outcome of a gang from the outcomes of its shares, by node. speaker: the node of rank 0."""
    first = min(outcomes.values(), key=lambda outcome: PRECEDENCE.index(outcome.status))
    return replace(first, result=outcomes[speaker].result or first.result)
