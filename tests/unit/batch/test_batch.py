"""Valid batch files, and batches that are built in Python."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import yaml

from ringmaster.errors import BatchFileError
from ringmaster.features.quotas.job import UserQuota
from ringmaster.features.target.job import Target, Variables
from ringmaster.tasks.batch import Batch, json_schema, load_batch, parse_batch, schema
from ringmaster.tasks.batch.sections import section_of
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.techniques import Adapter, DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec, ScheduleSpec
from ringmaster.techniques.data_source import BUILTIN_SOURCES, data_source_named
from ringmaster.techniques.job_features import feature_kinds, file_keys
from ringmaster.techniques.job_specs import OPTIMIZERS

EXAMPLES = Path(__file__).parents[3] / "examples"
PAIRS = {
    schema.JobEntry: Job,
    schema.Data: DataSpec,
    **{section_of(kind): kind for kind in (ModelSpec, OptimizerSpec, ScheduleSpec, EvaluationSpec, Adapter)},
}


def a_job(**changes) -> Job:
    model = ModelSpec(architecture="LlamaForCausalLM", config={"hidden_size": 64})
    job = Job(name="a", model=model, data=DataSpec(source="python-stdlib", seq_len=64), num_steps=10)
    return dataclasses.replace(job, **changes)


def parse(text: str, folder: Path = Path()) -> Batch:
    return parse_batch(text, folder=folder, name="my.yaml")


def one_job(extra: str = "") -> str:
    return f"""
        jobs:
          - name: a
            model: {{architecture: LlamaForCausalLM, config: {{hidden_size: 64}}}}
            data: {{source: python-stdlib, seq_len: 64}}
            num_steps: 10
            {extra}
        """


def test_where_the_file_is_silent_the_defaults_are_those_of_job():
    assert parse(one_job()).jobs == (a_job(),)


@pytest.mark.parametrize(("section", "dataclass"), PAIRS.items(), ids=lambda cls: cls.__name__)
def test_the_schema_has_the_fields_and_defaults_of_the_dataclass(section, dataclass):
    fields = {field.name: field for field in dataclasses.fields(dataclass)}
    # `loss` has its options; a run makes phases and the paths of what it copied, a sweep parts; features have keys.
    for name in ("loss_options", "phases", "parts", "features", "original_path", "original_held_out_path"):
        fields.pop(name, None)
    only_in_files = {key for kind in file_keys("ENTRY_KEYS") for key in kind.job_keys()}
    of_features = {key for key, kind in feature_kinds().items() if kind.is_in_files}
    of_job = {*schema.PLANNER_KEYS, *of_features, *only_in_files}
    others = of_job if section is schema.JobEntry else set()
    if section is schema.Data:
        kinds = [data_source_named(name).options_class for name in BUILTIN_SOURCES]
        others = {option.name for kind in kinds for option in dataclasses.fields(kind)}
        fields.pop("options")  # the options of all kinds are among the other fields
    assert set(section.model_fields) - others == set(fields)
    for name, field in fields.items():
        described = section.model_fields[name]
        assert described.description
        if dataclasses.is_dataclass(field.default) or isinstance(field.default, tuple):
            continue
        assert described.is_required() == (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if field.default is not dataclasses.MISSING:
            assert described.default == field.default


def test_everything_that_a_job_can_say_arrives():
    batch = parse("""
        name: all
        objective: makespan
        devices: {cpu: 2}
        jobs:
          - name: all.of_it-1
            model: {from_pretrained: org/model, config: {num_labels: 3}}
            base: models:/llama@champion
            adapter: null
            data: {dataset: org/data, kwargs: {name: en}, seq_len: 64, vocab_size: 512, tokenizer: org/tok,
                   text_column: body, split: train, held_out_split: test, held_out: 0}
            precision: bf16
            optimizer: {name: sgd, lr: 1, options: {momentum: 0.9, nesterov: true}}
            schedule: {name: cosine, warmup_steps: 3}
            clip_grad_norm: 1
            global_batch_size: 32
            num_epochs: 2
            evaluation: {every_steps: 30, metrics: [accuracy, loss], max_batches: 4}
            seed: 7
            techniques: [single, fsdp]
            num_devices: [1, 2]
            exact: true
        """)
    assert (batch.name, batch.objective, batch.devices) == ("all", "makespan", {"cpu": 2})
    assert batch.jobs == (
        Job(
            name="all.of_it-1",
            model=ModelSpec(from_pretrained="org/model", config={"num_labels": 3}),
            base="models:/llama@champion",
            data=DataSpec(
                dataset="org/data",
                kwargs={"name": "en"},
                seq_len=64,
                vocab_size=512,
                tokenizer="org/tok",
                options={"text_column": "body"},
                held_out_split="test",
                held_out=0.0,
            ),
            precision="bf16",
            optimizer=OptimizerSpec(name="sgd", lr=1.0, options={"momentum": 0.9, "nesterov": True}),
            schedule=ScheduleSpec(name="cosine", warmup_steps=3),
            clip_grad_norm=1.0,
            global_batch_size=32,
            num_epochs=2.0,
            evaluation=EvaluationSpec(every_steps=30, metrics=("accuracy", "loss"), max_rows=128),
            seed=7,
            techniques=("single", "fsdp"),
            num_devices=(1, 2),
            exact=True,
        ),
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    {
        "3e-4": 3e-4,
        "3.0e-4": 3e-4,
        "1E3": 1e3,
        ".5": 0.5,
        "+2": 2,
        "1_000": 1000,
        "0x10": 16,
        "0o17": 15,
        "010": 10,
        "'3e-4'": "3e-4",
        "no": "no",
        "on": "on",
        "1:30": "1:30",
        "2026-01-01": "2026-01-01",
        "true": True,
        "False": False,
        "~": None,
        "": None,
        "v1.2.3": "v1.2.3",
    }.items(),
)
def test_scalars_mean_what_their_writers_mean(written: str, meant: object):
    """Free-form values, such as a model's config, are not converted to a declared type."""
    (job,) = parse(one_job().replace("hidden_size: 64", f"x: {written}")).jobs
    assert job.model.config["x"] == meant
    assert type(job.model.config["x"]) is type(meant)


