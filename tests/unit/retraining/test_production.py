"""The file of production models: its fields, and errors that report all its faults at once."""

from pathlib import Path

import pytest

from ringmaster.errors import BatchFileError
from ringmaster.flows.file_schemas import retraining_schema
from ringmaster.tasks.planning.term_features import terms_features
from ringmaster.tasks.retraining.production import load_production, with_tagged, with_tokenizer_of

GOOD = """\
name: shop
devices: {cpu: 1}
models:
  - name: digits
    job: &job
      model: {architecture: ViTForImageClassification, config: {image_size: 8}}
      num_steps: 5
      evaluation: {metrics: [accuracy, loss]}
    data: {source: digits}
    min_gain: 0.01
  - name: words
    job:
      model: {architecture: LlamaForCausalLM}
      num_steps: 5
    data: {path: "words.jsonl", seq_len: 8}
    compare_on: {path: "*.txt", seq_len: 8}
    warm_start: false
"""

BAD = """\
name: shop
device: {cpu: 1}
models:
  - name: digits
    job:
      model: {architecture: ViTForImageClassification}
      base: models:/shop.digits@champion
      num_step: 5
    data: {source: digit}
    min_gain: -1
  - name: digits
    job:
      model: {architecture: LlamaForCausalLM}
      num_steps: 0
    data: {path: "none.jsonl", seq_len: 8}
    compare_on: {path: "nothing.jsonl"}
  - name: words
    job: [1]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "words.jsonl").write_text('{"text": "a b"}\n')
    (tmp_path / "trusted.txt").write_text("a b")
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "retraining.yaml"
    path.write_text(text)
    return path


def test_a_file_gives_its_models_in_order(folder):
    production = load_production(written(folder, GOOD))
    digits, words = production.models
    assert (production.name, production.devices, production.folder) == ("shop", {"cpu": 1}, folder)
    assert [model.registered_name for model in production.models] == ["shop.digits", "shop.words"]
    assert (digits.metric, digits.min_gain, digits.warm_start, digits.compare_on) == ("accuracy", 0.01, True, None)
    assert digits.job.base is None
    assert (words.metric, words.warm_start) == ("loss", False)
    assert words.job.data.path == str(folder / "words.jsonl")
    assert words.compare_on is not None
    assert words.compare_on.data.path == str(folder / "*.txt")
    assert words.compare_on.model == words.job.model
    assert [job.name for job in production.jobs] == ["digits", "words", "words.compare_on"]


def test_all_faults_are_told_at_once_with_place_and_line(folder):
    with pytest.raises(BatchFileError) as raised:
        load_production(written(folder, BAD))
    found = {(fault.line, fault.place) for fault in raised.value.faults}
    assert found == {
        (2, "device"),
        (7, "models[0].job.base"),
        (8, "models[0].job.num_step"),
        (9, "models[0].data.source"),
        (10, "models[0].min_gain"),
        (11, "models[1].name"),
        (14, "models[1].job.num_steps"),
        (15, "models[1].data.path"),
        (16, "models[1].compare_on.path"),
        (17, "models[2].data"),
        (18, "models[2].job"),
    }
    assert all(fault.message and fault.remedy for fault in raised.value.faults)
    lines = [fault.line for fault in raised.value.faults]
    assert lines == sorted(lines)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("name: shop\nmodels: []\n", "models: "),
        ("name: shop\n", "models: is empty"),
        ("models:\n  - digits\n", "models[0]: "),
        ("name: shop\nmodels: [\n", "is not YAML"),
    ],
)
def test_a_file_that_says_nothing_is_told(folder, text, told):
    with pytest.raises(BatchFileError) as raised:
        load_production(written(folder, text))
    assert any(told in str(fault) for fault in raised.value.faults)


def test_what_a_run_cannot_choose_is_refused_with_a_remedy_that_such_a_file_can_follow(folder):
    text = GOOD.replace(
        "      num_steps: 5\n", "      num_steps: 5\n      may_vary: {global_batch_size: [16, 32]}\n", 1
    )
    fault = load_production(written(folder, text)).broken["digits"]
    assert "models[0].job.may_vary: is not allowed in the job. To fix: leave it out: " in fault
    assert "may_vary" not in retraining_schema()["$defs"]["JobTemplate"]["properties"]


def test_a_file_that_is_not_there_is_told(folder):
    with pytest.raises(BatchFileError, match="cannot be read"):
        load_production(folder / "missing.yaml")


def test_text_is_read_with_the_tokenizer_of_the_champion(folder):
    _, words = load_production(written(folder, GOOD)).models
    champion = folder / "champion"
    champion.mkdir()
    assert with_tokenizer_of(champion, words) == words
    assert with_tokenizer_of(None, words) == words
    (champion / "tokenizer.json").write_text("{}")
    found = with_tokenizer_of(champion, words)
    assert found.job.data.tokenizer == str(champion)
    assert found.compare_on is not None
    assert found.compare_on.data.tokenizer == str(champion)
    assert with_tokenizer_of(folder, found) == found


NIGHTLY = """\
name: shop
night: {starts: "02:00", deadline: "06:00", timezone: Europe/Berlin, budget: 2.5, price_per_device_hour: 3,
        webhook: $REPORTS}
