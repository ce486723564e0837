"""Which failures are tried again: those whose cause another try may change."""

import errno
import signal
from types import SimpleNamespace

import pytest
import torch.distributed
from prefect.states import exception_to_failed_state
from prefect.utilities.asyncutils import run_coro_as_sync

from ringmaster.errors import CheckpointError, LedgerError, retry_may_help
from ringmaster.techniques.processes import worker
from ringmaster.techniques.processes.failures import failure_kind, is_of_code
from ringmaster.techniques.processes.gang_events import JobReady, RankFailed, Steps, event_from_json


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (IndexError("list index out of range"), "invalid"),
        (NameError("name 'loss' is not defined"), "invalid"),
        (ZeroDivisionError("division by zero"), "invalid"),
        (AssertionError("(2, 3)"), "invalid"),
        (NotImplementedError("for this backend"), "invalid"),
        (SyntaxError("invalid syntax"), "invalid"),
        (MemoryError("1 TiB"), "out_of_memory"),
        (RuntimeError("NCCL error"), "crashed"),
        (FileNotFoundError("is it mounted?"), "crashed"),
        (ConnectionError("reset by peer"), "crashed"),
    ],
)
def test_mistakes_of_code_are_final(error, kind):
    assert failure_kind(error) == kind


class OwnError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (2)"), True),
        (OSError("bad-model does not appear to have a file named config.json"), True),
        (OwnError("no label"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("NCCL error: unhandled system error"), False),
        (RuntimeError("[enforce fail] . posix_memalign: can't allocate memory"), False),
        (torch.distributed.DistNetworkError("The client socket has failed"), False),
        (OSError("We couldn't connect to the hub"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (FileNotFoundError(errno.ENOENT, "is it mounted?"), False),
        (ConnectionResetError("reset by peer"), False),
        (CheckpointError("step 7 is damaged"), False),
        (RuntimeError("the command ended with status -9 without saying done"), False),
    ],
)
def test_errors_of_code_are_told_from_those_of_the_machine(error, expected):
    assert is_of_code(error) is expected


class OneWay:
    """A channel that keeps what is sent, and has no commands."""

    def __init__(self):
        self.events = []

    def send(self, value):
        self.events.append(event_from_json(value))


@pytest.mark.parametrize(
    ("error", "before", "rank", "kind"),
    [
        (RuntimeError("shapes"), [], 0, "invalid"),
        (RuntimeError("shapes"), [JobReady(step=0)], 0, "invalid"),
        (RuntimeError("shapes"), [JobReady(step=5)], 0, "crashed"),
        (RuntimeError("shapes"), [JobReady(step=0), Steps(first_step=0, seconds=(0.1,))], 0, "crashed"),
        (RuntimeError("shapes"), [], 1, "crashed"),
        (RuntimeError("CUDA error"), [], 0, "crashed"),
        (ConnectionError("reset"), [], 0, "crashed"),
    ],
)
def test_an_error_of_code_before_the_first_step_is_final_at_once(monkeypatch, error, before, rank, kind):
    def run(order, rank, reporter):
        for event in before:
            reporter.send(event)
        raise error

    monkeypatch.setattr(worker, "_run", run)
    monkeypatch.setattr(worker, "_exit_process", lambda status: None)
    monkeypatch.setattr(worker, "_tolerate_full_logs", lambda: None)
    monkeypatch.setattr(worker, "from_json", lambda kind, value: SimpleNamespace(import_paths=(), known_step=0))
    handler, channel = signal.getsignal(signal.SIGTERM), OneWay()
    worker.main(channel, {"rank": rank})
    signal.signal(signal.SIGTERM, handler)
    *_, failed = channel.events
    assert isinstance(failed, RankFailed)
    assert failed.kind == kind


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("rows"), False),
        (OSError("no space left"), True),
        (LedgerError("it does not answer", may_pass=True), True),
        (LedgerError("there is no such model"), False),
    ],
)
def test_tasks_are_tried_again_where_it_may_help(error, expected):
    state = run_coro_as_sync(exception_to_failed_state(error))
    assert retry_may_help(None, None, state) is expected
