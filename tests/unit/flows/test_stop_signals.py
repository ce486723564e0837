"""What signals do in the long-lived processes of a pool."""

import signal

import pytest

from ringmaster.flows.interrupts import SIGNALS, stop_signals


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_calls_all_functions_once(number):
    before, called = signal.getsignal(number), []
    with stop_signals(lambda: called.append(1)) as on_stop:
        on_stop.append(lambda: called.append(2))
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
    assert called == [1, 2]
    assert signal.getsignal(number) is before


def test_a_process_that_has_begun_nothing_just_ends():
    with pytest.raises(SystemExit) as end, stop_signals():
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 0


def test_a_second_interrupt_ends_the_process_at_once():
    called = []
    with pytest.raises(SystemExit) as end, stop_signals(lambda: called.append(1)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert (called, end.value.code) == ([1], 130)
