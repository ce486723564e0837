"""What a job's optimizer and its frozen parameters ask for is checked before anything is planned."""

from dataclasses import replace

import pytest

from ringmaster.errors import StepError
from ringmaster.features.kernels.job import Numerics
from ringmaster.features.local_updates.job import LocalUpdates
from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec, OptimizerSpec, registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.estimates.job_preflight import preflight_job
from ringmaster.techniques.job_specs import ParameterGroup
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.preflight_result import PreflightOrder
from ringmaster.techniques.technique import KERNELS, GangShape, training_state_bytes
from ringmaster.techniques.training.fused.group_requirements import grouping_obstacle

LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("refusals")


@pytest.fixture(scope="module")
def job(folder):
    (folder / "text.txt").write_text("two words\n" * 200)
    return Job(
        name="a",
        model=ModelSpec(architecture="LlamaForCausalLM", config=LLAMA),
        data=DataSpec(path=str(folder / "text.txt"), seq_len=8, vocab_size=300),
        global_batch_size=2,
        num_steps=3,
    )


def preflight(job, folder, *techniques):
    order = PreflightOrder(
        jobs=(job,),
        shapes=(GangShape(kind="cpu", num_devices=2, memory_bytes=1 << 33),),
        techniques={name: registry.dotted_path(name) for name in techniques},
        cache_dir=str(folder),
    )
    return preflight_job(job, order)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_a_technique_that_holds_parts_of_matrices_says_so(job, folder, name):
    found = preflight(replace(job, optimizer=OptimizerSpec(name=name)), folder, "zero1", "zero2")
    assert {candidate.technique for candidate in found.candidates} == {"zero1"}
    assert [refusal.reason for refusal in found.refusals] == [
        f"{name} needs whole matrices, and zero2 holds a part of each"
    ]


def test_local_updates_are_for_local_alone_and_local_for_them_alone(job, folder):
    local = job.with_features(LocalUpdates(workers=2, sync_every=8))
    found = preflight(local, folder, "ddp", "local")
    assert {(each.technique, each.num_devices) for each in found.candidates} == {("local", 2)}
    assert {each.config["micro_batch"] for each in found.candidates} == {found.exact_chunk} == {1}
    assert [each.reason for each in found.refusals] == ["local_updates, of which ddp knows nothing"]
    plain = preflight(job, folder, "ddp", "local")
    assert {each.technique for each in plain.candidates} == {"ddp"}
    assert [each.reason for each in plain.refusals] == ["local is for jobs with local_updates"]


def test_kernels_are_searched_for_jobs_with_numerics_and_those_that_are_not_there_are_refused(job, folder, monkeypatch):
    def kernels(found):
        return {each.config.get(KERNELS) for each in found.candidates}

    assert kernels(preflight(job, folder, "ddp")) == {None}
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = preflight(job.with_features(Numerics(tolerance=1e-5)), folder, "ddp")
    assert kernels(found) == {None, "attention:eager", "optimizer:foreach"}
    (refusal,) = found.refusals
    assert refusal.config == {KERNELS: "compile:default"}
    assert "needs a C++ compiler" in refusal.reason


def test_lion_needs_no_whole_matrices(job, folder):
    found = preflight(replace(job, optimizer=OptimizerSpec(name="lion")), folder, "zero2")
    assert {candidate.technique for candidate in found.candidates} == {"zero2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze": ("lm_haed.*",)}, r"freeze\[0\]: 'lm_haed\.\*' matches no parameter.*lm_head\.weight"),
        ({"freeze": ("*",)}, "leaves no parameter to train"),
        (
            {"optimizer": OptimizerSpec(groups=(ParameterGroup(match="lm_haed.*", lr=1.0),))},
            r"optimizer\.groups\[0\]\.match: 'lm_haed\.\*' matches no trained parameter",
        ),
        (
            {
                "optimizer": OptimizerSpec(groups=(ParameterGroup(match="lm_head.*", lr=1.0),)),
                "freeze": ("lm_head.*",),
            },
            "matches no trained parameter",
        ),
        ({"optimizer": OptimizerSpec(name="lion", options={"betas": [2, 2]})}, "optimizer lion: betas must be"),
    ],
    ids=["freeze", "nothing", "group", "frozen-group", "option"],
)
def test_a_job_that_names_no_parameters_is_a_fault_before_it_is_planned(job, folder, changes, message):
    with pytest.raises(StepError, match=message) as caught:
        preflight(replace(job, **changes), folder, "single")
    assert "To fix: " in str(caught.value)


def test_groups_of_adapters_take_optimizers_of_single_elements(job, folder):
    facts = model_facts(job.model, data=prepare(job.data, cache_dir=folder))

    def reason(**optimizer):
        adapted = replace(job, adapter=Adapter(targets=("q_proj",)), optimizer=OptimizerSpec(**optimizer))
        return grouping_obstacle([adapted, replace(adapted, name="b")], facts)

    assert reason(name="lion") is None
    assert reason(groups=(ParameterGroup(match="*.lora_B.*", lr=1.0),)) is None
    assert "muon, which needs whole matrices" in reason(name="muon")
    assert "a learning rate for each layer" in reason(layer_decay=0.9)


@pytest.mark.parametrize(("name", "num_bytes"), [("adamw", 8), ("lion", 4), ("sgd", 4), ("muon", 4), ("adafactor", 0)])
def test_only_trained_parameters_have_gradients_and_state(job, folder, name, num_bytes):
    facts = model_facts(job.model, data=prepare(job.data, cache_dir=folder), frozen=("*", "!lm_head.*"))
    head = facts.decoder.vocab_size * 16
    state = training_state_bytes(replace(job, optimizer=OptimizerSpec(name=name)), facts)
    assert state == 4 * facts.num_parameters + (4 + num_bytes) * head
