"""The private names of numba that `ringmaster.compat.numba` gives do what is relied on."""

import os
import subprocess
import sys

PROGRAM = """
import sys
from numba import njit
from ringmaster.compat.numba import set_source_stamp

@njit(cache=True)
def plus_one(x):
    return x + 1

set_source_stamp(plus_one, sys.argv[1])
print(plus_one(1), sum(plus_one.stats.cache_hits.values()) if hasattr(plus_one, "stats") else "uncompiled")
"""


def test_a_cache_is_valid_as_long_as_its_stamp(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)

    def run(stamp, **variables):
        command, env = [sys.executable, str(file), stamp], {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), **variables}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.split()

    assert [run("a"), run("a"), run("b")] == [["2", "0"], ["2", "1"], ["2", "0"]]
    assert run("b", NUMBA_DISABLE_JIT="1") == ["2", "uncompiled"]
