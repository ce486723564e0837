"""Fake gangs on a simulated clock: a test sets the seconds of each step, and the gangs record the commands they get."""

import math
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ringmaster.tasks.execution.replanning.replanner import Replanner
from ringmaster.tasks.planning import ProblemError
from ringmaster.techniques.runtime.processes.events import Ready, Steps
from ringmaster.techniques.runtime.processes.gang import Outcome
from ringmaster.techniques.runtime.processes.reporter import STOP, UNTIL
from tests.unit.execution.fakes import Bench


@dataclass
class _Gang:
    """One running gang: `chunk` steps started at `since_s`, and an event reports them when the last one ends."""

    call: Any
    future: Future
    step_s: float
    first_step: int
    step: int
    last_step: int
    since_s: float
    chunk: int = 0
    stops: bool = False

    @property
    def next_s(self):
        return self.since_s + self.chunk * self.step_s


@dataclass
class ClockedGangs:
    """Runner, inbox and clock of one executor. While the executor waits, the clock advances to the next event.

    step_s: true seconds of a step by (job, technique, number of devices). startup_s: startup time of each gang. Gangs
    report progress every `report_s`.
    """

    step_s: dict
    startup_s: float = 0.0
    report_s: float = 5.0
    now_s: float = 0.0
    steps: dict = field(default_factory=dict)  # checkpointed step of each job
    heard: list = field(default_factory=list)  # (segment, command)

    def __post_init__(self):
        self.gangs, self.messages = {}, deque()

    def clock(self):
        return self.now_s

    def start(self, call):
        order, future = call.order, Future()
        job, first = order.job.name, self.steps.get(order.job.name, 0)
        step_s = self.step_s[job, order.technique, len(order.slots)]
        gang = _Gang(call, future, step_s, first, first, order.last_step, self.now_s + self.startup_s)
        self.gangs[call.number] = gang
        self._begin_chunk(gang)
        call.on_event(Ready(step=first, startup_s=self.startup_s))
        return future

    def send(self, number, command):
        self.heard.append((number, command))
        gang = self.gangs.get(number)
        if gang is None:
            return
        if command == STOP:
            gang.stops = True
            gang.chunk = min(gang.chunk, max(0, math.ceil((self.now_s - gang.since_s) / gang.step_s)))
        else:
            gang.last_step = max(gang.last_step, int(command.removeprefix(UNTIL)))

    def put(self, message):
        self.messages.append(message)

    def get(self, timeout=None):
        until_s = float("inf") if timeout is None else self.now_s + timeout
        while not self.messages:
            gang = min(self.gangs.values(), key=lambda g: g.next_s, default=None)
            if gang is None or gang.next_s > until_s:
                assert until_s < float("inf"), "it waits for what never comes"
                self.now_s = max(self.now_s, until_s)
                self.messages.append((0, None))
            else:
                self.now_s = max(self.now_s, gang.next_s)
                self._go_on(gang)
        return self.messages.popleft()

    def _begin_chunk(self, gang):
        gang.chunk = min(max(1, round(self.report_s / gang.step_s)), gang.last_step - gang.step)

    def _go_on(self, gang):
        if gang.chunk:
            gang.call.on_event(Steps(first_step=gang.step, seconds=tuple([gang.step_s] * gang.chunk)))
        gang.step, gang.since_s = gang.step + gang.chunk, gang.next_s
        if gang.step < gang.last_step and not gang.stops:
            self._begin_chunk(gang)
            return
        order = gang.call.order
        del self.gangs[gang.call.number]
        self.steps[order.job.name] = gang.step
        status = "done" if gang.step >= gang.last_step else "preempted"
        result = {"first_step": gang.first_step, "step": gang.step}
        if gang.step == order.job.total_steps:
            result["metrics"] = {"loss": 1.0}
        gang.future.set_result(Outcome(status=status, result=result))


def at_once(think):
    """Computes a plan in the foreground: the returned future is already done."""
    future = Future()
    try:
        future.set_result(think())
    except ProblemError as error:
        future.set_exception(error)
    return future


def clocked_bench(folder, jobs, gangs, *, make_plan, policy, kind=Bench, **options):
    """A batch whose executor re-plans as it measures step times, on the clock of `gangs`."""
    bench = kind(folder, jobs, runner=gangs, make_plan=make_plan, **options)
    bench.executor._plan_manager.replanner = Replanner(
        name="batch",
        make_plan=bench.plan,
        policy=policy,
        clock=gangs.clock,
        background=at_once,
    )
    bench.executor._inbox = gangs
    return bench
