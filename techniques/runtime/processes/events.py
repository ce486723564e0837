"""The events that a gang reports, and their JSON form, in which they are sent and stored."""

from __future__ import annotations

from enum import StrEnum


class OutcomeStatus(StrEnum):
    """How a gang, or one job of a group, ended."""

    DONE = "done"
    PREEMPTED = "preempted"  # stopped by a command, and checkpointed
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"  # a rank died, hung or raised: another try may succeed
    INVALID = "invalid"  # the user has to correct something: another try would end the same way
    LOST = "lost"  # its node is lost, or the fork server's fence ended the ranks: this machine's part was given up
    LEFT = "left"  # of one job of a group: it left the group, whose other jobs continue
