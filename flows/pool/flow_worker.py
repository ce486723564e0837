"""Prefect's own worker, which starts the flow runs of this machine: `python -m ringmaster.flows.pool.flow_worker`.

It is a child process of a node's process, so that nothing that happens to Prefect reaches the node's gangs. Segments
are not its work: the node agent takes them from the pool's database.
"""

import argparse
import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.workers.process import ProcessWorker

from ringmaster.compat.prefect import set_run_limit
from ringmaster.flows.file_permissions import set_umask
from ringmaster.flows.interrupts import end_with_parent
from ringmaster.flows.output import ProcessRole, log_to_stderr
from ringmaster.techniques.processes.stopped import StoppedProcesses

logger = logging.getLogger(__name__)

DEFAULT_QUEUE = "default"  # the queue of batches, sweeps and retraining runs, which any machine may run
REQUESTS_QUEUE = "requests"  # the queue of flows that take seconds, such as control-jobs: they overtake batches
MAX_SHORT_RUNS = 3  # runs at once of any other queue than DEFAULT_QUEUE, in the whole pool
LOOK_EVERY_S = 0.5
POLL_EVERY_S = 4  # interval of polling for flow runs
HEARTBEAT_S = 15  # Prefect shows a worker as offline after three missed intervals
RESTART_S = 5.0  # before the worker begins again after an error, such as an absence of Prefect's server
RUNS_END_S = 10.0  # time for flow runs to end in order
REPORTED_S = 3.0  # time for the worker to report their states
GRACE_S = 10.0  # further time for the process to end, before it is killed with its flow runs


def queue_of(node: str) -> str:
    """Returns the queue of a node in the work pool."""
    return f"node-{node}"


