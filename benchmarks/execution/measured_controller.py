"""The controller of a pool, with counters: what `ringmaster pool controller` runs, and what it cost, at its end.

    python -m benchmarks.execution.measured_controller FILE

FILE is rewritten every second.
"""

import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Engine, event

from ringmaster.flows import settings
from ringmaster.flows.pool import controller as pool_controller
from ringmaster.tasks.background_worker import keep_calling
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.pool import controller as ticks

WRITE_EVERY_S = 1.0


@dataclass
class Counters:
    """What the controller has done so far.

    late_s: the longest time from a request for a tick to that tick's begin, while the executor did other things.
    threads_s: processor seconds of each thread that lives.
    """

    num_statements: int = 0
    num_ticks: int = 0
    num_plans: int = 0
    longest_tick_s: float = 0.0
    late_s: float = 0.0
    processor_s: float = 0.0
    peak_bytes: int = 0
    threads_s: dict[str, float] = field(default_factory=dict)


COUNTERS = Counters()


class Measured(pool_controller.PoolController):
    """A controller that measures its ticks and its planning."""

    def tick(self) -> None:
        """See `PoolController.tick`."""
        began_s = time.monotonic()
        super().tick()
        COUNTERS.num_ticks += 1
        COUNTERS.longest_tick_s = max(COUNTERS.longest_tick_s, time.monotonic() - began_s)

    def make_plan(self, problem: Problem) -> Plan:
        """See `PoolController.make_plan`."""
        COUNTERS.num_plans += 1
        return super().make_plan(problem)


def measured_calls(
    action: Callable[[], None], until: threading.Event, *, call: Callable[[Callable[[], None]], None], **options: Any
) -> None:
    """Has another thread call an action, as `keep_calling` does, and measures how long that thread lets it wait."""

    def timed(act: Callable[[], None]) -> None:
        asked_s = time.monotonic()

        def begin() -> None:
            COUNTERS.late_s = max(COUNTERS.late_s, time.monotonic() - asked_s)
            act()

        call(begin)

    keep_calling(action, until, call=timed, **options)


def write(file: Path, until: threading.Event) -> None:
    """Writes the counters each second."""
    process = psutil.Process()
    while not until.wait(WRITE_EVERY_S):
        times = process.cpu_times()
        COUNTERS.processor_s = times.user + times.system
        COUNTERS.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        COUNTERS.threads_s = {
            names[thread.id]: thread.user_time + thread.system_time
            for thread in process.threads()
            if thread.id in names and not names[thread.id].startswith(("replanning", "ThreadPool"))
        }
        fresh = file.with_suffix(".tmp")
        fresh.write_text(json.dumps(asdict(COUNTERS)))
        fresh.replace(file)


def main(file: str) -> None:
    """Leads the pool until SIGTERM."""

    @event.listens_for(Engine, "before_cursor_execute")
    def count(*_: object) -> None:
        COUNTERS.num_statements += 1

    pool_controller.PoolController, ticks.keep_calling = Measured, measured_calls
    over = threading.Event()
    threading.Thread(target=write, args=(Path(file), over), name="counters", daemon=True).start()
    address = settings.checked_pool()
    assert address is not None
    pool_controller.serve_pool(address, notice=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
