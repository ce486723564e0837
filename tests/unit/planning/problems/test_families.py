import pytest

from benchmarks.planning.families import draw, families


@pytest.mark.parametrize("family", [*families(), "scale-7x20", "paper-txt-5xhet"])
def test_every_family_draws_valid_problems_that_repeat(family):
    assert draw(family, seed=1) == draw(family, seed=1)
    assert draw(family, seed=1).jobs != draw(family, seed=2).jobs


def test_shapes_and_switch_costs():
    problem = draw("scale-7x20", switch_cost_s=None)
    assert len(problem.jobs) == 7
    assert [node.num_devices for node in problem.nodes] == [8, 8, 4]
    assert problem.switch_cost_s > 60


@pytest.mark.parametrize("wrong", ["nothing", "scale-30", "scale-x8", ""])
def test_unknown_families_are_refused(wrong):
    with pytest.raises(ValueError, match="unknown family"):
        draw(wrong)