def test_the_words_for_no_number_are_refused():
    with pytest.raises(BatchFileError, match="must be a finite number, got -inf"):
        parse(one_job().replace("hidden_size: 64", "x: -.Inf"))


def test_merged_mappings_give_way_to_the_keys_beside_them():
    batch = parse("""
        jobs:
          - &first
            name: a
            model: {architecture: LlamaForCausalLM}
            data: {source: digits}
            num_steps: 10
          - name: b
            <<: [{num_steps: 20}, *first]
            seed: 1
        """)
    second = batch.jobs[1]
    assert (second.name, second.num_steps, second.seed) == ("b", 20, 1)


def test_a_json_file_is_a_batch_file(tmp_path: Path):
    batch = parse(one_job())
    written = Batch.of(name="x", jobs=batch.jobs)
    (tmp_path / "x.json").write_text(written.text)
    assert load_batch(tmp_path / "x.json").jobs == batch.jobs


def test_a_batch_without_a_name_is_called_after_its_file(tmp_path: Path):
    (tmp_path / "nightly.yaml").write_text(one_job())
    assert load_batch(tmp_path / "nightly.yaml").name == "nightly"


def test_a_batch_comes_back_from_json():
    batch = load_batch(EXAMPLES / "mixed_batch.yaml")
    assert Batch.from_json(batch.to_json()) == batch


def test_relative_paths_become_absolute_from_the_folder_of_the_file(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "batch.yaml").write_text("""
        jobs:
          - name: a
            model: {from_pretrained: ./model}
            data: {path: "data/*.jsonl", seq_len: 64, tokenizer: model}
            num_steps: 10
          - name: b
            model: {from_pretrained: model}
            data: {dataset: data}
            num_steps: 10
        """)
    batch = load_batch(tmp_path / "batch.yaml")
    first, second = batch.jobs
    folder = tmp_path.resolve()
    assert batch.folder == folder
    assert first.model.from_pretrained == second.model.from_pretrained == str(folder / "model")
    assert first.data.path == str(folder / "data/*.jsonl")
    assert first.data.tokenizer == str(folder / "model")
    assert second.data.dataset == str(folder / "data")


