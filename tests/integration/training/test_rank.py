"""A gang of which a rank cannot be started."""

import socket
from contextlib import closing

import pytest

from ringmaster.errors import ChannelClosed
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.gang import Gang
from tests.integration.workbench import Layout

DDP = Layout("ddp", 2)


def test_where_a_rank_cannot_be_started_those_before_it_end(bench, tmp_path):
    started = []

    class OnlyOne:
        def start_rank(self, order, *, rank, log):
            if started:
                raise OSError("no process can be started")
            ours, theirs = socket.socketpair()
            started.append(Channel(theirs))
            return Channel(ours)

    with pytest.raises(OSError, match="no process can be started"):
        Gang(OnlyOne(), bench.order(bench.job(), DDP, tmp_path), num_ranks=2)
    with closing(started[0]) as channel, pytest.raises(ChannelClosed):
        channel.receive()
