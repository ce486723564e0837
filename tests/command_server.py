"""Commands in processes that a server forks: it has imported what most commands import, which takes most of their time.

The server has one thread, and forks a process for each request that it reads.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1]
SERVE = "from tests.command_server import serve; serve()"  # the name of a module that is run would be the program's
COMMAND_LINE = ("ringmaster.flows.cli",)
"""What every command imports."""
READING = (
    *COMMAND_LINE,
    "ringmaster.features.endpoint.server.server_app",
    "ringmaster.flows.pool.batch_requests",
    "ringmaster.flows.reports.watch",
    "ringmaster.tasks.batch.batch",
)
"""What commands import that read a home."""


class CommandServer:
    """Runs commands one after another, each in a process of its own. It ends with the `with` statement.

    Args:
        folder: takes what commands print.
        preload: modules that the server imports.
        words: what starts the server, such as a program that drops rights.
    """

    def __init__(self, folder, *, preload=COMMAND_LINE, words=()):
        self._folder, self._words, self._preload = folder, words, preload

    def __enter__(self):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE / "src"), str(SOURCE)])}
        command = [*self._words, sys.executable, "-c", SERVE, *self._preload]
        self._server = subprocess.Popen(
            command, env=environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_):
        self._server.communicate()

    def run(self, *arguments, environment, folder):
        """Runs `ringmaster` with arguments, a whole environment and a working folder.

        Returns the completed process, and which modules it had imported at its end.
        """
        paths = [str(self._folder / name) for name in ("stdout", "stderr", "modules")]
        words = [*map(str, arguments)]
        request = {"arguments": words, "environment": environment, "folder": str(folder), "paths": paths}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        stdout, stderr, modules = (Path(path).read_text() for path in paths)
        return subprocess.CompletedProcess(words, status, stdout, stderr), set(modules.split())


def serve():
    """Imports the modules of the command line, and serves requests of standard input until it is closed."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        if not (child := os.fork()):
            _run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(request):
    from ringmaster.flows import entry

    stdout, stderr, modules = request["paths"]
    for number, path in enumerate((os.devnull, stdout, stderr)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["ringmaster", *request["arguments"]]
    exit_process = entry.exit_process

    def note_modules(status):
        Path(modules).write_text("\n".join(sys.modules))
        exit_process(status)

    entry.exit_process = note_modules
    entry.process()