def test_factories_are_found_beside_the_file_in_packages_and_through_reexports(tmp_path: Path):
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "mine" / "deep" / "models.py").write_text("from elsewhere import build\nif 1:\n    data, rest = 1, 2\n")
    (tmp_path / "starred.py").write_text("from elsewhere import *\n")
    path_before = list(sys.path)
    batch = parse(
        """
        jobs:
          - name: a
            model: {factory: "mine.deep.models:build"}
            data: {factory: "mine.deep.models:data"}
            loss: starred:anything
            num_steps: 1
        """,
        folder=tmp_path,
    )
    assert batch.jobs[0].loss == "starred:anything"
    assert sys.path == path_before


def test_a_name_that_our_packages_have_is_looked_for_in_ours(tmp_path: Path):
    (tmp_path / "ringmaster").mkdir()
    (tmp_path / "ringmaster" / "models.py").write_text("def build(): ...\n")
    text = one_job().replace(
        "architecture: LlamaForCausalLM, config: {hidden_size: 64}", 'factory: "ringmaster.models:build"'
    )
    with pytest.raises(BatchFileError, match=r"module ringmaster\.models cannot be found"):
        parse(text, folder=tmp_path)


def test_batches_built_in_python_are_checked_by_the_same_rules():
    right = Batch.of(name="six-lines", jobs=[a_job(), a_job(name="b", optimizer=OptimizerSpec(lr=3e-4))])
    assert right.jobs[1].optimizer.lr == 3e-4
    assert right.folder == Path().resolve()
    assert Batch.from_json(right.to_json()) == right

    with pytest.raises(BatchFileError) as caught:
        Batch.of(
            name="bad name",
            jobs=[a_job(), a_job(base="nobody"), a_job(name="c", num_steps=-1, clip_grad_norm=math.inf)],
            objective="costs",
            deadlines_s={"c": 0.0, "nobody": 60.0},
        )
    assert [str(fault) for fault in caught.value.faults] == [
        "deadline_s: names 'nobody', which is not a job of this batch. To fix: use the names of its jobs.",
        "name: is not a valid name, got 'bad name'. To fix: give a name of up to 100 letters, digits, '-', '_' and "
        "'.', "
        "such as tonight.",
        "objective: 'costs' is unknown. To fix: did you mean `cost`? Use one of cost, emissions, fairness, "
        "makespan, mean_completion, time-to-target, trade-off, weighted.",
        "jobs[1].name: 'a' is the name of another job already. To fix: give every job a name of its own.",
        "jobs[1].base: no job is named 'nobody'. To fix: the jobs of this batch are a, c; a registered model is "
        "models:/NAME@ALIAS.",
        "jobs[2].deadline_s: must be greater than 0, got 0.0. To fix: give the seconds from the batch's start by which "
        "the job must have ended, such as 3600.",
        "jobs[2].clip_grad_norm: must be a finite number, got inf. To fix: give a finite number.",
        "jobs[2].num_steps: must be at least 1, got -1. To fix: give the number of optimizer steps, such as 60.",
    ]


def test_quotas_of_users():
    text = """
        users: {ana: {max_devices: 4, share: 0.5}, ben: {share: 0.25}}
        jobs:
          - {name: a, model: {from_pretrained: org/model}, data: {source: digits}, num_steps: 1, user: ana}
        """
    batch = parse(text)
    (quotas,) = batch.terms.features
    assert quotas.users == {"ana": UserQuota(max_devices=4, share=0.5), "ben": UserQuota(share=0.25)}
    assert Batch.from_json(batch.to_json()) == batch
    with pytest.raises(BatchFileError) as caught:
        parse(text.replace("0.25", "1.5").replace("4", "0"))
    assert {fault.place for fault in caught.value.faults} == {"users.ana.max_devices", "users.ben.share"}


