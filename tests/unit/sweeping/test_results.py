"""The leaderboard and the figures of a sweep: every value in its column, and every line where its values are."""

import io
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from ringmaster.codec import to_json
from ringmaster.flows.output import TextConsole, print_rows
from ringmaster.tasks.storage.journal import JobStatus, Variation
from ringmaster.tasks.sweeping.figures import CHARACTER_WIDTH, NumberAxis, SweepFigures
from ringmaster.tasks.sweeping.ranking import Ranking
from ringmaster.tasks.sweeping.results import best, leaderboard
from ringmaster.tasks.sweeping.space import CategoricalRange
from tests.unit.sweeping.sweeps import RATES, SEEDS, Swept, spec

SVG = "{http://www.w3.org/2000/svg}"
SIZES = CategoricalRange(key="global_batch_size", values=(8, 16))


def row_of(name, status=JobStatus.DONE):
    return {"name": name, "status": status, "num_steps": 4, "segments": [], "model_uri": None}


def board(reports, values, *, jobs):
    return leaderboard(list(reports), ranking=Ranking(metric="accuracy"), values=values, reports=reports, jobs=jobs)


def test_a_failed_trial_keeps_the_columns_of_the_table():
    reports = {"t-1": {4: {"accuracy": 0.5, "loss": 1.0}}, "t-2": {}}
    rows = board(reports, {"t-1": {"lr": 0.1}, "t-2": {"lr": 0.2}}, jobs=[row_of("t-1"), row_of("t-2", "failed")])
    assert [list(row) for row in rows] == [list(rows[0])] * 2
    assert rows[1] | {"lr": 0.2, "status": "failed", "held-out accuracy": None} == rows[1]
    console = TextConsole(file=io.StringIO(), width=200, force_terminal=False)
    print_rows(console, rows)
    head, failed = (line for line in console.file.getvalue().splitlines() if "status" in line or "t-2" in line)
    assert head.index("status") == failed.index("failed")


def test_rows_with_other_keys_are_printed_under_their_columns():
    console = TextConsole(file=io.StringIO(), width=100, force_terminal=False)
    print_rows(console, [{"a": "1", "b": "2"}, {"b": "3", "c": "4"}])
    head, last = console.file.getvalue().splitlines()[1], console.file.getvalue().splitlines()[-2]
    assert (head.index("b"), head.index("c")) == (last.index("3"), last.index("4"))


