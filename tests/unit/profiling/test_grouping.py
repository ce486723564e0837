"""Which jobs can share a base, and which groups of them are considered."""

from dataclasses import replace

import pytest

from ringmaster.tasks.profiling.group_layouts import MAX_TOGETHER, candidate_groups, sample
from ringmaster.techniques import Adapter
from tests.unit.profiling.solos import FACTS, MODEL, alone, classes_of, job, members, names, preflight


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": None},
        {"base": "job-0"},
        {"techniques": ("single", "ddp")},
        {"num_devices": (2,)},
        {"precision": "bf16"},
        {"seed": 1},
        {"model": replace(MODEL, config={"hidden_size": 64})},
    ],
    ids=str,
)
def test_what_has_another_base_or_cannot_share_it_is_by_itself(changes):
    others = [job(f"job-{i}") for i in range(3)]
    assert names(classes_of([*others, job("odd", **changes)])) == [("job-0", "job-1", "job-2")]


def test_each_base_has_a_class_of_its_own_and_one_job_is_none():
    jobs = [
        job("a", base="one"),
        job("b", base="two"),
        job("c", base="one"),
        job("d", base="two"),
        job("e", base="six"),
    ]
    assert names(classes_of(jobs)) == [("a", "c"), ("b", "d")]


def test_a_job_that_names_the_technique_may_be_together_and_one_that_drops_out_not():
    jobs = [job("a", techniques=("single", "shared_base"), num_devices=(1, 2)), job("b")]
    assert names(classes_of(jobs)) == [("a", "b")]
    for fact in ("has_dropout", "has_experts"):
        unfit = {
            name: preflight(job_, facts=replace(FACTS, **{fact: True})) for name, job_ in zip("ab", jobs, strict=True)
        }
        assert classes_of(jobs, preflights=unfit) == []
    unfit = preflight(jobs[0], facts=replace(FACTS, undivided="wpe, which it trains as it is, is of class Embedding"))
    assert classes_of(jobs, preflights={"a": unfit}) == []


def test_what_one_device_cannot_train_at_once_is_by_itself():
    jobs = [job("a"), job("b"), job("c")]
    assert names(classes_of(jobs, profiles={"a": (alone(num_devices=2),)})) == [("b", "c")]
    divided = preflight(jobs[0]).candidates[0]
    divided = replace(divided, config={"micro_batch": 2, "recompute": "none"})
    assert names(classes_of(jobs, preflights={"a": replace(preflight(jobs[0]), candidates=(divided,))})) == [("b", "c")]


def test_the_longest_jobs_come_first_and_like_ones_are_neighbours():
    jobs = [
        job("a", adapter=Adapter(rank=4)),
        job("b", adapter=Adapter(rank=8)),
        job("c", adapter=Adapter(rank=4)),
        job("d", num_steps=9000),
        job("e", adapter=Adapter(kind="ia3")),
    ]
    assert names(classes_of(jobs)) == [("d", "e", "a", "c", "b")]


def test_what_is_tried_has_as_much_of_each_kind_as_the_class():
    kinds = ["lora"] * 9 + ["ia3"] * 3
    (mixed,) = classes_of([job(f"job-{i:02}", adapter=Adapter(kind=kind)) for i, kind in enumerate(kinds)])
    for size, expected in ((1, (0, 1)), (2, (1, 1)), (4, (1, 3)), (8, (2, 6)), (12, (3, 9))):
        tried = sample(mixed, size)
        assert tuple(sum(s.job.adapter.kind == kind for s in tried) for kind in ("ia3", "lora")) == expected
        assert [mixed.index(solo) for solo in tried] == sorted(mixed.index(solo) for solo in tried)
    alike = members(12)
    assert all(sample(alike, size) == alike[:size] for size in (1, 2, 8, 12))


def test_groups_are_neighbours_of_a_few_sizes():
    sizes = [len(group) for group in candidate_groups(members(6), num_devices=2)]
    assert sizes == [6, 3, 3, 2, 2, 2]
    every = candidate_groups(members(6), num_devices=2)
    order = [solo.job.name for solo in members(6)]
    for group in names(every):
        start = order.index(group[0])
        assert list(group) == order[start : start + len(group)]
    assert len(set(names(every))) == len(every)


@pytest.mark.parametrize("num_jobs", [2, 3, 7, 16, 33, 100, 500])
@pytest.mark.parametrize("num_devices", [1, 2, 5, 64])
def test_there_are_about_as_many_groups_as_jobs(num_jobs, num_devices):
    every = candidate_groups(members(num_jobs), num_devices=num_devices)
    assert 0 < len(every) <= 2 * num_jobs
    assert all(2 <= len(group) <= MAX_TOGETHER for group in every)
    assert {name for group in names(every) for name in group} == {f"job-{i:02}" for i in range(num_jobs)}


def test_parts_for_the_devices_are_also_cut_by_work():
    jobs = [job(f"long-{i}", num_steps=8000) for i in range(2)] + [job(f"short-{i}") for i in range(8)]
    (found,) = classes_of(jobs)
    every = names(candidate_groups(found, num_devices=2))
    assert ("long-0", "long-1") in every
    assert tuple(f"short-{i}" for i in range(8)) in every
    assert (*("long-0", "long-1"), *(f"short-{i}" for i in range(3))) in every