def test_what_only_the_planner_reads_stands_beside_the_jobs(tmp_path: Path):
    batch = parse("""
        objective: cost
        price_per_device_hour: 2.5
        jobs:
          - &a {name: a, model: {from_pretrained: org/model}, data: {source: digits}, num_steps: 1, deadline_s: 3600}
        grid:
          - template: {<<: *a, name: g, weight: 2}
            over: {deadline_s: [60, 120]}
        """)
    assert [job.name for job in batch.jobs] == ["a", "g-deadline_s60", "g-deadline_s120"]
    assert batch.terms == PlanningTerms(
        objective="cost",
        deadlines_s={"a": 3600, "g-deadline_s60": 60, "g-deadline_s120": 120},
        weights={"g-deadline_s60": 2, "g-deadline_s120": 2},
        price_per_device_hour=2.5,
    )
    again = Batch.of(
        name="again",
        jobs=batch.jobs,
        objective="weighted",
        deadlines_s=batch.deadlines_s,
        weights=batch.weights,
        folder=tmp_path,
    )
    assert (again.jobs, again.deadlines_s, again.weights) == (batch.jobs, batch.deadlines_s, batch.weights)
    assert Batch.from_json(json.loads(json.dumps(again.to_json()))) == again


def test_a_job_with_values_that_have_no_json_form_is_told():
    with pytest.raises(BatchFileError, match=r"jobs\[0\]: .* has no JSON form"):
        Batch.of(name="x", jobs=[a_job(model=ModelSpec(factory="math:sqrt", kwargs={"f": math.sqrt}))])


def test_a_batch_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse(one_job()).name = "other"  # type: ignore[misc]


def test_the_json_schema_names_every_key_and_choice():
    described = json_schema()
    job = described["$defs"]["JobEntry"]
    assert set(job["properties"]) == set(schema.JobEntry.model_fields)
    assert job["additionalProperties"] is False
    assert described["$defs"]["OptimizerSection"]["properties"]["name"]["enum"] == list(OPTIMIZERS)
    template = described["$defs"]["GridEntry"]["properties"]["template"]
    assert template["properties"] == job["properties"]
    assert template["required"] == ["name"]
    json.dumps(described)


# The data of recipes and guides is made by scripts, and the plugin is installed: tests/integration/examples.
ELSEWHERE = {"guides", "plugin", "recipes"}
EXAMPLE_FILES = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.parent.name not in ELSEWHERE)


@pytest.mark.parametrize("path", EXAMPLE_FILES, ids=lambda path: path.stem)
def test_the_examples_are_right(path: Path):
    if {"jobs", "grid"} & set(yaml.safe_load(path.read_text())):
        assert load_batch(path).jobs


def test_the_mixed_batch_is_what_it_promises():
    jobs = load_batch(EXAMPLES / "mixed_batch.yaml").jobs
    rates = {}
    for job in jobs:
        if job.base is None:
            rates.setdefault(job.model.architecture, set()).add(job.optimizer.lr)
    assert len(jobs) >= 8
    assert {name: len(values) for name, values in rates.items()} == {
        "LlamaForCausalLM": 2,
        "GPT2LMHeadModel": 2,
        "ViTForImageClassification": 2,
        "ResNetForImageClassification": 2,
    }
    assert [job.name for job in jobs if job.base] == ["llama-finetuned"]


@pytest.mark.parametrize("loss", ["contrastive", "late-interaction"])
@pytest.mark.parametrize(("said", "found"), [({}, True), ({"hard_negatives": False}, False)])
def test_a_contrastive_loss_learns_from_hard_negatives_where_there_are_some(tmp_path, said, found, loss):
    rows = {"triplets": {"anchor": "a", "positive": "b", "negative": "c"}, "pairs": {"anchor": "a", "positive": "b"}}
    jobs = []
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        job = {"name": name, "model": {"architecture": "BertModel"}, "data": {"path": f"{name}.jsonl"}, "num_steps": 1}
        jobs.append({**job, "loss": {"name": loss, **said}})
    triplets, pairs = parse_batch(json.dumps({"jobs": jobs}), folder=tmp_path, name="batch.json").jobs
    assert (triplets.data.kind, triplets.loss_options["hard_negatives"]) == ("embedding", found)
    assert pairs.loss_options == said