def test_a_long_name_is_printed_whole():
    console = TextConsole(file=io.StringIO(), width=40, force_terminal=False)
    name = "models:/a-sweep-with-a-long-name.trial-08/1"
    print_rows(console, [{"job": "trial-08", "status": "done", "model": name}])
    cells = [line.split("│")[3].strip() for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert "".join(cells) == name


@pytest.fixture
def swept(tmp_path):
    return Swept(tmp_path, spec(policy="none", space=(RATES, SEEDS, SIZES), num_trials=4)).run()


def enter(swept, name, job, **changes):
    swept.bench.journal.write_job(name, settled=to_json(job), **changes)


def test_a_clone_has_the_values_of_its_job(swept):
    scheduler, source = swept.sweep_scheduler, swept.jobs[0]
    job = replace(
        source,
        name="mine",
        optimizer=replace(source.optimizer, lr=0.5),
        schedule=replace(source.schedule, warmup_steps=3),
    )
    enter(swept, "mine", job, like=source.name, variation=Variation(job=source.name, step=None))
    variation = Variation(job="mine", step=None)
    enter(swept, "again", replace(job, name="again", seed=9), like=source.name, variation=variation)
    proposed, values = scheduler.values[source.name], scheduler.trial_values()
    assert values["mine"] == {**proposed, "optimizer.lr": 0.5, "schedule.warmup_steps": 3}
    assert values["again"] == {**values["mine"], "seed": 9}
    assert {name: values[name] for name in scheduler.values} == scheduler.values


def test_a_trial_that_a_person_changed_has_the_values_of_its_job(swept):
    scheduler, trial = swept.sweep_scheduler, swept.jobs[1]
    enter(swept, trial.name, replace(trial, optimizer=replace(trial.optimizer, lr=0.5)))
    assert scheduler.trial_values()[trial.name] == {**scheduler.values[trial.name], "optimizer.lr": 0.5}


def test_trials_that_were_proposed_late_have_the_values_that_were_proposed(tmp_path):
    scheduler = Swept(tmp_path, spec(sampler="tpe", policy="none", num_trials=6)).run().sweep_scheduler
    assert scheduler.trial_values() == scheduler.values


def figures_of(values, *, done=None):
    reports = {name: {2: {"accuracy": value / 2}, 4: {"accuracy": value}} for name, value in values.items()}
    ranked = sorted(values, key=values.get, reverse=True)
    return SweepFigures(
        name="s", objective="accuracy", reports=reports, done=done or ranked, ranked=ranked, best=ranked[0]
    )


def lines_in(svg):
    """The points of each line by the name of its trial."""
    root = ElementTree.fromstring(svg)
    lines = {line.find(f"{SVG}title").text.split(":")[0]: line for line in root.iter(f"{SVG}polyline")}
    return {
        name: [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for name, line in lines.items()
    }


def height_of(text, svg):
    """The height of a tick."""
    return next(float(e.get("y")) - 4 for e in ElementTree.fromstring(svg).iter(f"{SVG}text") if e.text == text)


def test_every_trial_is_drawn_where_its_value_is():
    values = {"a": 0.9, "b": 0.8, "c": 0.7, "bad": 0.5}
    svg = figures_of(values).parallel_coordinates([RATES], {name: {"optimizer.lr": 1e-3} for name in values})
    top, bottom = height_of("0.9", svg), height_of("0.5", svg)
    for name, value in values.items():
        assert lines_in(svg)[name][-1][1] == pytest.approx(top + (0.9 - value) / 0.4 * (bottom - top), abs=0.2)
    assert "beyond the axis" not in svg


def test_a_value_that_would_hide_all_others_is_cut_and_marked():
    values = {"a": 0.90, "b": 0.89, "c": 0.88, "d": 0.87, "e": 0.86, "f": 0.10}
    for svg in (
        figures_of(values).parallel_coordinates([RATES], {name: {"optimizer.lr": 1e-3} for name in values}),
        SweepFigures(
            name="s", objective="accuracy", reports={n: {4: {"accuracy": v}} for n, v in values.items()},
            done=[*values], ranked=[*values], best="a",
        ).learning_curves([4]),
    ):  # fmt: skip
        assert "1 value is beyond the axis, the lowest 0.1" in svg
        assert sum("cut" in each.get("class") for each in ElementTree.fromstring(svg).iter(f"{SVG}path")) == 1
        drawn = lines_in(svg)
        assert drawn["e"][-1][1] < drawn["f"][-1][1] - 10, "others are apart from what is cut"


def test_an_axis_holds_values_outside_of_the_range_of_the_search():
    values = {"a": 0.9, "clone": 0.8}
    chosen = {
        "a": {"optimizer.lr": 1e-5, "global_batch_size": 8},
        "clone": {"optimizer.lr": 1.0, "global_batch_size": 64},
    }
    drawn = lines_in(figures_of(values).parallel_coordinates([RATES, SIZES], chosen))
    assert drawn["clone"][0][1] == drawn["clone"][1][1] == 84.0, "at the top of both axes"
    assert drawn["a"][0][1] == drawn["a"][1][1] == 380.0


def test_listed_numbers_are_drawn_in_their_order_with_those_of_clones():
    rates = CategoricalRange(key="optimizer.lr", values=(1e-4, 1e-3, 1e-2))
    values = {"a": 0.9, "b": 0.8, "clone": 0.7}
    chosen = {name: {"optimizer.lr": lr} for name, lr in zip(values, (1e-4, 1e-2, 3e-3), strict=True)}
    drawn = lines_in(figures_of(values).parallel_coordinates([rates], chosen))
    assert drawn["a"][0][1] > drawn["clone"][0][1] > drawn["b"][0][1]


def test_trials_without_a_value_are_counted():
    figures = SweepFigures(name="s", objective="loss", reports={"a": {4: {"loss": 1.0}}, "b": {}, "c": {}}, done=["a"])
    for svg in (
        figures.learning_curves([4]),
        figures.parallel_coordinates([RATES], {name: {"optimizer.lr": 1e-3} for name in "abc"}),
    ):
        assert "not drawn: 2 trials without loss" in svg


def test_a_dotted_key_is_shown_by_its_last_names():
    console = TextConsole(file=io.StringIO(), width=200, force_terminal=False)
    keys = ("job", "optimizer.lr", "adapter.name", "model.name", "x.job")
    print_rows(console, [dict.fromkeys(keys, 1)])
    (head,) = (line for line in console.file.getvalue().splitlines() if "optimizer" not in line and "lr" in line)
    assert [name.strip() for name in head.strip("┃").split("┃")] == ["job", "lr", "adapter.name", "model.name", "x.job"]


def test_ticks_are_round_numbers():
    assert [text for _, text in NumberAxis(low=0.137, high=0.871).ticks] == ["0.2", "0.4", "0.6", "0.8"]
    assert [text for _, text in NumberAxis(low=1e-5, high=1e-1, is_log=True).ticks] == [
        "1e-05", "0.0001", "0.001", "0.01", "0.1",
    ]  # fmt: skip
    assert [text for _, text in NumberAxis(low=2e-4, high=6e-3, is_log=True).ticks] == [
        "0.0002", "0.0005", "0.001", "0.002", "0.005",
    ]  # fmt: skip


def test_names_at_the_lines_do_not_cover_each_other():
    values = {f"t-{n}": 0.9 - n * 1e-4 for n in range(10)}
    svg = figures_of(values).learning_curves([2, 4])
    heights = sorted(
        float(e.get("y")) for e in ElementTree.fromstring(svg).iter(f"{SVG}text") if (e.text or "").startswith("t-")
    )
    heights = [height for height in heights if height > 50]
    assert len(heights) == 10
    assert min(b - a for a, b in pairwise(heights)) >= 13.9


def test_the_best_trial_is_that_of_the_first_row():
    assert (
        best(board({"a": {4: {"accuracy": 0.1}}, "b": {4: {"accuracy": 0.2}}}, {}, jobs=map(row_of, "ab")))["job"]
        == "b"
    )


def ticks_of(svg):
    return [e.text for e in ElementTree.fromstring(svg).iter(f"{SVG}text") if e.get("class") == "tick"]


def drawn_over(key, values):
    """Parallel coordinates of trials that differ in one key, and the height at which each one is drawn."""
    names = [f"t{i}" for i in range(len(values))]
    space = [CategoricalRange(key=key, values=tuple(values[:1]))]
    figures = figures_of({name: 0.5 + i / 100 for i, name in enumerate(names)})
    svg = figures.parallel_coordinates(space, {name: {key: each} for name, each in zip(names, values, strict=True)})
    return svg, [lines_in(svg)[name][0][1] for name in names]


def test_values_of_other_types_have_places_of_their_own():
    svg, heights = drawn_over("x", [True, 1, 0, False, None, "1", 1])
    assert len(set(heights[:-1])) == 6 and heights[-1] == heights[1]
    assert {"true", "false", "null", "0", "1"} <= {*ticks_of(svg)}


def test_long_values_are_told_apart_by_what_differs():
    adapters = [{"kind": "lora", "rank": rank, "targets": ["all"]} for rank in (4, 8, 16)]
    svg, heights = drawn_over("adapter", [*adapters, None, [1, 2], [1, 3]])
    assert len(set(heights)) == 6
    shown = ticks_of(svg)
    assert [text for text in shown if text.startswith("…")] == [
        "…rank: 4, targe…",
        "…rank: 8, targe…",
        "…rank: 16, targ…",
    ]
    assert {"null", "[1, 2]", "[1, 3]"} <= {*shown}


def test_one_value_and_one_trial_are_drawn():
    svg, (height,) = drawn_over("x", [{"a": "a long text that all trials have"}])
    assert 84 <= height <= 380
    assert "a: a long text …" in ticks_of(svg)


def test_names_of_axes_that_have_no_room_are_shown_by_their_ends():
    keys = [f"optimizer.options.key_number_{i}" for i in range(6)]
    space = [CategoricalRange(key=key, values=(1, 2)) for key in keys]
    svg = figures_of({"a": 0.5}).parallel_coordinates(space, {"a": dict.fromkeys(keys, 1)})
    names = [e.text for e in ElementTree.fromstring(svg).iter(f"{SVG}text") if e.get("class") == "name"]
    assert all(name.startswith("…") and key.endswith(name[1:]) for name, key in zip(names, keys, strict=False))
    assert max(map(len, names)) * CHARACTER_WIDTH <= 700 / 6


def test_rungs_that_lie_together_have_one_text():
    reports = {"a": {10: {"accuracy": 0.1}, 20: {"accuracy": 0.2}, 1000: {"accuracy": 0.3}}}
    svg = SweepFigures(name="s", objective="accuracy", reports=reports, done=["a"]).learning_curves([10, 20, 400, 1000])
    root = ElementTree.fromstring(svg)
    assert len([line for line in root.iter(f"{SVG}line") if line.get("class") == "rung"]) == 4
    texts = [e.text for e in root.iter(f"{SVG}text") if e.get("y") == "396"]
    assert [text for text in texts if text] == ["1000", "400", "20"]


def test_a_varied_model_does_not_hide_the_model_that_was_trained():
    values = {"trial-0": {"model": {"architecture": "A"}, "seed": 1}}
    job = {**row_of("trial-0"), "model_uri": "models:/s.trial-0/1"}
    reports = {"trial-0": {3: {"accuracy": 0.5}}}
    (row,) = board(reports, values, jobs=[job])
    assert (row["model"], row["varied model"]) == ("models:/s.trial-0/1", "{'architecture': 'A'}")


def test_a_metric_of_a_constraint_has_an_axis_before_the_objective():
    reports = {"a": {4: {"loss": 1.0, "mae": 0.5}}, "b": {4: {"loss": 2.0, "mae": 0.1}}, "c": {4: {"loss": 3.0}}}
    figures = SweepFigures(name="s", objective="loss", reports=reports, done=["a", "b", "c"], metrics=["mae"])
    svg = figures.parallel_coordinates([RATES], {name: {"optimizer.lr": 1e-3} for name in reports})
    names = [e.text for e in ElementTree.fromstring(svg).iter(f"{SVG}text") if e.get("class") == "name"]
    assert names == ["optimizer.lr", "mae", "loss"]
    drawn = lines_in(svg)
    assert [len(drawn[name]) for name in "abc"] == [3, 3, 2]
    assert drawn["a"][1][0] == drawn["b"][1][0] and drawn["a"][1][1] < drawn["b"][1][1]