models:
  - name: words
    job: {model: {architecture: LlamaForCausalLM}, num_steps: 5, optimizer: {lr: 1e-3}}
    data: {path: "words.jsonl", seq_len: 8}
    sweep: {optimizer.lr: [1e-3, 3e-3], seed: [0, 1]}
    window_days: 7
    priority: 5
    due:
      max_age_days: 30
      drift: {psi: 0.3, inputs: {path: "*.txt", seq_len: 8}, predictions: log.jsonl}
      assertions: {suite: tests.yaml, predictions: log.jsonl}
"""


def test_a_file_says_when_nights_are_and_what_makes_models_due(folder):
    (folder / "tests.yaml").write_text("name: t\n")
    production = load_production(written(folder, NIGHTLY))
    night = production.entry.night
    assert (night.starts, night.deadline, night.timezone) == ("02:00", "06:00", "Europe/Berlin")
    assert (night.budget, night.price_per_device_hour, night.webhook) == (2.5, 3.0, "$REPORTS")
    (words,) = production.models
    assert (words.window_days, words.priority) == (7, 5)
    assert words.rules.drift.psi == 0.3
    assert (words.rules.max_age_days, words.rules.assertions is not None, words.rules.new_data) == (30, True, True)
    assert words.inputs is not None
    assert words.inputs.data.path == str(folder / "*.txt")
    assert words.folder / words.rules.drift.predictions == folder / "log.jsonl"
    assert words.folder / words.rules.assertions.suite == folder / "tests.yaml"
    assert [job.name for job in words.jobs] == ["words", "words.inputs"]


def test_a_sweep_makes_a_job_of_each_other_combination(folder):
    (folder / "tests.yaml").write_text("name: t\n")
    (words,) = load_production(written(folder, NIGHTLY)).models
    assert {(job.optimizer.lr, job.seed) for job in words.variants} == {(1e-3, 1), (3e-3, 0), (3e-3, 1)}
    assert all(job.data == words.job.data for job in words.variants)


WRONG_NIGHT = """\
name: shop
night: {starts: "25:00", deadline: 6, timezone: Mars/Olympus, budget: 0, webhook: "ftp://x"}
models:
  - name: words
    job: {model: {architecture: LlamaForCausalLM}, num_steps: 5}
    data: {path: "words.jsonl", seq_len: 8}
    sweep: {optimizer.speed: [1], seed: []}
    due:
      max_age: 3
"""
INCONSISTENT = """\
name: shop
models:
  - name: words
    job: {model: {architecture: LlamaForCausalLM}, num_steps: 5}
    data: {path: "words.jsonl", seq_len: 8}
    window_days: 7
    sweep: {optimizer.speed: [1, 2]}
    due:
      min_new_samples: 5
      drift: {psi: null, inputs: {path: "none.txt", seq_len: 8}}
      assertions: {suite: none.yaml, predictions: log.jsonl}
