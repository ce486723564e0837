"""A worker's heartbeat, and what it reports to its fork server."""

import queue
import threading

import pytest
from sqlalchemy.exc import OperationalError

from ringmaster.tasks.pool.node_agent import Heartbeat

TIMEOUT_S = 120.0  # the longest wait for other threads and processes


class Starting(Exception):
    sqlstate = "57P03"


@pytest.mark.parametrize(
    ("said", "num_ticks"),
    [
        (None, 1),
        (Exception("connection to server failed: Connection refused"), 0),  # a firewall may block this worker alone
        (Exception("connection to server failed: timeout expired"), 0),
        (Exception("database is locked"), 0),  # the executor may still read that this worker is silent
        (Starting("the database system is shutting down"), 0),  # but the server still serves older connections
    ],
)
def test_the_fork_server_is_told_to_go_on_only_after_a_beat_that_went_through(said, num_ticks):
    ticks, asked = [], queue.Queue()

    def beat():
        asked.put(None)
        if said is not None and asked.qsize() == 1:
            raise OperationalError("UPDATE", {}, said)
        if asked.qsize() > 1:
            stop.set()
        return asked.qsize() == 1

    stop = threading.Event()
    pulse = Heartbeat(beat=beat, tick=ticks.append, on_replaced=lambda: False, every_s=0.01)
    pulse.start()
    assert stop.wait(TIMEOUT_S)
    pulse.stop(within_s=20.0)
    assert len(ticks) == num_ticks
