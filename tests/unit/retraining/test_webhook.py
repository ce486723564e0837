"""Posting of a report to a local server: answers, retries, and faults that do not fail the retraining run."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ringmaster.tasks.retraining.report import address_of, post

REDIRECTS = (301, 302, 303, 307, 308)


class Receiver:
    """A server that answers requests with `statuses` in order and repeats the last. 0 hangs up without an answer."""

    def __init__(self, *statuses):
        self.statuses, self.got, self.gets = list(statuses), [], 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((json.loads(body), dict(self.headers)))
                status = receiver.statuses.pop(0) if len(receiver.statuses) > 1 else receiver.statuses[0]
                if status:
                    self.send_response(status)
                    if status in REDIRECTS:
                        self.send_header("Location", receiver.url)
                    self.end_headers()

            def do_GET(self):
                receiver.gets += 1
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook/secret"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def posted(receiver, waits):
    return post(receiver.url, {"text": "2 of 3"}, key="shop 2026-11-20", waits_s=(1.0, 5.0), wait=waits.append)


def test_a_report_is_posted_as_json_with_a_key():
    waits = []
    with Receiver(204) as receiver:
        assert posted(receiver, waits) == ""
    ((content, headers),) = receiver.got
    assert content == {"text": "2 of 3"}
    assert headers["Content-Type"] == "application/json"
    assert headers["Idempotency-Key"] == "shop 2026-11-20"
    assert waits == []


@pytest.mark.parametrize("first", [503, 500, 429, 0])
def test_what_may_pass_is_tried_again(first):
    waits = []
    with Receiver(first, 200) as receiver:
        assert posted(receiver, waits) == ""
    assert len(receiver.got) == 2
    assert waits == [1.0]


@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_does_not_pass_is_told_at_once(status):
    waits = []
    with Receiver(status) as receiver:
        assert f"the webhook answers {status}" in posted(receiver, waits)
    assert len(receiver.got) == 1
    assert waits == []


@pytest.mark.parametrize("status", REDIRECTS)
def test_an_address_that_sends_elsewhere_has_not_taken_the_report(status):
    waits = []
    with Receiver(status) as receiver:
        assert f"the webhook answers {status}" in posted(receiver, waits)
    assert (len(receiver.got), receiver.gets, waits) == (1, 0, [])


def test_a_server_that_goes_on_failing_is_given_up():
    waits = []
    with Receiver(503) as receiver:
        said = posted(receiver, waits)
    assert said == "the webhook answers 503 Service Unavailable, 3 times"
    assert waits == [1.0, 5.0]


def test_a_server_that_is_not_there_raises_nothing_and_the_secret_is_not_told():
    waits = []
    with Receiver(200) as receiver:
        pass
    said = posted(receiver, waits)
    assert "cannot be reached" in said
    assert "secret" not in said
    assert len(waits) == 2


def test_an_address_may_be_in_the_environment():
    assert address_of("https://x.example/y") == "https://x.example/y"
    assert address_of("$HOOK", {"HOOK": "http://x"}) == "http://x"
    with pytest.raises(ValueError, match="the environment has no HOOK"):
        address_of("$HOOK", {})
    with pytest.raises(ValueError, match="http or https"):
        address_of("ftp://x")
    with pytest.raises(ValueError, match="http or https"):
        address_of("$HOOK", {"HOOK": "file:///etc/passwd"})
    assert address_of("$HOOK", {"HOOK": "http://x/y\n"}) == "http://x/y"


@pytest.mark.parametrize("url", ["http://", "http://x:y/z", "http://x/a b", "https://x/h\u00f6k", "http://[::1", "x"])
def test_what_no_request_can_go_to_is_told_and_is_not_shown_where_it_is_a_secret(url):
    with pytest.raises(ValueError, match=r"^a webhook is an http or https address, \$HOOK is none$"):
        address_of("$HOOK", {"HOOK": url})
