"""The thread that computes for one base, without a server around it."""

from dataclasses import asdict
from queue import Queue
from threading import Thread

import pytest

from ringmaster.features.endpoint.compute.requests import EndpointLimits
from ringmaster.features.endpoint.server.compute_link import ComputeProcessDied, ComputeSettings
from ringmaster.features.endpoint.server.scheduler import BaseScheduler
from ringmaster.features.endpoint.server.store import EndpointStore
from tests.unit.serving.clients import LinkInProcess, process_link


def _error_of(scheduler, act):
    with pytest.raises(ComputeProcessDied) as error:
        scheduler.call(act)
    return str(error.value)


@pytest.mark.full
def test_a_process_that_ends_itself_says_why(tmp_path):
    limits = asdict(EndpointLimits(max_adapters=1, max_rank=1, seq_len=8))
    link = process_link(ComputeSettings(base="base", limits=limits, folder=tmp_path))
    link.start()
    request = {"rows": [{"tokens": [444], "inputs": {}}], "loss": "ppo", "config": {}, "with_gradients": True}
    with pytest.raises(ComputeProcessDied, match="out of memory"):
        link.call("compute", requests=[{"client": "c", **request}])
    link.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_raises_where_the_thread_has_ended(tmp_path):
    limits = asdict(EndpointLimits(max_adapters=1, max_rank=1, seq_len=8))
    link = LinkInProcess(ComputeSettings(base="base", limits=limits, folder=tmp_path / "base"))
    store = EndpointStore(tmp_path / "store.sqlite")
    scheduler = BaseScheduler("base", store=store, link=link, on_answer=print)
    scheduler.start()
    results = Queue()
    for act in (lambda link: 1 / 0, lambda link: None):  # an error that nobody expects ends the thread
        Thread(target=lambda act=act: results.put(_error_of(scheduler, act)), daemon=True).start()
        assert "has ended" in results.get(timeout=60)
    scheduler.end()
