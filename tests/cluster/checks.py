"""Invariants of a pool that hold however it was disturbed."""

from itertools import pairwise

from ringmaster.techniques.processes.gang_events import CheckpointSaved, JobReady, Outcome
from tests.cluster.jobs import assert_same_weights
from tests.integration.workbench import SINGLE


def assert_well(pool, batch, jobs, bench, *, layouts=None):
    """Asserts that the weights equal those of an undisturbed run, and that no work was done twice."""
    assert_nothing_twice(pool, batch)
    pool.trace.assert_one_owner()
    assert_devices_held_once(pool)
    for job in jobs:
        assert_same_weights(bench, job, pool.model_dir(batch, job.name), layout=(layouts or {}).get(job.name, SINGLE))


def assert_nothing_twice(pool, batch):
    """Asserts that each segment begins at the newest earlier checkpoint, and that every job ends at its last step."""
    words = pool.words(batch)
    for name in {segment.job for segment in pool.segments(batch)}:
        kept = 0
        for segment in pool.segments(batch):
            if segment.job != name:
                continue
            mine = [word.content for word in words if word.segment == segment.id]
            for ready in [content for content in mine if isinstance(content, JobReady)]:
                assert ready.step >= kept, f"{name}: {ready.step} is before the checkpoint of {kept}"
            saved = [content.step for content in mine if isinstance(content, CheckpointSaved)]
            ended = [content.result.step or 0 for content in mine if isinstance(content, Outcome)]
            kept = max([kept, *saved, *ended])


def assert_devices_held_once(pool):
    """Asserts that no two segments had a device at a time, by the journal's clock."""
    by_device = {}
    for segment in pool.segments():
        for device in segment.spec.devices:
            by_device.setdefault(device, []).append((segment.started_s, segment.ended_s, segment.id))
    for device, spans in by_device.items():
        spans.sort()
        for (_, ended_s, one), (began_s, _, other) in pairwise(spans):
            assert ended_s is not None, f"segment {one} on {device} never ended, and {other} began"
            assert ended_s <= began_s, f"segments {one} and {other} had {device} at once"