"""


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (
            WRONG_NIGHT,
            {
                "night.starts",
                "night.deadline",
                "night.timezone",
                "night.budget",
                "night.webhook",
                "models[0].sweep.seed",
                "models[0].due.max_age",
            },
        ),
        (
            INCONSISTENT,
            {
                "models[0].due.min_new_samples",
                "models[0].due.drift",
                "models[0].due.drift.inputs.path",
                "models[0].due.assertions.suite",
                "models[0].sweep",
            },
        ),
    ],
)
def test_what_is_wrong_with_a_night_is_told_at_its_place(folder, text, places):
    with pytest.raises(BatchFileError) as raised:
        load_production(written(folder, text))
    assert {fault.place for fault in raised.value.faults} == places
    assert all(fault.remedy for fault in raised.value.faults)


def test_a_sweep_is_small(folder):
    values = ", ".join(map(str, range(70)))
    text = GOOD.replace("warm_start: false", f"sweep: {{seed: [{values}]}}")
    assert "64 are the most" in load_production(written(folder, text)).broken["words"]


def test_a_window_is_of_days_that_a_calendar_has(folder):
    text = GOOD.replace("warm_start: false", "window_days: 1000000")
    fault = "retraining.yaml:17: models[1].window_days: must be at most 36500, got 1000000. To fix: "
    assert load_production(written(folder, text)).broken["words"].startswith(fault)


@pytest.mark.parametrize(
    ("changed", "to", "told"),
    [
        ('"words.jsonl"', '"gone.jsonl"', "models[1].data.path: 'gone.jsonl' matches no file"),
        ("warm_start: false", "warm_start: perhaps", "retraining.yaml:17: models[1].warm_start: must be true or false"),
        ("warm_start: false", "warmstart: false", "models[1].warmstart: is an unknown key"),
        ("warm_start: false", "due: {assertions: {suite: gone.yaml, predictions: p}}", "there is no file 'gone.yaml'"),
        ('path: "*.txt"', "name: nowhere", "models[1].compare_on"),
        (
            "architecture: LlamaForCausalLM}\n",
            "architecture: LlamaForCausalLM}\n      evaluation: {metrics: [luck]}\n",
            "models[1].job.evaluation.metrics",
        ),
        (
            "{architecture: LlamaForCausalLM}\n",
            "{from_pretrained: ./gone}\n",
            "models[1].job.model.from_pretrained",
        ),
        ("job:\n      model: {architecture: L", "job: 5\n    due:\n      model: {architecture: L", "models[1].job"),
    ],
)
def test_the_faults_of_an_entry_break_its_model_alone(folder, changed, to, told):
    text = GOOD.replace(changed, to)
    assert text != GOOD
    production = load_production(written(folder, text))
    assert [model.name for model in production.models] == ["digits"]
    assert list(production.broken) == ["words"]
    assert told in production.broken["words"] and "To fix: " in production.broken["words"]


def test_rules_of_values_are_told_of_an_entry_though_another_one_has_values_of_wrong_types(folder):
    text = GOOD.replace("min_gain: 0.01", "min_gain: much").replace('"words.jsonl"', '"gone.jsonl"')
    third = GOOD[GOOD.index("  - name: words") :].replace("name: words", "name: more")
    production = load_production(written(folder, text + third))
    assert [model.name for model in production.models] == ["more"]
    assert list(production.broken) == ["digits", "words"]
    assert "retraining.yaml:15: models[1].data.path" in production.broken["words"]


@pytest.mark.parametrize("name", ["digits", "a/b", "[1]"])
def test_an_entry_without_a_name_of_its_own_is_called_by_its_place(folder, name):
    production = load_production(written(folder, GOOD.replace("name: words", f"name: {name}")))
    assert [model.name for model in production.models] == ["digits"]
    assert list(production.broken) == ["models[1]"]


def test_a_file_without_a_sound_entry_is_refused_unless_the_registry_has_models(folder):
    text = GOOD.replace("min_gain: 0.01", "min_gain: much").replace('"words.jsonl"', '"gone.jsonl"')
    with pytest.raises(BatchFileError) as raised:
        load_production(written(folder, text))
    assert [fault.place for fault in raised.value.faults] == ["models[0].min_gain", "models[1].data.path"]
    production = load_production(written(folder, text + "registry: true\n"))
    assert (production.models, list(production.broken)) == ((), ["digits", "words"])
    found = with_tagged(production, {"shop.a": TAG, "shop.words": TAG})
    assert [model.name for model in found.models] == ["a"]
    assert list(found.broken) == ["digits", "words"]


TAG = 'job: {model: {architecture: LlamaForCausalLM}, num_steps: 5}\ndata: {path: "words.jsonl", seq_len: 8}\n'


def test_models_of_the_registry_are_told_by_their_tags(folder):
    production = load_production(written(folder, "name: shop\nregistry: true\n"))
    assert production.entry.registry
    found = with_tagged(production, {"shop.a": TAG, "shop.b": "job: [1]", "other.c": TAG, "shop": TAG})
    assert [model.registered_name for model in found.models] == ["shop.a"]
    assert list(found.broken) == ["b"]
    assert "its tag ringmaster.retraining is wrong: job must be a mapping" in found.broken["b"]
    assert "data is missing" in found.broken["b"]


def test_what_the_file_says_of_a_model_goes_before_its_tag(folder):
    production = load_production(written(folder, GOOD))
    assert with_tagged(production, {"shop.words": TAG}).models == production.models


def test_a_tagged_model_may_name_a_data_set_of_the_file(folder):
    text = 'name: shop\nregistry: true\ndatasets: {reviews: {path: "words.jsonl"}}\n'
    (folder / "words.jsonl").write_text("".join(f'{{"text": "number {number}"}}\n' for number in range(50)))
    named = TAG.replace('path: "words.jsonl"', "name: reviews")
    found = with_tagged(load_production(written(folder, text)), {"shop.a": named})
    assert found.broken == {}
    assert found.models[0].job.data.path == str(folder / "words.jsonl")


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("name: quick\nlimits: {latency/p99_s: {at_most: 0.02}}\n", None),
        ("name: quick\n", "shrink: has no limit to keep"),
        (None, "shrink: has no limit to keep"),
        ("name: [1]\n", "policy: policy.yaml:1: name"),
    ],
)
def test_smaller_models_are_trained_where_there_is_a_limit_to_keep(folder, policy, told):
    text = GOOD + "shrink: true\n"
    if policy is not None:
        (folder / "policy.yaml").write_text(policy)
        text += "policy: policy.yaml\n"
    if told is None:
        assert load_production(written(folder, text)).entry.shrink
        return
    with pytest.raises(BatchFileError) as error:
        load_production(written(folder, text))
    assert told in str(error.value) and len(error.value.faults) == 1


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("window_days: 7\n    due: {value: {worth: 1, windows: [7]}}", "are days to choose from, and window_days"),
        ("due: {value: {worth: 1, windows: [7, 1000000]}}", "windows[1]"),
        ("due: {value: {worth: 1, windows: [7, 7]}}", "windows"),
        ("due: {value: {worth: 0}}", "worth"),
        ("due: {value: {worth: 1, price: .inf}}", "price"),
        ("due: {value: {worth: 1, horizon_days: 2000000000}}", "horizon_days"),
    ],
)
def test_the_terms_of_a_decision_by_value_are_bounded(folder, more, fault):
    assert fault in load_production(written(folder, f"{GOOD}    {more}\n")).broken["words"]


def test_windows_to_choose_from_need_rows_to_measure_the_champion_on(folder):
    text = GOOD.replace('    compare_on: {path: "*.txt", seq_len: 8}\n', "")
    assert not load_production(written(folder, text + "    due: {value: {worth: 1}}\n")).broken
    broken = load_production(written(folder, text + "    due: {value: {worth: 1, windows: [7, 14]}}\n")).broken
    assert "need rows of their own to measure the champion on" in broken["words"]


def test_prices_by_the_hour_are_keys_of_the_file_with_their_lines(folder):
    price = [float(hour) for hour in range(24)]
    keys = f"price: {price}\ntime_zone: Europe/Berlin\nat_most: {{money: 3}}\nnight: {{budget: 2}}\n"
    production = load_production(written(folder, GOOD + keys))
    (tariffs,) = terms_features(production.planning())
    assert production.objective == "cost" and tariffs.every.price.values == tuple(price) and tariffs.max_money == 3.0
    assert load_production(written(folder, GOOD + "objective: emissions\ncarbon: 3\n")).objective == "emissions"
    bad = "price: [1, 2]\ntime_zone: Mars\nnight: {budget: 2, price_per_device_hour: 2.5}\n"
    for text in (GOOD + bad, f"name: shop\nregistry: true\n{bad}"):
        with pytest.raises(BatchFileError) as caught:
            load_production(written(folder, text))
        assert "'Mars' is not a time zone" in str(caught.value.faults)
    with pytest.raises(BatchFileError) as caught:
        load_production(written(folder, GOOD + bad.replace("Mars", "UTC")))
    assert [fault.place for fault in caught.value.faults] == ["price", "night.price_per_device_hour"]
    assert all(fault.line for fault in caught.value.faults)
