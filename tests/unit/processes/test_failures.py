"""Which failures are tried again: those whose cause another try may change."""

import pytest
from prefect.states import exception_to_failed_state
from prefect.utilities.asyncutils import run_coro_as_sync

from ringmaster.errors import LedgerError, retry_may_help
from ringmaster.techniques.processes.worker import failure_kind


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
