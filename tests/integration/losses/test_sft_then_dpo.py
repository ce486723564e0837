"""Fine-tuning of an adapter, then DPO of that adapter or of a new one on the merged model, as jobs of one batch."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from transformers import LlamaForCausalLM

from ringmaster.codec import to_json
from ringmaster.features.adaptation.rewriting import EvaluationOrder
from ringmaster.techniques import DataSpec
from ringmaster.techniques.data import prepare
from ringmaster.techniques.job_specs import CONTINUE, MERGE
from ringmaster.techniques.models.peft_format import base_of
from tests.integration.evaluating import evaluate_model
from tests.integration.losses.test_losses import CALM_ADAMW, LORA, TINY, preference_job
from tests.integration.workbench import ADAMW, SINGLE, Layout, is_bit_equal, largest_difference
from tests.matrix import matrix

ROOT = Path(__file__).parents[3]
ANSWERS = DataSpec(factory="tests.integration.losses.pairs:answers")


@pytest.fixture(scope="module")
def sft(bench, tmp_path_factory):
    """A fine-tuned adapter, and the folder of the model that it is on."""
    folder = tmp_path_factory.mktemp("sft")
    base = bench.train(bench.job(TINY, data=ANSWERS, optimizer=ADAMW), SINGLE, folder / "base").order.model_dir
    job = bench.job(TINY, data=ANSWERS, adapter=LORA, optimizer=replace(ADAMW, lr=0.02), base="base")
    return bench.train(job, SINGLE, folder / "sft", weights_from=base)


def dpo(bench, sft, folder, how, *, layout=SINGLE, **changes):
    adapter = replace(LORA, base_adapter=how)
    job = preference_job(bench, "dpo", adapter=adapter, base="sft", **changes)
    return bench.train(job, layout, folder, weights_from=sft.order.model_dir)


def test_dpo_goes_on_from_the_adapter_and_compares_with_it(bench, sft, tmp_path):
    still = dpo(bench, sft, tmp_path / "still", CONTINUE, num_steps=1, optimizer=replace(CALM_ADAMW, lr=0.0))
    assert still.losses == pytest.approx([0.693147], abs=1e-6)
    assert is_bit_equal(still.weights, sft.weights)
    trained = dpo(bench, sft, tmp_path / "trained", CONTINUE)
    assert trained.losses[0] == pytest.approx(0.693147, abs=1e-6)
    assert 1e-4 < largest_difference(trained.weights, sft.weights) < 0.1
    assert base_of(Path(trained.order.model_dir)) == base_of(Path(sft.order.model_dir))


LAYOUTS = [Layout("ddp", 2, {"micro_batch": 2}), Layout("fsdp", 2, {"reshard": True})]


@pytest.mark.parametrize("layout", matrix(LAYOUTS, quick=LAYOUTS[1:]))
def test_every_technique_goes_on_alike(bench, sft, tmp_path, layout):
    expected = dpo(bench, sft, tmp_path / "single", CONTINUE)
    trained = dpo(bench, sft, tmp_path / "other", CONTINUE, layout=layout)
    assert largest_difference(trained.weights, expected.weights) <= 1e-4
    assert trained.losses == pytest.approx(expected.losses, abs=5e-6)


def test_a_new_adapter_may_be_put_on_the_merged_model(bench, sft, tmp_path):
    trained = dpo(bench, sft, tmp_path, MERGE)
    assert trained.losses[0] == pytest.approx(0.693147, abs=1e-6)
    assert float(next(value for name, value in sft.weights.items() if "lora_B" in name).abs().max()) > 1e-3
    assert largest_difference(trained.weights, sft.weights) > 0.1  # another A was drawn
    assert base_of(Path(trained.order.model_dir)) == Path(sft.order.model_dir)


def test_an_evaluation_on_request_does_not_take_the_base_for_the_reference(bench, sft, tmp_path):
    trained = dpo(bench, sft, tmp_path, CONTINUE)
    order = EvaluationOrder(
        job=trained.order.job,
        data=to_json(prepare(trained.order.job.data, cache_dir=bench.cache_dir)),
        model_dir=trained.order.model_dir,
        slot=replace(bench.slot(0), cores=()),
        cache_dir=str(bench.cache_dir),
    )
    assert math.isnan(evaluate_model(order)["loss"])


@pytest.mark.full
def test_a_batch_of_pretraining_sft_and_dpo_runs_and_is_recorded(tmp_path):
    from peft import PeftModel  # imports bitsandbytes, which takes a second

    model, adapter = to_json(TINY), {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"]}
    shared = {"model": {"architecture": model["architecture"], "config": model["config"]}, "num_steps": 3}
    shared |= {"global_batch_size": 8, "techniques": ["single"]}
    pairs = {"factory": "tests.integration.losses.pairs:preferences"}
    jobs = [
        {**shared, "name": "base", "data": {"factory": ANSWERS.factory}},
        {**shared, "name": "sft", "base": "base", "adapter": adapter, "data": {"factory": ANSWERS.factory}},
        {**shared, "name": "dpo", "base": "sft", "adapter": {}, "data": pairs, "loss": "dpo"},
        {**shared, "name": "new", "base": "sft", "adapter": {"rank": 2, "base_adapter": "merge"}, "data": pairs}
        | {"loss": "dpo"},
    ]
    file = tmp_path / "batch.yaml"
    file.write_text(yaml.safe_dump({"devices": {"cpu": 1}, "jobs": jobs}))
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "RINGMASTER_HOME": str(tmp_path / "home"), "PYTHONPATH": paths}

    def ringmaster(*arguments):
        command = [sys.executable, "-m", "ringmaster.flows.entry", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    result = json.loads(ringmaster("run", str(file), "--json"))
    folders = {job["name"]: Path(job["model_dir"]) for job in result["jobs"]}
    uris = {job["name"]: job["model_uri"] for job in result["jobs"]}
    assert base_of(folders["dpo"]) == folders["base"]
    assert json.loads((folders["dpo"] / "adapter_config.json").read_text())["r"] == 4
    PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folders["base"]), folders["dpo"])
    from ringmaster.flows.lineage.home import LineageHome

    home = LineageHome(folder=tmp_path / "home")
    parents = {
        name: [home.snapshot.nodes[id].record for id in home.find(uris[name]).record.parents]
        for name in ("sft", "dpo", "new")
    }
    assert {name: [each.registered_name.rpartition(".")[2] for each in said] for name, said in parents.items()} == {
        "sft": ["base"],
        "dpo": ["base", "sft"],
        "new": ["sft"],
    }
