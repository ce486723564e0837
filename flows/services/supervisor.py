"""The supervisor process, which keeps the services of a pool running.

`python -m ringmaster.flows.services.supervisor FOLDER` starts each service once the services that it needs answer. It
restarts services that end or hang, with growing delays. On SIGTERM it ends them in the reverse order. If the supervisor
dies, the services continue, and the next supervisor takes them over.
"""

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringmaster.flows.interrupts import stop_signals
from ringmaster.flows.output import ProcessRole, log_to_stderr
from ringmaster.flows.services.pool_processes import ServiceState, ServiceStatus
from ringmaster.flows.services.server_answers import answers, responds
from ringmaster.flows.services.service_files import ServiceFiles, reap
from ringmaster.tasks.pool.engines import Service
from ringmaster.tasks.process_identity import READY_FILE, ProcessId
from ringmaster.techniques.processes.stopped import StoppedProcesses

logger = logging.getLogger("ringmaster.flows.services.supervisor")  # this module is run as __main__

LOOK_EVERY_S = 0.25  # interval of the checks of starting services
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
LASTED_S = 60.0  # a service that was up for so long starts again with the first delay
CHECK_EVERY_S = 15.0  # interval of the checks of servers that are up
HUNG_S = 90.0  # without an answer, after which a server that was up is hung, and not only busy
MIN_CHECKS = 4  # without an answer in that time


@dataclass
class ServiceProcess:
    """A service, and the process that provides it now.

    service: the service.
    status: its status, as in ServiceState.
    process: its process; None where none runs.
    descriptor: pidfd of the process.
    since_s: time of the last change of status.
    due_s: earliest time of the next start.
    num_failures: number of failures in a row.
    num_restarts: number of all restarts.
    answered_s: time of the last answer of a server.
    checked_s: time of the last check.
    num_silent: number of checks without an answer since the last one.
    message: reason of the last failure, or what the service still lacks.
    """

    service: Service
    status: str = ServiceStatus.WAITING
    process: ProcessId | None = None
    descriptor: int | None = None
    since_s: float = 0.0
    due_s: float = 0.0
    num_failures: int = 0
    num_restarts: int = 0
    answered_s: float = 0.0
    checked_s: float = 0.0
    num_silent: int = 0
    message: str = ""

    def state(self) -> ServiceState:
        """Returns the state of the service, for other processes."""
        return ServiceState(
            name=self.service.name,
            status=self.status,
            pid=self.process.pid if self.process else None,
            born=self.process.born if self.process else "",
            num_restarts=self.num_restarts,
            message=self.message,
        )


def delay_s(num_failures: int) -> float:
    """Returns the seconds until an ended service is restarted, after `num_failures` earlier failures in a row."""
    return float(min(FIRST_DELAY_S * 2 ** min(num_failures, 10), LONGEST_DELAY_S))


