"""A stand-in for Kubernetes' API that takes Jobs and runs none."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.jobs.append((self.path, job))
        answer = json.dumps({**job, "metadata": {**job["metadata"], "name": "node-abcde"}}).encode()
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@contextmanager
def kubernetes_api(config):
    """Yields the list of Jobs that arrive, each with its path. config: the file for kubectl's configuration of it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.jobs = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    said = {
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": {}}],
        "current-context": "here",
    }
    config.write_text(yaml.safe_dump(said))
    try:
        yield server.jobs
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
