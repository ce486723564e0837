"""What tests cost is measured by a clock that no test can replace."""

import threading
import time

from tests.durations import Sampler, kind_of


def test_a_test_that_replaces_the_clock_changes_no_duration(monkeypatch):
    sampler, samples = Sampler(), []
    has_two = threading.Event()

    class Seconds(dict):
        def __missing__(self, kind):
            return 0.0

        def __setitem__(self, kind, seconds):
            samples.append(seconds - self[kind])
            super().__setitem__(kind, seconds)
            if len(samples) >= 2:
                has_two.set()

    sampler.seconds = Seconds()
    monkeypatch.setattr(time, "monotonic", iter(range(0, 10**9, 10**6)).__next__)
    sampler.start()
    assert has_two.wait(60)
    sampler.stop()
    assert all(0 < seconds < 10**5 for seconds in samples)


def test_a_sample_counts_for_the_innermost_file_that_a_kind_names():
    files = ["/x/threading.py", "/x/subprocess.py", "/x/tasks/planning/solve.py"]
    assert kind_of(files) == "commands"
    assert kind_of(["/x/threading.py"]) == "other"
