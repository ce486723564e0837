"""What the process that hosts an executor offers to the engine that it builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ringmaster.tasks.background_worker import in_a_thread
from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.execution.local.device_metrics import SegmentTelemetry
from ringmaster.tasks.storage.database import Database
from ringmaster.techniques.processes.gang import Outcome
from ringmaster.techniques.processes.launcher import Launcher


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """A flow run that serves a node, or is about to, and has not ended.

    id: the flow run's id.
    infrastructure: the id of what it runs on, such as "slurm:123"; empty before the work pool's worker has started it.
    is_begun: whether its process has begun.
    is_ending: whether it is being cancelled.
    """

    id: str
    infrastructure: str = ""
    is_begun: bool = False
    is_ending: bool = False


class NodeRuns(Protocol):
    """The flow runs that serve nodes, in a work pool of Prefect. Calls wait for Prefect's server.

    All methods raise ConnectionError while the server is away.
    """

    def live(self) -> Sequence[NodeRun]:
        """Returns the flow runs that have not ended."""

    def start(self) -> str:
        """Starts one more; returns its id."""

    def cancel(self, id: str) -> None:
        """Cancels a flow run; its process is ended in order."""

    def why_ended(self, id: str) -> str:
        """Returns how a flow run has ended, for people; empty if that is not known."""


Spawn = Callable[[str, Callable[[], Outcome]], "Future[Outcome]"]
"""Runs a function in the background, under a label that a person sees."""


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What an engine may use of its host: `ringmaster run` on this machine, or the executor of a pool.

    folder: where the engine may write files of its own: the folder of the run, or the home of the pool's controller.
    cluster: the devices of this machine that the run may use; empty in the executor of a pool.
    launcher: starts processes on this machine; None in the executor of a pool.
    database: the pool's database, with the leader's guarded write access; None outside of a pool.
    spawn: runs what waits for a gang.
    telemetry: adds device metrics to the events of segments on this machine; None where there is nothing to measure.
    node_runs: starts and ends the flow runs that serve nodes; None outside of a pool.
    on_failure: to be called, at most once and from any thread, when the engine can no longer do its work.
    """

    folder: Path
    cluster: Cluster = field(default_factory=lambda: Cluster(nodes=()))
    launcher: Launcher | None = None
    database: Database | None = None
    spawn: Spawn = in_a_thread
    telemetry: SegmentTelemetry | None = None
    node_runs: NodeRuns | None = None
    on_failure: Callable[[], None] = lambda: None
