"""Questions about a problem: what if there were more devices, or jobs fewer, and can all jobs end by some time?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MoreDevices:
    """A node has `num_devices` more. device_type: of that node; "" where all nodes have the same type."""

    num_devices: int
    device_type: str = ""


@dataclass(frozen=True, kw_only=True)
class MoreNodes:
    """There are `num_nodes` more nodes of `num_devices` devices each."""

    num_devices: int
    device_type: str = ""
    num_nodes: int = 1


@dataclass(frozen=True, kw_only=True)
class Without:
    """The jobs are left out. Jobs that wait for them must be left out, too."""

    jobs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """All jobs are to end within `due_s` seconds from the start of the plan."""

    due_s: float


Change = MoreDevices | MoreNodes | Without
