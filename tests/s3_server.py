"""An S3-compatible server for tests: moto's, which counts its requests and fails some of them on demand."""

import threading
from collections import Counter
from dataclasses import dataclass
from urllib.parse import parse_qs

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "no secret", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class Request:
    """A request. kind: what it does, such as "GET", "PUT", "LIST" or "UPLOAD PART"."""

    kind: str
    path: str
    range: str | None


class S3Server:
    """The server, in threads of this process.

    requests: those since the last `forget`.
    before: called with each request; returns the HTTP status to fail it with, or None to answer it.
    """

    def __init__(self, address="127.0.0.1"):
        self._server = make_server(
            address, 0, self._answer, threaded=True, request_handler=MotoRequestHandler
        )  # port 0: any
        self.url = f"http://{address}:{self._server.server_port}"
        self.environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url, "AWS_EC2_METADATA_DISABLED": "true"}
        self.requests, self.before = [], lambda request: None
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def client(self):
        """Returns boto3's client, for what a test prepares or looks at."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
        )

    def make_bucket(self, name):
        self.client().create_bucket(Bucket=name)
        return f"s3://{name}"

    def keys(self, bucket):
        """Returns the names of all objects of a bucket."""
        return [found["Key"] for found in self.client().list_objects_v2(Bucket=bucket).get("Contents", ())]

    def forget(self):
        """Counts from now on."""
        self.requests.clear()

    def counts(self):
        """Returns how many requests of each kind there were."""
        return dict(Counter(request.kind for request in self.requests))

    def fail_first(self, number, *, kind, status=503):
        """Fails the next requests of a kind."""
        left = [number]

        def before(request):
            if request.kind != kind or not left[0]:
                return None
            left[0] -= 1
            return status

        self.before = before

    def _answer(self, environ, start_response):
        request = Request(_kind(environ), environ["PATH_INFO"], environ.get("HTTP_RANGE"))
        self.requests.append(request)
        status = self.before(request)
        if status is None:
            return self._moto(environ, start_response)
        length = int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"].read(length)  # so that the client has sent all of it when the answer comes
        start_response(f"{status} Failed", [("Content-Length", "0")])
        return [b""]


def _kind(environ):
    method, query = environ["REQUEST_METHOD"], parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    if "list-type" in query:
        return "LIST"
    if "uploads" in query:
        return "BEGIN UPLOAD"
    if "uploadId" in query:
        return {"PUT": "UPLOAD PART", "POST": "END UPLOAD"}.get(method, method)
    return method
