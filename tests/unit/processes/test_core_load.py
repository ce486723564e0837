"""The load of a process, by what the kernel counts of its threads."""

from pathlib import Path

import pytest

from ringmaster.techniques.processes.core_load import MAX_LOAD, CoreLoad

MS = 1_000_000


def set_counts(folder, **threads):
    """Writes of each thread how many milliseconds it has run, and waited for a core."""
    for name, (run_ms, wait_ms) in threads.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "schedstat").write_text(f"{run_ms * MS} {wait_ms * MS} 7\n")


def test_the_thread_that_runs_most_decides(tmp_path):
    set_counts(tmp_path, main=(1000, 100), writer=(500, 900))
    load = CoreLoad(tmp_path)
    set_counts(tmp_path, main=(1100, 400), writer=(510, 2900))
    assert load.since_last() == pytest.approx(4.0)
    set_counts(tmp_path, main=(1200, 400), writer=(511, 2900))
    assert load.since_last() == 1.0


def test_a_thread_that_begins_or_ends_meanwhile_does_not_count(tmp_path):
    set_counts(tmp_path, main=(0, 0))
    load = CoreLoad(tmp_path)
    set_counts(tmp_path, main=(10, 10), new=(900, 0))
    assert load.since_last() == 2.0
    (tmp_path / "new" / "schedstat").unlink()
    set_counts(tmp_path, main=(20, 40))
    assert load.since_last() == 4.0


def test_nothing_is_known_where_hardly_anything_ran_or_the_kernel_does_not_count(tmp_path):
    set_counts(tmp_path, main=(10, 10))
    load = CoreLoad(tmp_path)
    assert load.since_last() is None
    assert CoreLoad(Path(tmp_path / "none")).since_last() is None
    set_counts(tmp_path, main=(11, 10_000_000))
    assert load.since_last() == MAX_LOAD


def test_the_counts_of_this_process_are_read():
    load = CoreLoad()
    total = sum(number * number for number in range(1_000_000))
    measured = load.since_last()
    assert total > 0
    assert measured is None or 1.0 <= measured <= MAX_LOAD
