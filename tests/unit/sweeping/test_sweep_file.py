"""Invalid sweep files, among them those that once caused a traceback or lists that filled the memory."""

from pathlib import Path

import pytest

from ringmaster.errors import BatchFileError
from ringmaster.flows.sweep_form import NO_STOP_RULES, Parameter, Sweep, load_sweep
from ringmaster.tasks.sweeping.space import CategoricalRange, Range, findings, num_combinations

EXAMPLE = Path(__file__).parents[3] / "examples" / "sweep.yaml"
JOB = "{model: {from_pretrained: gpt2}, data: {source: digits}, num_steps: 16%s}"


def told(tmp_path, space: str, *, job: str = "", more: str = "") -> list[str]:
    file = tmp_path / "sweep.yaml"
    file.write_text(f"template: {{job: {JOB % job}}}\nspace: {space}\n{more}")
    with pytest.raises(BatchFileError) as caught:
        load_sweep(file)
    return [f"{fault.line}: {fault.place}: {fault.message}" for fault in caught.value.faults]


@pytest.mark.parametrize("value", ['"null"', "3", "[loss]", ".nan"])
def test_an_evaluation_that_is_no_mapping_is_a_fault(tmp_path, value):
    faults = told(tmp_path, "{optimizer.lr: [0.1, 0.2]}", job=f", evaluation: {value}", more="num_trials: 2")
    assert any("evaluation: must be a mapping" in fault for fault in faults)


@pytest.mark.parametrize("integer", ["false", "true"])
@pytest.mark.parametrize("end", [".inf", ".nan", "1e999"])
def test_an_end_that_is_not_finite_is_a_fault(tmp_path, end, integer):
    faults = told(tmp_path, f"{{clip_grad_norm: {{low: 1, high: {end}, step: 1, integer: {integer}}}}}")
    assert faults == ["2: space.clip_grad_norm: must have finite ends"]


def test_a_range_of_very_many_values_is_counted_and_not_listed(tmp_path):
    assert num_combinations([Range(key="x", low=0, high=1e12, step=1e-3)]) == 10**15 + 1
    assert num_combinations([Range(key="x", low=0, high=1e300, step=1e-300)]) is None
    faults = told(tmp_path, "{clip_grad_norm: {low: 1, high: 1e12, step: 1}}", more="sampler: grid")
    assert any("has 1,000,000,000,000 combinations" in fault for fault in faults)


def test_too_many_values_and_too_many_keys_are_refused_at_once():
    (fault,) = findings([CategoricalRange(key="seed", values=tuple(range(90_000)))], sampler="random", num_trials=8)
    assert (fault.place, fault.message) == (
        ("space", "seed", "values"),
        "has 90,000 values, more than the 1,000 trials of any sweep",
    )
    (fault,) = findings(
        [CategoricalRange(key=f"k{i}", values=(1,)) for i in range(9000)], sampler="random", num_trials=8
    )
    assert fault.message == "varies 9,000 keys"


def test_a_line_of_values_is_read_as_a_file_is():
    line = Parameter(key="x", values="1e-3, no, 2026-01-01, null, [1, 2]")
    assert line.values == [1e-3, "no", "2026-01-01", None, [1, 2]]
    for wrong in ("&a [*a]", "!!python/object:os.system x", "1], other: [2", "{"):
        with pytest.raises(ValueError, match="must be values between commas"):
            Parameter(key="x", values=wrong)


def test_a_key_that_occurs_twice_is_a_fault_with_its_line(tmp_path):
    faults = told(tmp_path, "{clip_grad_norm: [0.5, 1]}", job=", seed: 1, seed: 2", more="num_trials: 2\nnum_trials: 9")
    assert faults == [
        "1: template.job.seed: occurs twice, first in line 1",
        "4: num_trials: occurs twice, first in line 3",
    ]


def test_a_fault_of_the_template_has_its_place_and_line(tmp_path):
    file = tmp_path / "sweep.yaml"
    job = "model: {from_pretrained: gpt2}\n    data: {source: digits}\n    seed: -1\n    evaluation: {metrics: [los]}"
    file.write_text(
        f"template:\n  job:\n    {job}\n    num_steps: 9\nspace: {{clip_grad_norm: [1, 2]}}\nseed: 3\nnum_trials: 2\n"
    )
    with pytest.raises(BatchFileError) as caught:
        load_sweep(file)
    assert [(fault.line, fault.place) for fault in caught.value.faults] == [
        (5, "template.job.seed"),
        (6, "template.job.evaluation.metrics[0]"),
    ]


