"""What a sender learns where an end of its channel is closed."""

import socket

import pytest

from ringmaster.errors import ChannelClosed
from ringmaster.techniques.processes.channel import Channel


@pytest.mark.parametrize("closed", [0, 1], ids=["this end", "the other end"])
def test_a_command_to_a_process_that_ends_meanwhile_says_that_the_channel_is_closed(closed):
    """The thread that waits for a gang closes its channels, while another thread may send a command."""
    ends = [Channel(end) for end in socket.socketpair()]
    ends[0].send({"command": "measure"})
    assert ends[1].receive() == {"command": "measure"}
    ends[closed].close()
    with pytest.raises(ChannelClosed):
        ends[0].send({"command": "stop"})
    ends[1 - closed].close()
