"""What a gang makes of the ends of its ranks."""

import socket
from types import SimpleNamespace

from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.gang_events import RankExited, event_to_json


def test_a_rank_that_ends_by_itself_without_a_result_has_crashed(tmp_path):
    """So ends one whose model or data calls `os._exit(0)`."""

    class Launcher:
        def start_rank(self, order, *, rank, log):
            ours, theirs = map(Channel, socket.socketpair())
            theirs.send(event_to_json(RankExited(status=0)))
            theirs.close()
            return ours

    gang = Gang(Launcher(), SimpleNamespace(folder=str(tmp_path), first_rank=0), num_ranks=1)
    outcome = gang.wait(lambda _: None)
    assert outcome.status == "crashed"
    assert outcome.message == f"rank 0 ended with status 0 while starting; its output: {tmp_path / 'rank-0.log'}"
