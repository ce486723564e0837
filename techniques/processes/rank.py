"""One rank of a gang as a process of its own, for engines that start processes themselves.

Run as `python -m ringmaster.techniques.processes.rank ORDER [--channel FD]`. ORDER is a JSON file: the fields of a
`GangOrder`, and "rank", the number of this rank.

With `--channel`, FD is an inherited socket to a supervisor: JSON lines, events in one direction and commands in the
other. When the supervisor closes or hangs up its end, this process and its process group, which it leads, are killed.

Without, events are printed on standard output as JSON lines, all other output goes to standard error, and SIGTERM is
the command to checkpoint and stop. The exit status is 0 where the last event is a result, whose status says whether the
job is done or was stopped at a checkpoint; 2 for an order that cannot be read; and 1 for any other failure, which the
last event explains.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from ringmaster.codec import from_json
from ringmaster.errors import ChannelClosed
from ringmaster.techniques.processes.channel import HANG_UP, Channel
from ringmaster.techniques.processes.launcher import rank_environment
from ringmaster.techniques.processes.order import GangOrder


class PrintedChannel(Channel):
    """The channel of a rank without a supervisor: prints what is sent on standard output, and receives nothing.

    What the process prints otherwise goes to standard error from now on.
    """

    def __init__(self) -> None:
        ours, self._silent = socket.socketpair()
        super().__init__(ours)
        self._output = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, message: dict[str, Any]) -> None:
        """Prints one object. Raises ChannelClosed where nobody reads standard output any more."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                while data:
                    data = data[os.write(self._output, data) :]
        except BrokenPipeError as error:
            raise ChannelClosed("nobody reads the standard output any more") from error


def main() -> NoReturn:
    """Reads the command line and runs the rank; ends the process."""
    parser = argparse.ArgumentParser(prog="python -m ringmaster.techniques.processes.rank")
    parser.add_argument("order", type=_argument, help="a JSON file: the fields of a GangOrder, and the rank")
    parser.add_argument("--channel", type=int, metavar="FD", help="an inherited socket to the supervisor")
    options = parser.parse_args()
    channel = PrintedChannel() if options.channel is None else _inherited(options.channel)
    channel.send({"event": "started", "pid": os.getpid()})
    Path(options.order["folder"]).mkdir(parents=True, exist_ok=True)
    os.environ.update(rank_environment())
    from ringmaster.techniques.processes import worker  # imports torch, which reads the environment

    worker.main(channel, options.order)


def _argument(path: str) -> dict[str, Any]:
    try:
        argument: dict[str, Any] = json.loads(Path(path).read_text())
        from_json(GangOrder, {name: value for name, value in argument.items() if name != "rank"})
        if not isinstance(argument["rank"], int):
            raise TypeError("its rank is not a number")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{path} holds no order: {type(error).__name__}: {error}") from error
    return argument


def _inherited(descriptor: int) -> Channel:
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(connection,), name="supervisor", daemon=True).start()
    return Channel(connection)


def _end_with(connection: socket.socket) -> None:
    """Kills this process and its group once the other end of the connection is closed or hung up."""
    poll = select.poll()
    poll.register(connection, HANG_UP)
    poll.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
