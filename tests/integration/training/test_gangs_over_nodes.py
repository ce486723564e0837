"""A gang whose ranks are supervised by several machines: here two simulated ones, over loopback."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.gang_events import OutcomeStatus, Steps
from ringmaster.techniques.processes.ranks import interface_towards, split_address
from tests.integration.workbench import Layout, is_bit_equal, weights_in
from tests.ports import free_port

DDP = Layout("ddp", 2)


def free_address():
    return f"127.0.0.1:{free_port()}"


def shares(order, meeting):
    """Splits an order for two slots into one for each of two machines."""
    return [
        replace(order, slots=order.slots[i : i + 1], first_rank=i, num_ranks_in_all=2, meeting=meeting) for i in (0, 1)
    ]


def test_two_shares_train_to_the_weights_of_one_gang(bench, tmp_path):
    job = bench.job(num_steps=3)
    together = bench.train(job, DDP, tmp_path / "together")
    order = bench.order(job, DDP, tmp_path / "apart")
    gangs = [Gang(bench.server, share, num_ranks=1) for share in shares(order, free_address())]
    heard = [[], []]
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(gang.wait, events.append) for gang, events in zip(gangs, heard, strict=True)]
        outcomes = [wait.result(timeout=550) for wait in waits]
    assert [outcome.status for outcome in outcomes] == ["done", "done"], outcomes
    assert is_bit_equal(weights_in(tmp_path / "apart" / "model"), together.weights)
    assert [event.NAME for event in heard[0]].count("ready") == 1
    assert heard[1] == []  # rank 0's machine reports events
    assert gangs[1].log(1).exists()


def test_a_share_whose_peers_vanish_ends(bench, tmp_path):
    order = bench.order(bench.job(num_steps=1_000_000), DDP, tmp_path)
    gangs = [Gang(bench.server, share, num_ranks=1) for share in shares(order, free_address())]

    def end_the_other(event):
        if isinstance(event, Steps):
            gangs[1].kill()

    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(gangs[0].wait, end_the_other), pool.submit(gangs[1].wait, print)]
        assert [wait.result(timeout=550).status for wait in waits] == [OutcomeStatus.CRASHED, OutcomeStatus.CRASHED]


def test_the_interface_is_the_one_on_the_way():
    assert interface_towards("127.0.0.1", 1) == "lo"


def test_an_address_may_be_of_either_kind():
    assert split_address("10.0.0.1:20000") == ("10.0.0.1", 20000)
    assert split_address("[fe80::1]:20000") == ("fe80::1", 20000)
