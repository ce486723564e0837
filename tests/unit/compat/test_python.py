"""The undocumented names of the standard library that `ringmaster.compat.python` gives do what is relied on."""

import subprocess
import sys

PROGRAM = """
import atexit
import threading
from ringmaster.compat.python import call_before_threads_end

ended = threading.Event()
threading.Thread(target=lambda: (ended.wait(), print("thread"))).start()
atexit.register(print, "atexit")
call_before_threads_end(lambda: (print("second"), ended.set()))
call_before_threads_end(lambda: print("first"))
"""


def test_functions_are_called_before_the_wait_for_threads():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["first", "second", "thread", "atexit"]


def test_a_forked_process_ends_like_an_interpreter():
    code = """
import atexit, os, threading
from ringmaster.compat.python import call_before_threads_end, run_exit_functions
atexit.register(print, "atexit", flush=True)
call_before_threads_end(lambda: os.write(1, b"before threads end\\n"))  # one write: threads print at the same time
threading.Thread(target=lambda: os.write(1, b"thread\\n")).start()
run_exit_functions()
os._exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()[:2]) == ["before threads end", "thread"]
    assert done.stdout.splitlines()[2:] == ["atexit"]
