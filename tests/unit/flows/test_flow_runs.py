"""Ends of flows: an incomplete batch is a failed or cancelled state in Prefect, and raises in the flow's caller."""

import pytest
from prefect.states import State, get_state_exception

import ringmaster
from ringmaster.errors import (
    BatchFailed,
    BatchFileError,
    InputError,
    LedgerError,
    ProblemError,
    ReleaseMismatch,
    RetrainingFailed,
    RingmasterError,
    RunInterrupted,
    SweepFailed,
    TensorStoreError,
)
from ringmaster.flows.batch.flow_runs import final_state
from ringmaster.flows.sweep import sweep_status

MESSAGE = "1 of 2 jobs are done; failed: a (its loss is NaN)"


def end(status, failure=BatchFailed):
    return final_state({"status": status}, status=status, message=MESSAGE, failure=failure)


def test_a_batch_that_is_done_is_returned():
    assert end("done") == {"status": "done"}


@pytest.mark.parametrize("failure", [BatchFailed, SweepFailed, RetrainingFailed])
def test_what_has_failed_is_a_failed_state_and_raises_with_its_result(failure):
    state = end("failed", failure)
    assert isinstance(state, State)
    assert (state.name, state.message) == ("Failed", MESSAGE)
    error = get_state_exception(state)
    assert type(error) is failure and isinstance(error, RingmasterError)
    assert (str(error), error.result) == (MESSAGE, {"status": "failed"})


def test_what_was_cancelled_is_a_cancelled_state():
    state = end("cancelled")
    assert (state.name, state.message) == ("Cancelled", MESSAGE)
    assert get_state_exception(state).result == {"status": "cancelled"}


def test_what_was_interrupted_is_cancelled_in_prefect_and_ends_a_program_that_goes_on_after_errors():
    state = end("interrupted")
    assert (state.name, state.message) == ("Cancelled", f"interrupted: {MESSAGE}")
    error = get_state_exception(state)
    assert isinstance(error, RunInterrupted) and not isinstance(error, Exception)
    assert not isinstance(error, (KeyboardInterrupt, SystemExit)), "Prefect raises it in an event loop"
    assert error.result == {"status": "interrupted"}


def test_a_sweep_fails_only_where_no_trial_has_won():
    statuses = ("done", "failed", "cancelled")
    assert [sweep_status(each, has_winner=True) for each in statuses] == ["done", "done", "cancelled"]
    assert [sweep_status(each, has_winner=False) for each in statuses] == ["failed", "failed", "cancelled"]


def test_all_that_is_raised_for_users_has_one_base():
    raised = (InputError, BatchFailed, BatchFileError, ProblemError, ReleaseMismatch, LedgerError, TensorStoreError)
    assert all(issubclass(error, RingmasterError) for error in raised)
    assert ringmaster.RingmasterError is RingmasterError and ringmaster.BatchFailed is BatchFailed
