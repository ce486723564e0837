"""What a page shows of a run, as one JSON value and curves, and what has changed of it, for all pages that are open."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from ringmaster.codec import finite
from ringmaster.errors import RingmasterError
from ringmaster.features.live_page.curves import CurveReader, curves_to_json
from ringmaster.features.live_page.sources import RunSource, num_models, requests_of
from ringmaster.flows.reports.watch import WatchTarget
from ringmaster.tasks.storage.fact_keys import STATUS
from ringmaster.text import message_of

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
AFRESH_EVERY_S = 60.0  # without an event: forecasts that have passed move on
SHARE = 0.02  # of a core: what is read of a large pool takes longer, and is read less often,
MAX_WAIT_S = 10.0  # but so often
MAX_BYTES_PER_S = 60_000  # after the first message
FIRST_POINTS = 40_000  # of all curves together, at first
NEW_POINTS = 2_000  # likewise, in one change
HEARTBEAT_S = 15.0
MAX_WAITING = 20  # messages of a page that reads too slowly, which then starts anew

NOTHING_YET = "no batch has a plan yet: jobs have a preflight and are measured first"

Message = tuple[str, Any]  # "state", "change" or "fault", and its data


class RunView:
    """A run as a page shows it, read anew where something has happened. Its methods block, one at a time.

    wanted: id of the run, or None for the newest one.
    clock: monotonic seconds.
    cost_s: seconds of a core that the last look took.
    """

    def __init__(self, source: RunSource, wanted: str | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._wanted, self._clock = source, wanted, clock
        self._stack = ExitStack()
        self._run: str | None = None
        self._target: WatchTarget | None = None
        self._signature: object = None
        self._read_s = 0.0
        self._base_s = 0.0
        self.state: dict[str, Any] | None = None
        self.cost_s = 0.0
        self._fault = NOTHING_YET

    def look(self) -> Message | None:
        """Returns what has changed since the last call, None if nothing has: at first, the whole state."""
        before, began_s = self._fault, time.thread_time()
        try:
            message = self._look()
        except (SQLAlchemyError, RingmasterError, OSError) as error:
            self.close()
            self._fault = f"the records cannot be read: {message_of(error)}"
            message = self.whole()
        self.cost_s = time.thread_time() - began_s
        return None if message == ("fault", before) else message

    def whole(self) -> Message:
        """Returns the whole state, for a page that has nothing yet."""
        if self.state is None:
            return "fault", self._fault
        curves = curves_to_json(self._reader.curves, base_s=self._base_s, most=FIRST_POINTS)
        return "state", {"state": self.state, "base_s": self._base_s, "curves": curves}

    def close(self) -> None:
        """Closes the run's database; `look` opens it again."""
        self._stack.close()
        self._target = self._run = self.state = None

    def _look(self) -> Message | None:
        run = self._source.newest() if self._wanted is None else self._wanted
        is_new = self._target is None or run != self._run
        if is_new:
            self.close()
            self._run = run
            if run is None:
                self._fault = NOTHING_YET
                return self.whole()
            self._target = self._stack.enter_context(self._source.opened(run))
            self._reader = CurveReader(self._target.timeline_reader.archive.database, is_pool=self._target.is_pool)
            self._signature = None
        assert self._target is not None
        archive = self._target.timeline_reader.archive
        status = None if archive.is_pool else archive.journal.get(STATUS)
        signature = archive.signature(), status, num_models(self._target)
        is_over = self.state is not None and self.state["timeline"]["is_over"]
        is_due = self._clock() - self._read_s >= AFRESH_EVERY_S and not is_over
        if signature == self._signature and not is_due:
            return None
        self._signature, self._read_s = signature, self._clock()
        before, self.state = self.state, self._read(self._target)
        batches = self.state["batches"]
        changed = self._reader.read(batches)
        if is_new:
            self._fault = ""
            self._base_s = self.state["timeline"]["zero_s"]
            return self.whole()
        patch = difference(before, self.state)
        if not changed and _is_about_the_clock_alone(patch):
            self.state = before
            return None
        each = max(4, NEW_POINTS // max(1, len(changed)))
        curves: dict[str, Any] = {}
        for (job, metric), after in changed.items():
            new = self._reader.curves[job, metric].after(after).thinned(each).to_json(base_s=self._base_s)
            curves.setdefault(metric, {})[job] = {"after": int(after), **new}
        return "change", {"patch": patch, "curves": curves}

    def _read(self, target: WatchTarget) -> dict[str, Any]:
        timeline = finite(target.read().to_json())
        is_whole_pool = target.is_pool and target.batch is None
        names = (job["name"].partition("/")[0] if is_whole_pool else target.batch or "" for job in timeline["jobs"])
        batches = list(dict.fromkeys(names))
        return {
            "timeline": timeline,
            "run": self._run,
            "runs": [{"id": run.id, "name": run.name} for run in self._source.runs()],
            "is_pool": target.is_pool,
            "is_whole_pool": is_whole_pool,
            "batches": finite(self._source.details(target, batches)),
            "requests": requests_of(target, batches, since_s=timeline["zero_s"]),
        }


def _is_about_the_clock_alone(patch: Any) -> bool:
    """Returns whether a patch of a state changes nothing but the present time."""
    if patch is None:
        return True
    items = patch[1] if patch[0] == "{" else {"": patch}
    inner = items.get("timeline", ["{", {}, []])
    return set(items) <= {"timeline"} and inner[0] == "{" and set(inner[1]) <= {"now_s"} and not inner[2]


class Feed:
    """Passes on what changes of a run to all pages that show it. Only while there are some, the run is read.

    is_over: returns whether the server is about to end.
    """

    def __init__(self, view: RunView, *, is_over: Callable[[], bool]) -> None:
        self._view, self._is_over = view, is_over
        self._lock = asyncio.Lock()
        self._pages: set[asyncio.Queue[bytes]] = set()
        self._worker: asyncio.Task[None] | None = None

    async def messages(self) -> AsyncIterator[bytes]:
        """Yields server-sent events: the whole state, what changes of it, and a comment while nothing does."""
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        silent_s = 0.0
        try:
            while not self._is_over():
                if queue not in self._pages or queue.qsize() > MAX_WAITING:
                    queue = await self._join(queue)
                if self._worker is not None and self._worker.done():
                    self._worker.result()  # it has failed: the page connects anew
                try:
                    yield await asyncio.wait_for(queue.get(), timeout=LOOK_EVERY_S)
                    silent_s = 0.0
                except TimeoutError:
                    silent_s += LOOK_EVERY_S
                    if silent_s >= HEARTBEAT_S:
                        silent_s = 0.0
                        yield b":\n\n"
            if self._worker is not None:
                await self._worker
            while not queue.empty():
                yield queue.get_nowait()
        finally:
            self._pages.discard(queue)

    async def _join(self, former: asyncio.Queue[bytes]) -> asyncio.Queue[bytes]:
        """Returns a queue that begins with the whole state; the former one gets no more messages."""
        self._pages.discard(former)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        async with self._lock:
            self._tell(await asyncio.to_thread(self._view.look))
            queue.put_nowait(_event(*await asyncio.to_thread(self._view.whole)))
            self._pages.add(queue)
            if self._worker is None or self._worker.done():
                self._worker = asyncio.create_task(self._work())
        return queue

    async def _work(self) -> None:
        """Looks at the run while pages show it, and a last time when the server is about to end."""
        is_last = False
        while not is_last:
            is_last = self._is_over()
            async with self._lock:
                if not self._pages:
                    self._view.close()
                    self._worker = None
                    return
                num_bytes = self._tell(await asyncio.to_thread(self._view.look))
            wait_s = max(LOOK_EVERY_S, min(self._view.cost_s / SHARE, MAX_WAIT_S), num_bytes / MAX_BYTES_PER_S)
            due_s = time.monotonic() + wait_s
            while not self._is_over() and (left_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(min(LOOK_EVERY_S, left_s))

    def _tell(self, message: Message | None) -> int:
        """Passes a message on to all pages; returns its size."""
        if message is None or not self._pages:
            return 0
        text = _event(*message)
        for queue in self._pages:
            queue.put_nowait(text)
        return len(text)


def _event(kind: str, data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode()


Patch = list[Any]
"""What makes one JSON value of another one. The first item says what it does:

    ["=", value]                    the value is another one
    ["{", patches, removed keys]    an object: patches of its items by key, and keys that it has lost
    ["[", from, num removed, new items, patches]
                                    a list: items are replaced by others, and then some are patched, by place
"""


def difference(before: Any, after: Any) -> Patch | None:
    """Returns the patch that makes `after` of `before`; None where they are equal."""
    if type(before) is type(after) and before == after:
        return None
    if isinstance(before, dict) and isinstance(after, dict):
        items = {key: difference(before[key], after[key]) if key in before else ["=", after[key]] for key in after}
        removed = [key for key in before if key not in after]
        return ["{", {key: patch for key, patch in items.items() if patch is not None}, removed]
    if isinstance(before, list) and isinstance(after, list):
        return _of_lists(before, after)
    return ["=", after]


def _of_lists(before: list[Any], after: list[Any]) -> Patch:
    if len(before) == len(after):
        num_same, num_removed, new = 0, 0, list[Any]()
    else:
        shorter = min(len(before), len(after))
        num_same = next((i for i in range(shorter) if before[i] != after[i]), shorter)
        last = next((i for i in range(shorter - num_same) if before[-1 - i] != after[-1 - i]), shorter - num_same)
        num_removed = len(before) - num_same - last
        new = after[num_same : len(after) - last]
    between = [*before[:num_same], *new, *before[num_same + num_removed :]]
    patches = {i: difference(one, other) for i, (one, other) in enumerate(zip(between, after, strict=True))}
    return ["[", num_same, num_removed, new, {i: patch for i, patch in patches.items() if patch is not None}]
