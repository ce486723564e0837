"""A stand-in of a Hugging Face hub's HTTP API, as its documentation describes it: accounts, repositories, commits.

Sources: https://huggingface.co/docs/hub/api, and git-lfs's docs/api/batch.md.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_stand_in_token"


@dataclass
class Repository:
    private: bool
    files: dict = field(default_factory=dict)
    commits: list = field(default_factory=list)


@dataclass
class Hub:
    """What the stand-in has. owners: the account, and its organizations. requests: (method, path) of each request."""

    url: str = ""
    owners: tuple = ("me", "org")
    may_write: bool = True
    repositories: dict = field(default_factory=dict)
    objects: dict = field(default_factory=dict)
    requests: list = field(default_factory=list)
    cards: list = field(default_factory=list)
    card_faults: list = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub = self._begin()
        if hub is None:
            return
        if self.path == "/api/whoami-v2":
            first, *others = hub.owners
            self._answer({"type": "user", "name": first, "orgs": [{"name": each} for each in others]})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/?]+)(/tree/main)?(\?.*)?", self.path):
            repository = hub.repositories.get(match[1])
            if repository is None:
                self._refuse(404, "Repository not found", code="RepoNotFound")
            elif match[2]:
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": ""}
                    for name, data in repository.files.items()
                ]
                self._answer(entries)
            else:
                siblings = [{"rfilename": name} for name in repository.files]
                self._answer({"id": match[1], "private": repository.private, "siblings": siblings, "sha": "0" * 40})
        else:
            self._refuse(404, "Entry not found", code="EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self):
        hub = self._begin()
        if hub is None:
            return
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = self._chunks()
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            wanted = json.loads(content)
            name = f"{wanted.get('organization') or hub.owners[0]}/{wanted['name']}"
            if not hub.may_write:
                self._refuse(403, "You don't have the rights to create a model under this namespace")
            elif name in hub.repositories:
                self._refuse(409, "You already created this model repo")
            else:
                is_private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
                hub.repositories[name] = Repository(private=is_private)
                self._answer({"url": f"{hub.url}/{name}", "id": name, "name": name})
        elif path == "/api/validate-yaml":
            hub.cards.append(json.loads(content)["content"])
            self._answer({"errors": hub.card_faults, "warnings": []}, status=400 if hub.card_faults else 200)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = json.loads(content)["files"]
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in files
            ]
            self._answer({"files": modes})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/objects/{each['oid']}", "header": {}}}}
                for each in json.loads(content)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._commit(hub, match[1], [json.loads(line) for line in content.splitlines()])
        else:
            self._refuse(404, "Not found")

    def do_PUT(self):
        hub = self.server.hub
        hub.requests.append(("PUT", self.path))
        content = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.rpartition("/")[2]
        if hashlib.sha256(content).hexdigest() != name:
            self._refuse(400, "the content has another digest")
            return
        hub.objects[name] = content
        self._answer({})

    def _commit(self, hub, name, lines):
        repository, header = hub.repositories[name], lines[0]["value"]
        for line in lines[1:]:
            value = line["value"]
            match line["key"]:
                case "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repository.files[value["path"]] = hub.objects[value["oid"]]
                case "deletedFile":
                    del repository.files[value["path"]]
        repository.commits.append(header["summary"])
        oid = hashlib.sha1(str(len(repository.commits)).encode(), usedforsecurity=False).hexdigest()
        self._answer({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}"})

    def _begin(self):
        """Returns the hub, or answers a request without its token, as the card of a public model is read."""
        hub = self.server.hub
        hub.requests.append((self.command, self.path))
        if self.headers.get("Authorization") == f"Bearer {TOKEN}" or "/resolve/" in self.path:
            return hub
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._refuse(401, "Invalid user token.")
        return None

    def _chunks(self):
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _refuse(self, status, text, *, code=None):
        self._answer({"error": text}, status=status, headers={"X-Error-Code": code} if code else {})

    def _answer(self, value, *, status=200, headers=()):
        content = json.dumps(value).encode()
        self.send_response(status)
        for key, header in {
            **dict(headers),
            "Content-Type": "application/json",
            "Content-Length": len(content),
        }.items():
            self.send_header(key, str(header))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def stand_in_hub():
    """Yields a hub on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