class Supervisor:
    """Supervises the services of the pool in `files`.

    services: the services, in the order in which they start.
    files: the files of the services, which hold their states and logs.
    is_up: returns whether a server that starts is up, by its answer at a URL.
    responds: returns whether a server that was up answers at all.
    clock: monotonic seconds.
    stopped: detects processes that are stopped.
    """

    def __init__(
        self,
        services: Sequence[Service],
        files: ServiceFiles,
        *,
        is_up: Callable[[str], bool] = answers,
        responds: Callable[[str], bool] = responds,
        clock: Callable[[], float] = time.monotonic,
        stopped: StoppedProcesses | None = None,
    ) -> None:
        self._files, self._is_up, self._responds, self._clock = files, is_up, responds, clock
        self._stopped = stopped or StoppedProcesses(clock=clock)
        self._children = {service.name: ServiceProcess(service) for service in services}
        self._selector = selectors.DefaultSelector()
        self._written_states: list[ServiceState] = []
        self._ending = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        for state in files.states():
            self._adopt(state)

    def stop(self) -> None:
        """Makes `run` end the services and return; a signal handler may call it."""
        self._ending = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"x")

    def run(self) -> None:
        """Keeps the services running until `stop` is called."""
        while not self._ending:
            self.step()
            for key, _ in self._selector.select(self._wait_s()):
                if key.data is not None:
                    self._ended(key.data)
        self._end_all()

    def step(self) -> None:
        """Starts the services that are due, and checks whether started ones are up."""
        for child in self._children.values():
            needed = [self._children[name] for name in child.service.after]
            is_due = child.status == ServiceStatus.WAITING and self._clock() >= child.due_s
            if is_due and all(each.status in (ServiceStatus.UP, ServiceStatus.DONE) for each in needed):
                self._start(child)
            if child.status == ServiceStatus.STARTING and not child.service.once:
                self._look_at(child)
            if child.status == ServiceStatus.UP and child.service.ready_url is not None:
                self._check(child, child.service.ready_url)
        if self._stopped.is_due():
            self._end_stopped()
        self._write_states()

    def _check(self, child: ServiceProcess, url: str) -> None:
        """Kills a server that has not answered for HUNG_S; its end has it started again."""
        now_s = self._clock()
        if now_s - child.checked_s < CHECK_EVERY_S:
            return
        child.checked_s = now_s
        if self._responds(url):
            child.answered_s, child.num_silent = now_s, 0
            return
        child.num_silent += 1
        # The number of checks counts, too: no time may pass for a server while this process itself was stopped.
        if now_s - child.answered_s >= HUNG_S and child.num_silent >= MIN_CHECKS and child.process is not None:
            child.message = f"hung: no answer from {url} for {now_s - child.answered_s:.0f} s"
            child.process.signal(signal.SIGKILL, group=child.service.group)

    def _end_stopped(self) -> None:
        """Kills the services that stay stopped; their ends have them started again."""
        living = {child.process.pid: child for child in self._children.values() if child.process is not None}
        for pid in self._stopped.among(living):
            child = living[pid]
            assert child.process is not None, "it is among the living"
            child.message = f"hung: it was stopped (SIGSTOP) for {self._stopped.after_s:.0f} s"
            child.process.signal(signal.SIGKILL, group=child.service.group)

    def _start(self, child: ServiceProcess) -> None:
        service = child.service
        ready = str(self._files.ready(service.name)) if service.says_ready else None
        named = {**os.environ, READY_FILE: ready, **service.environment}
        environment = {name: value for name, value in named.items() if value is not None}
        try:
            with self._files.log(service.name).open("ab") as log:
                process = subprocess.Popen(
                    service.command,
                    env=environment,
                    cwd=self._files.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:  # a full disk, or no memory for another process: such errors pass
            self._try_later(child, f"could not be started: {error}")
            return
        process.returncode = 0  # we reap our children ourselves; Popen must not do so when it is collected
        self._watch(child, ProcessId.of(process.pid) or ProcessId(process.pid, ""), os.pidfd_open(process.pid))

    def _watch(self, child: ServiceProcess, process: ProcessId, descriptor: int) -> None:
        child.process, child.descriptor = process, descriptor
        child.status, child.since_s, child.message = ServiceStatus.STARTING, self._clock(), ""
        self._selector.register(descriptor, selectors.EVENT_READ, child)

    def _adopt(self, state: ServiceState) -> None:
        """Takes over a service that a dead supervisor has left running."""
        child, process = self._children.get(state.name), state.process
        descriptor = process.open() if process is not None else None
        if child is None:
            return
        if process is not None and descriptor is not None:
            self._watch(child, process, descriptor)
            child.num_restarts = state.num_restarts
        elif state.status == ServiceStatus.DONE:
            child.status = ServiceStatus.DONE

    def _look_at(self, child: ServiceProcess) -> None:
        if self._is_ready(child):
            child.status, child.since_s, child.message = ServiceStatus.UP, self._clock(), ""
            child.answered_s, child.checked_s, child.num_silent = child.since_s, child.since_s, 0
            logger.info("%s is up", child.service.name)
        elif child.service.says_ready:
            child.message = "it does not lead or serve yet"
        elif self._clock() - child.since_s > child.service.timeout_s and child.process is not None:
            child.message = f"no answer from {child.service.ready_url} after {child.service.timeout_s:.0f} s"
            child.process.signal(signal.SIGKILL, group=child.service.group)

    def _is_ready(self, child: ServiceProcess) -> bool:
        if child.service.says_ready:
            return child.process is not None and self._files.is_ready(child.service.name, child.process)
        return child.service.ready_url is None or self._is_up(child.service.ready_url)

    def _ended(self, child: ServiceProcess) -> None:
        """Schedules the restart of a service whose process has ended, with growing delays."""
        code = self._let_go(child)
        now_s = self._clock()
        if child.service.once and code == 0:
            child.status, child.since_s = ServiceStatus.DONE, now_s
            return
        if child.status == ServiceStatus.UP and now_s - child.since_s >= LASTED_S:
            child.num_failures = 0
        self._try_later(child, child.message or f"ended with {code}")

    def _try_later(self, child: ServiceProcess, message: str) -> None:
        now_s = self._clock()
        child.message = message
        child.status, child.since_s, child.due_s = ServiceStatus.WAITING, now_s, now_s + delay_s(child.num_failures)
        logger.warning("%s: %s; starting it in %.0f s", child.service.name, message, delay_s(child.num_failures))
        child.num_failures += 1
        child.num_restarts += 1

    def _let_go(self, child: ServiceProcess) -> int | None:
        assert child.process is not None and child.descriptor is not None
        self._selector.unregister(child.descriptor)
        os.close(child.descriptor)
        code = reap(child.process.pid, group=child.service.group)
        child.process = child.descriptor = None
        return code

    def _wait_s(self) -> float:
        """Returns how long to wait for an event."""
        statuses = {child.status for child in self._children.values()}
        if ServiceStatus.STARTING in statuses:
            return LOOK_EVERY_S
        waits = [c.due_s - self._clock() for c in self._children.values() if c.status == ServiceStatus.WAITING]
        return max(min([*waits, self._stopped.look_every_s, CHECK_EVERY_S]), LOOK_EVERY_S)

    def _end_all(self) -> None:
        for child in reversed(self._children.values()):
            if child.process is not None:
                child.status = ServiceStatus.ENDING
                self._write_states()
                in_order = child.process.end(grace_s=child.service.grace_s, group=child.service.group)
                child.message = (
                    "" if in_order else f"killed: it had not ended {child.service.grace_s:.0f} s after SIGTERM"
                )
                self._let_go(child)
            child.status = ServiceStatus.ENDED
        self._write_states()

    def _write_states(self) -> None:
        states = [child.state() for child in self._children.values()]
        if states != self._written_states:
            try:
                self._files.write_states(states)
            except OSError as error:  # the services matter more; the next step writes the states again
                logger.warning("the states of the services cannot be written: %s", error)
                return
            self._written_states = states


def main(folder: Path) -> int:
    """Supervises the pool of `folder` until SIGTERM; returns 1 where another process does so already."""
    log_to_stderr(ProcessRole.SUPERVISOR)
    files = ServiceFiles(folder)
    with files.alone() as alone:
        if not alone:
            logger.error("another supervisor keeps the services of %s running", folder)
            return 1
        if (me := ProcessId.of(os.getpid())) is not None:
            files.write_supervisor(me)
        supervisor = Supervisor(files.services(), files)
        # Also as the children would inherit dispositions that ignore a signal.
        with stop_signals(supervisor.stop):
            supervisor.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
