"""Alarms in a real Prefect server: an event fires its automation, which calls a webhook of this test."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

pytest.importorskip("prefect")

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from ringmaster.errors import InputError
from ringmaster.flows.deployments import SUBJECTS, make_alarms
from ringmaster.tasks.alarms import PROMOTION_REFUSED, batch_failed, promotion_refused
from ringmaster.tasks.alarms.prefect_events import emit_alarm
from tests.cluster.waiting import until
from tests.integration.training.test_worker import PrefectServer

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = PrefectServer(tmp_path_factory.mktemp("prefect"))
    server.start()
    with temporary_settings({PREFECT_API_URL: server.api}):
        yield server
    server.stop()


@pytest.fixture
def webhook():
    """A local webhook server: its address, and the bodies that were posted to it."""
    posted, arrived = [], threading.Event()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            arrived.set()

        def log_message(self, *_):
            """Silences the log."""

    hook = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{hook.server_port}/hook", posted, arrived
    hook.shutdown()
    hook.server_close()


def automations(client):
    return {name: client.read_automations_by_name(name) for name in SUBJECTS}


def test_an_event_calls_the_webhook(server, webhook):
    url, posted, arrived = webhook
    with get_client(sync_client=True) as client:
        make_alarms(client, url)
        assert {name: len(found) for name, found in automations(client).items()} == dict.fromkeys(SUBJECTS, 1)
    told = (
        batch_failed("nightly", message="1 of 2 jobs are done; failed: a (its loss is NaN)"),
        promotion_refused("production.digits", version=3, why="worse by 0.2"),
    )
    messages = ("batch nightly", "production.digits")
    while not all(any(message in each["message"] for each in posted) for message in messages):
        for each in told:  # repeated: the server's triggers learn of a new automation after a delay
            emit_alarm(each)
        arrived.wait(10)
        arrived.clear()
    first, last = (next(each for each in posted if message in each["message"]) for message in messages)
    assert first["subject"] == "Ringmaster: A batch has failed"
    assert first["message"] == "batch nightly: 1 of 2 jobs are done; failed: a (its loss is NaN)"
    assert first["text"] == f"{first['subject']}: {first['message']}"
    assert last["subject"] == "Ringmaster: A model is not promoted"
    assert last["message"] == "production.digits version 3 is not promoted: worse by 0.2"


SOUND = """
from ringmaster.flows.commands.models import emit_pool_alarm
from ringmaster.tasks.alarms import promotion_refused
emit_pool_alarm(promotion_refused("production.digits", version=4, why="worse by 0.3", who="policy careful"))
raise SystemExit(1)
"""


def test_a_promotion_that_is_refused_to_a_command_is_told_before_it_ends(server, tmp_path):
    """The process ends at once, while a background thread of Prefect has yet to send the event."""
    pool = {
        "RINGMASTER_DATABASE": f"sqlite:///{tmp_path}/pool.db",
        "PREFECT_API_URL": server.api,
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "RINGMASTER_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SOUND], env={**os.environ, **pool}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    body = {"filter": {"event": {"name": [PROMOTION_REFUSED]}}}

    def poll():  # the server stores received events after a delay
        events = httpx.post(f"{server.api}/events/filter", json=body, timeout=60).json()["events"]
        return next((each["payload"] for each in events if each["payload"].get("version") == 4), None)

    assert until("the event is there", poll)["message"] == "production.digits version 4 is not promoted: worse by 0.3"


def test_made_again_they_are_the_same_ones(server, webhook):
    url, *_ = webhook
    with get_client(sync_client=True) as client:
        make_alarms(client, url)
        before = {name: found[0].id for name, found in automations(client).items()}
        make_alarms(client, url)
        make_alarms(client)
        after = automations(client)
    assert {name: [each.id for each in found] for name, found in after.items()} == {k: [v] for k, v in before.items()}
    kinds = {action.type for found in after.values() for action in found[0].actions}
    assert kinds == {"send-notification"}, "without a setting, what stands there stays"


@pytest.mark.parametrize(
    ("said", "message"),
    [("somewhere", "is neither an address nor a block"), ("slack-webhook/none", "has no block 'slack-webhook/none'")],
)
def test_where_nothing_can_be_sent_is_told(server, said, message):
    with get_client(sync_client=True) as client, pytest.raises(InputError, match=message):
        make_alarms(client, said)
