"""The parent process of a node agent on a machine of Ray: `python -m ringmaster.features.ray.agent_parent`.

A worker of Ray that ends, for example as its raylet was killed, kills its child processes. The agent is to leave in
order instead, with checkpoints of its gangs. It is therefore the child of this process, which ends it by SIGTERM once
its own stdin is closed, as that is a pipe from the actor; where this process is killed, the kernel does.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1  # prctl(2)
LEAVE_S = 60.0  # longer than the agent takes to leave in order
_LIBC = ctypes.CDLL(None)


def main(command: list[str]) -> int:
    """Runs the agent until it ends; returns its exit status."""
    own_pid = os.getpid()
    ended = threading.Event()
    agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: end_with(own_pid))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.terminate())
    threading.Thread(target=_end_with_stdin, args=(agent, ended), name="stdin", daemon=True).start()
    status = agent.wait()
    ended.set()
    return status


def end_with(parent: int) -> None:
    """Has the kernel send SIGTERM to this process once its parent ends. Call it in a child before its program runs."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGTERM)


def _end_with_stdin(agent: subprocess.Popen[bytes], ended: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    agent.terminate()
    if not ended.wait(LEAVE_S):
        agent.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
