"""Runs a command in a process that the daemon's server forks, which has imported what the command needs.

The process has the command's terminal or files, working folder, environment and signals, and its exit status is that
of the command: `forwarded` sets it up. It ends with the process that forwards.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ringmaster.errors import ChannelClosed, InputError
from ringmaster.features.daemon.resident import KeptProcesses, home_of_environment, take

TARGET = "ringmaster.features.daemon.forwarded:main"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KILLED = 128 + signal.SIGKILL


def forward(arguments: Sequence[str]) -> int | None:
    """Runs a command in a process of the daemon's, if there is one; returns its exit status, None without one.

    arguments: the command line from the command's name on.
    """
    try:
        kept = take(home_of_environment())
    except InputError:  # the command reports it
        return None
    if kept is None:
        return None
    try:
        return _forwarded(arguments, kept.processes) if kept.processes.commands else None
    finally:
        kept.close()


def _forwarded(arguments: Sequence[str], processes: KeptProcesses) -> int | None:
    from ringmaster.techniques.processes.forkserver_client import ForkServerClient
    from ringmaster.techniques.processes.gang_events import RankExited, RankStarted, event_from_json

    ignored = [int(number) for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    umask = os.umask(0o077)
    os.umask(umask)
    argument = {
        "arguments": list(arguments),
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "umask": umask,
        "ignored": ignored,
    }
    try:
        server = ForkServerClient(Path(processes.commands))
        channel = server.spawn(target=TARGET, argument=argument, log=Path(os.devnull))
        started = event_from_json(channel.receive())
        assert isinstance(started, RankStarted)
        command = os.pidfd_open(started.pid)
    except (OSError, ChannelClosed):  # the server has just ended
        return None
    relay_signals(command, but=ignored)
    try:
        channel.send_descriptors([0, 1, 2])
        while not isinstance(event := event_from_json(channel.receive()), RankExited):
            pass
    except (OSError, ChannelClosed):
        from ringmaster.flows.output import report_faults

        report_faults(["the process that ran this command was killed. To fix: run it again, with --resume"])
        return KILLED
    return event.status if event.status >= 0 else 128 - event.status


def relay_signals(process: int, *, but: Sequence[int]) -> None:
    """Passes the signals that this process gets on to another one, and stops and continues with it.

    process: its pidfd.
    but: the signals that stay ignored.
    """

    def relay(number: int, _: FrameType | None) -> None:
        try:
            signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            return

    def stop(_: int, __: FrameType | None) -> None:
        relay(signal.SIGSTOP, None)
        # Signals wait until the process has continued: any thread of one that is stopped may take them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        os.kill(os.getpid(), signal.SIGSTOP)
        relay(signal.SIGCONT, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    for number in SIGNALS:
        if number not in but:
            signal.signal(number, relay)
    signal.signal(signal.SIGTSTP, stop)
