"""One rank of a gang as a process of its own, without a supervisor.

Run as `python -m ringmaster.techniques.processes.rank ORDER`. ORDER is a JSON file: the fields of a
`GangOrder`, and "rank", the number of this rank.

Events are printed on standard output as JSON lines, all other output goes to standard error, and SIGTERM is
the command to checkpoint and stop. The exit status is 0 where the last event is a result, whose status says whether the
job is done or was stopped at a checkpoint; 2 for an order that cannot be read; and 1 for any other failure, which the
last event explains.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from ringmaster.codec import from_json
from ringmaster.errors import ChannelClosed
from ringmaster.techniques.processes.channel import Channel
from ringmaster.techniques.processes.order import GangOrder, rank_environment


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
    options = parser.parse_args()
    channel = PrintedChannel()
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


if __name__ == "__main__":
    main()