class FlowWorker:
    """The child process in which Prefect's worker serves queues of a work pool; it is restarted until `stop`.

    most_runs: the most flow runs of DEFAULT_QUEUE that run here at once; the others wait in order, without a process.
        A batch holds its place from its first measurement to its last record.
    """

    def __init__(self, *, name: str, work_pool: str, queues: Sequence[str], most_runs: int = 1) -> None:
        served = [argument for queue in queues for argument in ("--queue", queue)]
        self._command = [sys.executable, "-m", __name__, "--name", name, "--pool", work_pool, *served]
        self._command += ["--most-runs", str(most_runs)]
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running, name="flow-worker", daemon=True)

    def start(self) -> None:
        """Starts the process."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the process and the flow runs that it has started."""
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                self._process.terminate()
        self._thread.join(timeout=RUNS_END_S + REPORTED_S + GRACE_S)
        if self._thread.is_alive() and self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._thread.join()

    def _keep_running(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                if self._stopping.is_set():
                    return
                # A session of its own: Ctrl-C in a terminal is for the node, which lets its gangs stop first.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                    env={"PREFECT_WORKER_QUERY_SECONDS": str(POLL_EVERY_S), **os.environ},
                )
            with self._process:  # closes the pipe by which the process sees that this one lives
                status = self._wait(self._process)
            if not self._stopping.wait(RESTART_S):
                logger.warning("the process that starts flow runs has ended (exit status %d): it is restarted", status)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Returns the exit status of the process, which is killed if it stays stopped."""
        stopped = StoppedProcesses()
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=stopped.look_every_s)
            if stopped.among([process.pid]):
                process.kill()


async def serve(*, name: str, work_pool: str, queues: Sequence[str], most_runs: int, stopping: asyncio.Event) -> None:
    """Serves the queues until `stopping` is set; then ends the flow runs. Begins again after errors of Prefect."""
    is_away, ending = False, asyncio.ensure_future(_end_stopped_runs())
    while not stopping.is_set():
        serving = asyncio.ensure_future(_serve_once(name, work_pool=work_pool, queues=queues, most_runs=most_runs))
        await _first_of(serving, stopping)
        if not serving.done():
            await _end_flow_runs()
            serving.cancel()
        (result,) = await asyncio.gather(serving, return_exceptions=True)
        if isinstance(result, Exception) and not is_away:
            logger.warning("flow runs cannot be started, trying again: %s", _cause(result))
        is_away = isinstance(result, Exception)
        await _first_of(asyncio.ensure_future(asyncio.sleep(RESTART_S)), stopping)
    ending.cancel()


async def _serve_once(name: str, *, work_pool: str, queues: Sequence[str], most_runs: int) -> None:
    """Serves until an error, with queues that exist: Prefect gives no run to a worker one of whose queues does not.

    A limit of Prefect's worker counts the runs of all its queues. What batches wait for must not wait behind them:
    the measurements of other batches on this node (a batch that runs elsewhere waits for them) and the requests of
    people. DEFAULT_QUEUE therefore has a worker of its own.
    """
    async with get_client() as client:
        while True:  # `deployments` makes it, at the same time
            with suppress(ObjectNotFound):
                await client.read_work_pool(work_pool)
                break
            await asyncio.sleep(LOOK_EVERY_S)
        for queue in queues:
            limit = None if queue == DEFAULT_QUEUE else MAX_SHORT_RUNS
            try:
                await client.create_work_queue(name=queue, work_pool_name=work_pool, concurrency_limit=limit)
            except ObjectAlreadyExists:
                there = await client.read_work_queue_by_name(queue, work_pool_name=work_pool)
                if there.concurrency_limit is None and limit is not None:
                    await client.update_work_queue(there.id, concurrency_limit=limit)
    limited, others = [q for q in queues if q == DEFAULT_QUEUE], [q for q in queues if q != DEFAULT_QUEUE]
    served: list[tuple[str, list[str], int | None]] = [(name, others, None)] if others else []
    served += [(f"{name} (batches)" if others else name, limited, most_runs)] if limited else []
    survivors = psutil.Process().children()  # flow runs that a former worker here has started
    async with asyncio.TaskGroup() as group:
        for worker_name, worker_queues, most in served:
            worker = ProcessWorker(
                name=worker_name,
                work_pool_name=work_pool,
                work_queues=worker_queues,
                limit=most,
                create_pool_if_not_found=False,
                heartbeat_interval_seconds=HEARTBEAT_S,
            )
            group.create_task(worker.start(printer=logger.debug))
            if most is not None:
                group.create_task(_count_survivors(worker, survivors, most=most))


async def _count_survivors(worker: ProcessWorker, survivors: Sequence[psutil.Process], *, most: int) -> None:
    """Lowers the limit of a worker by the flow runs that it has not started itself, for as long as they run."""
    is_full = True
    while is_full:
        alive = [run for run in survivors if _is_alive(run)]
        with suppress(RuntimeError):  # it has not begun yet
            set_run_limit(worker, max(most - len(alive), 1))
            is_full = bool(alive)
        await asyncio.sleep(LOOK_EVERY_S)


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


async def _end_stopped_runs() -> None:
    """Kills the processes of flow runs that stay stopped; Prefect reports the runs as crashed, and they continue."""
    stopped = StoppedProcesses()
    while True:
        await asyncio.sleep(stopped.look_every_s)
        runs = {run.pid: run for run in psutil.Process().children()}
        for pid in stopped.among(runs):
            logger.warning("the process %d of a flow run was stopped (SIGSTOP): it is killed", pid)
            runs[pid].kill()


async def _first_of(task: asyncio.Future[Any], event: asyncio.Event) -> None:
    """Waits until a task is done or an event is set."""
    waiting: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def _end_flow_runs() -> None:
    """Ends the processes of flow runs, so that the worker reports them as crashed: another machine resumes them."""
    runs = psutil.Process().children()
    for run in runs:
        run.terminate()
    _, alive = await asyncio.to_thread(psutil.wait_procs, runs, RUNS_END_S)
    for run in alive:
        run.kill()
    if runs:
        await asyncio.sleep(REPORTED_S)


def _cause(error: BaseException) -> BaseException:
    """Returns the error itself, or the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _main(arguments: argparse.Namespace) -> None:
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # even if the parent process had them ignored
        loop.add_signal_handler(number, stopping.set)
    await serve(
        name=arguments.name,
        work_pool=arguments.pool,
        queues=arguments.queue,
        most_runs=arguments.most_runs,
        stopping=stopping,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM, or until the parent process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--pool", required=True)
    parser.add_argument("--queue", action="append", required=True)
    parser.add_argument("--most-runs", type=int, required=True)
    parsed = parser.parse_args(arguments)
    set_umask()
    log_to_stderr(ProcessRole.FLOW_WORKER)
    end_with_parent()
    asyncio.run(_main(parsed))


if __name__ == "__main__":
    main()
