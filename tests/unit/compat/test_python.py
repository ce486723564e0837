"""The undocumented names of the standard library that `ringmaster.compat.python` gives do what is relied on."""

import ast
import subprocess
import sys

import pytest

from ringmaster.compat.python import PARSE_ATTEMPTS, parse_source

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


@pytest.mark.parametrize("num_faults", [1, PARSE_ATTEMPTS - 1])
def test_a_file_is_parsed_again_where_another_thread_parsed_meanwhile(monkeypatch, num_faults):
    parse, faults = ast.parse, ["AST constructor recursion depth mismatch (before=60, after=75)"] * num_faults

    def parse_beside_another(source):
        if faults:
            raise SystemError(faults.pop())
        return parse(source)

    monkeypatch.setattr(ast, "parse", parse_beside_another)
    assert [type(each) for each in parse_source(b"import os\n").body] == [ast.Import]


def test_a_file_that_is_not_python_is_refused_as_by_ast():
    with pytest.raises(SyntaxError):
        parse_source(b"import\n")
