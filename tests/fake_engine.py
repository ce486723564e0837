"""A fake engine: nodes that end, leave and get lost, and gangs that take steps, all on a clock of its own."""

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from ringmaster.tasks.cluster import Device
from ringmaster.tasks.execution.engine import EngineNode
from ringmaster.techniques.processes.gang_events import JobReady, JobResult, Outcome, OutcomeStatus, Steps
from ringmaster.techniques.processes.reporter import STOP, UNTIL


def cpu_devices(number):
    return tuple(Device(kind="cpu", index=i, name="cpu", memory_bytes=1 << 30, cores=(i,)) for i in range(number))


@dataclass
class FakeGang:
    """One running gang: `chunk` steps started at `since_s`, and an event reports them when the last one ends."""

    call: Any
    future: Future
    step_s: float
    first_step: int
    step: int
    last_step: int
    since_s: float
    chunk: int = 0
    load: float = 1.0
    stops: bool = False

    @property
    def next_s(self):
        return self.since_s + self.chunk * self.step_s * self.load

    @property
    def nodes(self):
        return {node for node, _ in self.call.devices}


@dataclass
class FakeEngine:
    """Engine, inbox and clock of one executor. While the executor waits, the clock advances to the next event.

    step_s: true seconds of a step by (job, technique, number of devices). startup_s: startup time of each gang. Gangs
    report progress every `report_s`, and end when they have done their steps, or when a test calls `end`. A test may
    also let the time pass by `advance`, where the executor has another inbox.

    epoch_s: seconds since the epoch at second 0 of the clock.
    load: how many times as long as alone steps and startups take that begin at a time of the clock.
    measured_load: the load that gangs report, by the true one.
    """

    step_s: dict = field(default_factory=dict)
    startup_s: float = 0.0
    report_s: float = 5.0
    load: Callable = lambda now_s: 1.0
    measured_load: Callable = lambda load: load
    now_s: float = 0.0
    steps: dict = field(default_factory=dict)  # checkpointed step of each job
    heard: list = field(default_factory=list)  # (segment, command)
    epoch_s: float = 0.0

    def __post_init__(self):
        self.gangs, self.messages, self.moments = {}, deque(), []
        self.calls = []
        self.there, self.ends_s, self.num_incarnations = {}, {}, 0
        self.lost = {}  # by node that is lost, whether it is fenced; until the executor looks at the nodes
        self.unfenced = {}  # by node, the devices on which ranks may still run
        self.asked, self.released = 0, []

    def clock(self):
        return self.now_s

    # -- nodes -------------------------------------------------------------------------------------------------------

    def add(self, name, num_devices=1, *, ends_s=math.inf, is_announced=True, is_lent=False, faults=None):
        """Adds a node, or another incarnation of it. It is gone, and fenced, once the clock reaches `ends_s`.

        is_announced: whether the engine knows when the node ends. is_lent: whether it is given back by `release`.
        """
        self.num_incarnations += 1
        self.ends_s[name] = ends_s
        self.there[name] = EngineNode(
            name=name,
            devices=cpu_devices(num_devices),
            incarnation=str(self.num_incarnations),
            until_s=self.epoch_s + ends_s if is_announced and ends_s < math.inf else None,
            is_lent=is_lent,
            faults=faults or {},
        )

    def leave(self, name):
        """Lets a node announce that it leaves."""
        self.there[name] = replace(self.there[name], is_leaving=True)

    def lose(self, name, *, is_fenced=True):
        """Loses a node with all that runs there."""
        del self.there[name]
        self.lost[name] = is_fenced

    def fence(self, name):
        """Ends what survives on a node that was lost."""
        del self.unfenced[name]

    def nodes(self):
        for name, is_fenced in self.lost.items():
            gangs = [gang for gang in self.gangs.values() if name in gang.nodes]
            if not is_fenced:
                self.unfenced[name] = {device for gang in gangs for device in gang.call.devices if device[0] == name}
            for gang in gangs:
                self.end(gang, OutcomeStatus.LOST, f"node {name} is lost")
        self.lost = {}
        return list(self.there.values())

    def request(self, num_nodes):
        self.asked = num_nodes

    def release(self, node):
        if self.there.pop(node, None) is not None:
            assert not any(node in gang.nodes for gang in self.gangs.values()), f"{node} is given back while in use"
            self.released.append(node)

    def catch_up(self):
        """Does nothing: events are passed on as they come."""

    def is_fenced(self, node):
        return node not in self.unfenced

    # -- gangs -------------------------------------------------------------------------------------------------------

    def start(self, call):
        busy = {device for gang in self.gangs.values() for device in gang.call.devices}
        assert busy.isdisjoint(call.devices), f"{call.devices} of {call.job} serve another gang"
        survivors = set().union(*self.unfenced.values())
        assert survivors.isdisjoint(call.devices), f"{call.devices} of {call.job} are not fenced"
        self.calls.append(call)
        order, future = call.order, Future()
        job, first = order.job.name, self.steps.get(order.job.name, 0)
        step_s = self.step_s[job, order.technique, len(order.slots)]
        startup_s = self.startup_s * self.load(self.now_s)
        gang = FakeGang(call, future, step_s, first, first, order.last_step, self.now_s + startup_s)
        self.gangs[call.number] = gang
        self._begin_chunk(gang)
        call.on_event(JobReady(step=first, startup_s=startup_s))
        return future

    def adopt(self, number, *, on_event):
        """Takes over a gang of the same engine under another executor. Its former events are not repeated."""
        if number not in self.gangs:
            future = Future()
            future.set_result(Outcome(status=OutcomeStatus.LOST))
            return future
        gang = self.gangs[number]
        gang.call, gang.future = replace(gang.call, on_event=on_event), Future()
        return gang.future

    def send(self, number, command):
        self.heard.append((number, command))
        gang = self.gangs.get(number)
        if gang is None:
            return
        if command == STOP:
            gang.stops = True
            gang.chunk = min(gang.chunk, max(0, math.ceil((self.now_s - gang.since_s) / (gang.step_s * gang.load))))
        else:
            gang.last_step = max(gang.last_step, int(command.removeprefix(UNTIL)))

    def close(self):
        """Ends nothing: gangs continue for the next executor."""

    def gang(self, job):
        """The gang that trains a job now."""
        return next(gang for gang in self.gangs.values() if gang.call.order.job.name == job)

    def end(self, gang, status, message="", **result):
        """Ends a gang. The job continues from what it has checkpointed."""
        del self.gangs[gang.call.number]
        gang.future.set_result(Outcome(status=status, message=message, result=JobResult(**result)))

    # -- inbox and clock ---------------------------------------------------------------------------------------------

    def at(self, moment_s, action):
        """Runs an action on the executor's thread at some time."""
        self.moments.append((moment_s, action))

    def put(self, message):
        self.messages.append(message)

    def empty(self):
        """Returns whether a message has to be waited for."""
        return not self.messages

    def get(self, timeout=None):
        if (due := next((m for m in self.moments if m[0] <= self.now_s), None)) is not None:
            self.moments.remove(due)
            return 0, due[1]
        until_s = min([moment_s for moment_s, _ in self.moments], default=math.inf)
        until_s = min(until_s, math.inf if timeout is None else self.now_s + timeout)
        while not self.messages:
            if not self._go_on_until(until_s):
                self.messages.append((0, None))
        return self.messages.popleft()

    def advance(self, until_s):
        """Lets all happen that happens until then, without an inbox."""
        while self._go_on_until(until_s):
            pass

    def _go_on_until(self, until_s):
        """Lets the next event happen, and returns True; or the time pass, where there is none until then."""
        alive = [gang for gang in self.gangs.values() if self.lost.keys().isdisjoint(gang.nodes)]
        gang = min(alive, key=lambda g: g.next_s, default=None)
        node, ends_s = min(self.ends_s.items(), key=lambda each: each[1], default=("", math.inf))
        if ends_s <= until_s and (gang is None or ends_s < gang.next_s):
            self.now_s, self.ends_s[node] = max(self.now_s, ends_s), math.inf
            if node in self.there:
                self.lose(node)
        elif gang is None or gang.next_s > until_s:
            assert until_s < math.inf, "it waits for what never comes"
            self.now_s = max(self.now_s, until_s)
            return False
        else:
            self.now_s = max(self.now_s, gang.next_s)
            self._go_on(gang)
        return True

    def _begin_chunk(self, gang):
        gang.load = self.load(gang.since_s)
        step_s = gang.step_s * gang.load
        gang.chunk = min(max(1, round(self.report_s / step_s)), gang.last_step - gang.step)

    def _go_on(self, gang):
        if gang.chunk:
            seconds, load = (gang.step_s * gang.load,) * gang.chunk, self.measured_load(gang.load)
            gang.call.on_event(Steps(first_step=gang.step, seconds=seconds, load=load))
        gang.step, gang.since_s = gang.step + gang.chunk, gang.next_s
        if gang.step < gang.last_step and not gang.stops:
            self._begin_chunk(gang)
            return
        order = gang.call.order
        self.steps[order.job.name] = gang.step
        result = {"first_step": gang.first_step, "step": gang.step}
        if gang.step == order.job.total_steps:
            result["metrics"] = {"loss": 1.0}
        self.end(gang, "done" if gang.step >= gang.last_step else "preempted", **result)