def test_a_file_in_another_encoding_is_named_with_the_line(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_bytes(b"name: a\nobjective: \xff\n")
    with pytest.raises(BatchFileError, match=r"sweep.yaml:2: is not UTF-8 text: .* To fix: save it as UTF-8"):
        load_sweep(file)


def test_a_dry_run_plans_all_trials_and_trains_none(monkeypatch):
    from typer.testing import CliRunner

    from ringmaster.flows import cli
    from ringmaster.flows.commands import running

    planned = []
    monkeypatch.setattr(running, "_plan_only", lambda batch, **options: planned.append((batch, options)) or 0)
    monkeypatch.setattr(running, "prepared_caller", None)  # which would be called to train
    done = CliRunner().invoke(cli.app, ["sweep", str(EXAMPLE), "--dry-run"])
    assert done.exit_code == 0, done.output
    ((batch, options),) = planned
    assert len(batch.jobs) == 8
    assert options["is_result"]


@pytest.mark.parametrize("key", ["ranking", "objectives", "batch_keys"])
def test_a_field_of_the_form_that_files_do_not_have_is_an_unknown_key(tmp_path, key):
    assert told(tmp_path, "{clip_grad_norm: [1, 2]}", more=f"num_trials: 2\n{key}: {{}}\n") == [
        f"4: {key}: is an unknown key"
    ]


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("seed: true", "4: seed: input should be a valid integer, got true"),
        ("num_parallel: '4'", "4: num_parallel: input should be a valid integer, got '4'"),
        ("objective: []", "4: objective: input should be a valid string, got a list"),
        (
            "constraints: {metric: loss, at_most: '1'}",
            "4: constraints.at_most: input should be a valid number, got '1'",
        ),
        (
            "constraints: {metric: loss, at_most: true}",
            "4: constraints.at_most: input should be a valid number, got true",
        ),
        ("constraints:\n  metric: los\n  at_most: 1", "5: constraints.metric: 'los' is unknown"),
        ("constraints:\n- {metric: loss}", "5: constraints[0]: has no bound"),
        ("constraints: [{metric: loss, at_most: 2}, {metric: loss, at_least: 1}]", "4: constraints: has loss twice"),
    ],
)
def test_a_wrong_goal_is_a_fault_with_its_line(tmp_path, more, fault):
    assert told(tmp_path, "{clip_grad_norm: [1, 2]}", more=f"num_trials: 2\n{more}\n") == [fault]


@pytest.mark.parametrize("text", ["worthless", "{worthless: }", "{worthless: {gain: 0.001}}"])
def test_a_rule_that_ends_the_sweep_by_its_name_or_with_settings(tmp_path, text):
    file = tmp_path / "sweep.yaml"
    space = "{optimizer.lr: [0.1, 0.2]}"
    file.write_text(f"template: {{job: {JOB % ''}}}\nspace: {space}\nstop_when: {text}\nnum_trials: 2\n")
    form = load_sweep(file)
    (rule,) = form.stop_rules()
    assert (rule.key, rule.gain) == ("worthless", 0.001)
    assert Sweep(**form.parameters()).stop_rules() == [rule]
    off = form.model_copy(update={"stop_when": NO_STOP_RULES})
    assert Sweep(**off.parameters()).stop_rules() == [], "what a form leaves empty"


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("stop_when: never", "stop_when.never: is an unknown key"),
        ("stop_when: {worthless: {gain: 2}}", "stop_when.worthless.gain: input should be less than 1, got 2"),
        (
            "stop_when: worthless\nobjective: [loss, accuracy]",
            "stop_when: worthless goes with one objective, and the sweep has several",
        ),
    ],
)
def test_a_wrong_rule_is_a_fault_with_its_line(tmp_path, more, fault):
    assert told(tmp_path, "{optimizer.lr: [0.1, 0.2]}", more=f"num_trials: 2\n{more}") == [f"4: {fault}"]


@pytest.mark.parametrize("wrong", ["{}", "{low: 1, high: 2, values: [1]}", "{values: [1, 2], when: 3}"])
def test_a_space_with_a_fault_is_not_called_too_small(tmp_path, wrong):
    (fault,) = told(tmp_path, f"{{clip_grad_norm: {wrong}, seed: [0, 1]}}")
    assert "space.clip_grad_norm" in fault


def test_a_condition_of_the_only_key_says_what_to_add(tmp_path):
    file = tmp_path / "sweep.yaml"
    space = "{clip_grad_norm: {low: 1, high: 2, when: {seed: 1}}}"
    file.write_text(f"template: {{job: {JOB % ''}}}\nspace: {space}\n")
    with pytest.raises(BatchFileError, match="To fix: add seed with a list of values"):
        load_sweep(file)