@pytest.mark.parametrize("has_processor", [True, False])
def test_images_are_read_by_the_processor_of_the_pretrained_model(tmp_path, has_processor):
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text(
        json.dumps({"architectures": ["ViTForImageClassification"], "model_type": "vit"})
    )
    (tmp_path / "vit" / "model.safetensors").touch()
    if has_processor:
        (tmp_path / "vit" / "preprocessor_config.json").write_text("{}")
    (tmp_path / "images" / "cats").mkdir(parents=True)
    (tmp_path / "images" / "cats" / "a.png").touch()
    data = {"path": "images"}
    jobs = [
        {"name": name, "model": {"from_pretrained": "vit"}, "data": data | more, "num_steps": 1}
        for name, more in {"own": {}, "said": {"kwargs": {"image_size": 8}}}.items()
    ]
    own, said = parse_batch(json.dumps({"jobs": jobs}), folder=tmp_path, name="batch.json").jobs
    assert own.data.kind == "image-classification"
    assert own.data.kwargs == ({"processor": str(tmp_path / "vit")} if has_processor else {})
    assert said.data.kwargs == {"image_size": 8}


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_rows_are_read_by_the_tokenizer_of_the_pretrained_model(tmp_path, has_tokenizer):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(
        json.dumps({"architectures": ["BertForMaskedLM"], "model_type": "bert"})
    )
    (tmp_path / "bert" / "model.safetensors").touch()
    if has_tokenizer:
        (tmp_path / "bert" / "tokenizer.json").write_text("{}")
    (tmp_path / "rows.csv").write_text("text,label\na,b\n")
    model = {"from_pretrained": "bert", "architecture": "BertForSequenceClassification"}
    job = {"name": "a", "model": model, "data": {"path": "rows.csv"}, "num_steps": 1}
    (read,) = parse_batch(json.dumps({"jobs": [job]}), folder=tmp_path, name="batch.json").jobs
    assert read.data.kind == "text-classification"
    assert read.data.tokenizer == (str(tmp_path / "bert") if has_tokenizer else None)
    (tmp_path / "prose.txt").write_text("some words")
    job |= {"model": {"from_pretrained": "bert"}, "data": {"path": "prose.txt", "seq_len": 8}}
    (read,) = parse_batch(json.dumps({"jobs": [job]}), folder=tmp_path, name="batch.json").jobs
    assert (read.data.kind, read.data.tokenizer) == (None, str(tmp_path / "bert") if has_tokenizer else None)
    job |= {"data": {"dataset": "prose", "seq_len": 8}}
    (read,) = parse_batch(json.dumps({"jobs": [job]}), folder=tmp_path, name="batch.json").jobs
    assert read.data.tokenizer == (str(tmp_path / "bert") if has_tokenizer else None)


def test_learning_rates_to_try_are_jobs_before_theirs_with_the_same_user():
    target = Target(metric="loss", at_most=1.0)
    job = a_job(
        num_steps=100,
        evaluation=EvaluationSpec(every_steps=10),
        features=(target, Variables(lr=(1e-3, 2e-3))),
    )
    other = a_job(name="b")
    batch = Batch.of(name="x", jobs=[other, job], objective="time-to-target", users={"a": "ana"}, weights={"a": 2.0})
    names = ["b", "a.lr-0.001", "a.lr-0.002", "a"]
    assert [each.name for each in batch.jobs] == names
    assert batch.users == {"a": "ana", "a.lr-0.001": "ana", "a.lr-0.002": "ana"} and batch.weights == {"a": 2.0}
    again = Batch.of(name="x", jobs=batch.jobs, objective="time-to-target")
    assert again.jobs == batch.jobs and Batch.from_json(batch.to_json()) == batch


def test_jobs_whose_files_a_run_has_copied_make_a_batch(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a b"}\n')
    data = DataSpec(path=str(tmp_path / "rows.jsonl"), seq_len=8, original_path="mine/*.jsonl")
    job = a_job(data=data)
    assert Batch.of(name="x", jobs=[job]).jobs == (job,)
