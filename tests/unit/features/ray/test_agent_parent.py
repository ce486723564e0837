import signal
import subprocess
import sys

import pytest

from ringmaster.features.ray import agent_parent

# Ends by SIGTERM in order, as a node agent does.
AGENT = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("left", flush=True), sys.exit(7)))
print("serves", flush=True)
signal.pause()
"""


@pytest.fixture
def parent():
    command = [sys.executable, "-P", "-m", agent_parent.__name__, sys.executable, "-c", AGENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "serves\n"
        yield process
        process.kill()


def test_the_agent_leaves_in_order_once_the_actor_is_gone(parent):
    parent.stdin.close()
    assert parent.stdout.read() == "left\n"
    assert parent.wait() == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_agent_leaves_in_order_where_its_parent_is_ended(parent, number):
    parent.send_signal(number)
    assert parent.stdout.read() == "left\n"
