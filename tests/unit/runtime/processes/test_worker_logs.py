"""The log of a rank on a full disk: a `print` must not end the rank."""

import os
import subprocess
import sys

from ringmaster.techniques.runtime.processes.worker import _Log

PRINTS = """
import os, sys
from ringmaster.techniques.runtime.processes.worker import _tolerate_full_logs
full = os.open("/dev/full", os.O_WRONLY)
said = os.dup(1)
os.dup2(full, 1)
os.dup2(full, 2)
_tolerate_full_logs()
for _ in range(1000):
    print("a line that is lost" * 10)
    print("another", file=sys.stderr)
sys.stdout.flush()
os.write(said, b"still here")
"""


def test_what_a_full_disk_does_not_take_of_a_log_is_lost():
    with _Log(os.open("/dev/full", os.O_WRONLY), "w") as log:
        assert log.write(b"four") == 4
    done = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "still here")
