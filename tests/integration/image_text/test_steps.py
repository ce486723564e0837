"""Models of images and texts: trained as TRL and plain transformers train them, and alike under every technique."""

import copy
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText

from ringmaster.errors import StepError
from ringmaster.techniques import Adapter, DataSpec, EvaluationSpec, ModelSpec, registry
from ringmaster.techniques.data import fetch, open_data, prepare
from ringmaster.techniques.data.samples import Sampler
from ringmaster.techniques.data_source import data_source_of
from ringmaster.techniques.models.adapters import attach
from ringmaster.techniques.models.architectures import instantiate
from ringmaster.techniques.models.build import build_model, model_config
from ringmaster.techniques.models.export import export_merged
from ringmaster.techniques.training.bound_loss import bind_loss
from tests import image_texts
from tests.integration.losses.test_trl import settings
from tests.integration.training.test_predicted_memory import assert_foretold, predicted_and_measured
from tests.integration.workbench import ADAMW, SGD, Layout, is_bit_equal, largest_difference
from tests.matrix import matrix

NUM_STEPS, NUM_ROWS = 20, 4
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="no trl, whose numbers these are")
MODELS = {
    "smol": ModelSpec(architecture=image_texts.SMOL, config=image_texts.SMOL_CONFIG),
    "qwen": ModelSpec(architecture=image_texts.QWEN, config=image_texts.QWEN_CONFIG),
    "qwen 2.5": ModelSpec(architecture=image_texts.QWEN_2_5, config=image_texts.QWEN_2_5_CONFIG),
}


def processor_of(name):
    """A processor whose template marks answers, as TRL needs it."""
    if name == "smol":
        return image_texts.smol_processor(template=image_texts.MARKED_TEMPLATE)
    return image_texts.qwen_processor()


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """The data of each family, whose samples have one to three images of several sizes."""
    folder = tmp_path_factory.mktemp("image-text")
    image_texts.write_rows(folder, number=10)
    for name in MODELS:
        image_texts.save_processor(processor_of(name), folder / name)
    return {
        name: DataSpec(
            kind="image-text", path=str(folder / "train.jsonl"), tokenizer=str(folder / name), seq_len=256, held_out=0.2
        )
        for name in MODELS
    }


def job_of(bench, specs, name, **changes):
    plain = bench.job(MODELS[name], data=specs[name], optimizer=ADAMW, num_steps=NUM_STEPS, global_batch_size=NUM_ROWS)
    return replace(plain, **changes)


def prepared_and_training(bench, spec):
    prepared = prepare(spec, cache_dir=bench.cache_dir)
    return prepared, open_data(spec, cache_dir=bench.cache_dir, prepared=prepared)[0]


def rows_for_trl(spec, training):
    """The rows of each training sample, with decoded images, as TRL reads them."""
    folder = Path(spec.path).parent
    every = [json.loads(line)["messages"] for line in Path(spec.path).read_text().splitlines()]
    held_out = {row.number for row in data_source_of(spec).rows(spec) if row.held_out}
    rows = [decoded_row(row, folder) for number, row in enumerate(every, start=1) if number not in held_out]
    assert len(rows) == len(training)
    return rows


def decoded_row(messages, folder):
    images, plain = [], []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        images += [Image.open(folder / part["image"]).convert("RGB") for part in parts if part["type"] == "image"]
        parts = [{"type": "image"} if part["type"] == "image" else part for part in parts]
        plain.append({"role": message["role"], "content": parts})
    return {"messages": plain, "images": images}


@needs_trl
@pytest.mark.parametrize("name", MODELS)
def test_samples_are_those_of_trls_collator(bench, specs, name):
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    prepared, training = prepared_and_training(bench, specs[name])
    rows = rows_for_trl(specs[name], training)
    processor = processor_of(name)
    collated = DataCollatorForVisionLanguageModeling(processor, assistant_only_loss=True)(rows)
    width = collated["input_ids"].shape[1]
    ours = fetch(training, range(len(rows)), width=width)
    assert torch.equal(ours["labels"], collated["labels"])
    assert torch.equal(ours["input_ids"], collated["input_ids"])
    assert (ours["labels"] != -100).any(1).all()
    with torch.device("meta"):
        model = instantiate(model_config(MODELS[name], prepared))
    given = bind_loss(None, model, MODELS[name]).forward_inputs(ours)
    for key in collated.keys() - {"attention_mask", "labels", "mm_token_type_ids"}:
        assert torch.equal(given[key].to(collated[key].dtype), collated[key]), key


def recording(base):
    """A trainer of TRL's that keeps its losses, and reads its rows in their order."""

    class Recording(base):
        losses: tuple[float, ...] = ()

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.losses += (float(loss[0] if isinstance(loss, tuple) else loss),)
            return loss

        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return Recording


def trained_by_trl(base, config, model, rows, *, name, seed, num_training, **more):
    """The losses of 20 steps of a trainer of TRL's on rows with images, in the order of a job."""
    from datasets import Dataset, List
    from datasets import Image as DatasetImage

    sampler = Sampler(num_samples=num_training, global_batch_size=NUM_ROWS, seed=seed)
    order = [int(index) for step in range(NUM_STEPS) for index in sampler.indices(step)]
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=ADAMW.lr)
    table = Dataset.from_list([rows[index] for index in order])
    trainer = recording(base)(
        model=model,
        args=config,
        train_dataset=table.cast_column("images", List(DatasetImage())),
        processing_class=processor_of(name),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        **more,
    )
    trainer.train()
    return trainer.losses


@needs_trl
@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_are_those_of_trl(bench, specs, tmp_path, name):
    from trl import SFTConfig, SFTTrainer

    job = job_of(bench, specs, name)
    prepared, training = prepared_and_training(bench, job.data)
    model = build_model(job.model, data=prepared, seed=job.seed)
    config = SFTConfig(**{**settings(tmp_path), "per_device_train_batch_size": NUM_ROWS}, assistant_only_loss=True)
    rows = rows_for_trl(job.data, training)
    losses = trained_by_trl(SFTTrainer, config, model, rows, name=name, seed=job.seed, num_training=len(training))
    trained = bench.reference(job)
    assert trained.losses == pytest.approx(losses, abs=1e-4)
    exported = AutoModelForImageTextToText.from_pretrained(trained.order.model_dir).state_dict()
    assert largest_difference(exported, model.state_dict()) < 1e-3
    fresh = build_model(job.model, data=prepared, seed=job.seed).state_dict()
    assert all(not torch.equal(fresh[key], value) for key, value in exported.items()), "all parts are trained"


LAYOUTS = [
    Layout("single", 1, {"micro_batch": 1}),
    Layout("single", 1, {"micro_batch": 3, "recompute": "full"}),
    Layout("single", 1, {"recompute": "selective"}),
    Layout("ddp", 2, {"micro_batch": 1}),
    Layout("ddp", 4),
    Layout("zero1", 2, {"micro_batch": 1}),
    Layout("zero2", 2, {"bucket_bytes": 1 << 14}),
    Layout("fsdp", 2, {"reshard": True, "recompute": "full"}),
    Layout("fsdp", 2, {"reshard": False, "micro_batch": 1}),
    Layout("fsdp_static", 2, {"reshard": True}),
    Layout("offload", 1, {"num_slices": 2, "recompute": "full", "host_activations": True}),
]
CASES = [(name, layout) for name in MODELS for layout in LAYOUTS]


@pytest.mark.parametrize(("name", "layout"), matrix(CASES, quick=CASES[3:4], ids=lambda case: f"{case[0]}-{case[1]}"))
def test_every_layout_trains_what_one_device_trains(bench, specs, tmp_path, name, layout):
    job = job_of(bench, specs, name, optimizer=SGD, num_steps=4)
    trained = bench.train(job, layout, tmp_path)
    alone = bench.reference(job)
    assert trained.losses == pytest.approx(alone.losses, abs=1e-5)
    assert largest_difference(trained.weights, alone.weights) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_exact_jobs_have_the_same_bits_on_any_number_of_devices(bench, specs, tmp_path, name):
    job = job_of(bench, specs, name, num_steps=4, exact=True, exact_chunk=1)
    alone = bench.reference(job, Layout("single", 1, {"micro_batch": 1}))
    for layout in (Layout("ddp", 2, {"micro_batch": 1}), Layout("fsdp", 2, {"reshard": True, "micro_batch": 1})):
        trained = bench.train(job, layout, tmp_path / layout.technique)
        assert is_bit_equal(trained.weights, alone.weights), layout


@pytest.mark.parametrize("name", MODELS)
def test_techniques_that_divide_sequences_or_layers_are_refused(bench, specs, name):
    job = job_of(bench, specs, name)
    facts = bench.facts(job)
    assert not facts.whole_batch
    for technique in ("tensor", "context", "pipeline", "mesh", "expert"):
        reason = registry.load(registry.dotted_path(technique)).supports(job, bench.shape(4), facts)
        assert reason is not None and ("texts alone" in reason or "experts" in reason), technique
    for technique in ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp_static"):
        shape = bench.shape(1 if technique == "single" else 2)
        assert registry.load(registry.dotted_path(technique)).supports(job, shape, facts) is None


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout("single"), Layout("fsdp", 2, {"reshard": True})], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_predicted_with_the_tokens_of_images(bench, specs, tmp_path, name, layout):
    """Of samples that are alike: an estimate is one of the sample with the most images."""
    lines = Path(specs[name].path).read_text().splitlines()
    alike = Path(specs[name].path).with_name(f"{name}-alike.jsonl")
    alike.write_text("".join(f"{lines[2]}\n" for _ in lines))
    spec = replace(specs[name], path=str(alike), held_out=0.0, padding="max_length")
    changes = {"data": spec, "global_batch_size": 2 * layout.num_devices, "evaluation": EvaluationSpec(metrics=())}
    found = predicted_and_measured(bench, tmp_path, MODELS[name], layout, **changes)
    assert_foretold(layout.technique, *found)
    few = Path(specs[name].path).with_name(f"{name}-few.jsonl")
    few.write_text("".join(f"{lines[0]}\n" for _ in lines))
    changes["data"] = replace(spec, path=str(few))
    smaller, *_ = predicted_and_measured(bench, tmp_path / "few", MODELS[name], layout, **changes)
    assert smaller["device_bytes"] < found[0]["device_bytes"]


LORA = Adapter(kind="lora", rank=4, alpha=8)
OF_ADAPTERS = [(name, layout) for name in MODELS for layout in (Layout("ddp", 2), Layout("fsdp", 2, {"reshard": True}))]


def base_of(bench, specs, name):
    """The folder of a base with fresh weights and its processor, which is written once."""
    prepared, _ = prepared_and_training(bench, specs[name])
    folder = Path(specs[name].tokenizer).with_name(f"{name}-base")
    if not folder.exists():
        build_model(MODELS[name], data=prepared, seed=3).save_pretrained(folder)
        image_texts.save_processor(processor_of(name), folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_is_read_by_peft_and_merged(bench, specs, tmp_path, name):
    base = base_of(bench, specs, name)
    spec = ModelSpec(from_pretrained=str(base))
    job = job_of(bench, specs, name, model=spec, adapter=LORA, num_steps=4)
    _, training = prepared_and_training(bench, job.data)
    trained = Path(bench.reference(job).order.model_dir)
    export_merged(trained, tmp_path / "merged", spec=spec)
    plain = AutoModelForImageTextToText.from_pretrained(base)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    inputs = bind_loss(None, plain, spec).forward_inputs(fetch(training, range(3)))
    with torch.no_grad():
        before, after = plain(**inputs).logits, merged(**inputs).logits
        adapted = PeftModel.from_pretrained(plain, trained)(**inputs).logits
    assert torch.allclose(adapted, after, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-4)
    assert {file.name for file in Path(base).glob("*processor_config.json")} <= {
        file.name for file in (tmp_path / "merged").iterdir()
    }


@pytest.mark.parametrize(("name", "layout"), matrix(OF_ADAPTERS, quick=[], ids=lambda case: f"{case[0]}-{case[1]}"))
def test_adapters_are_the_same_under_every_layout(bench, specs, tmp_path, name, layout):
    job = job_of(bench, specs, name, adapter=LORA, optimizer=SGD, num_steps=4)
    trained = bench.train(job, layout, tmp_path)
    alone = bench.reference(job)
    assert trained.losses == pytest.approx(alone.losses, abs=1e-5)
    assert largest_difference(trained.weights, alone.weights) < 2e-6
    assert any("visual" in key or "vision_model" in key for key in alone.weights), "both parts are adapted"


def preferences_of(spec):
    """The data of pairs of answers to the first question of each row, which is written once."""
    file = Path(spec.path).with_name("pairs.jsonl")
    if not file.exists():
        rows = [json.loads(line)["messages"] for line in Path(spec.path).read_text().splitlines()]
        pairs = [
            {"prompt": row[:1], "chosen": row[1:2], "rejected": [{"role": "assistant", "content": f"{place} or no."}]}
            for place, row in enumerate(rows)
        ]
        file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return replace(spec, path=str(file), kind="image-preference", held_out=0.0)


@needs_trl
@pytest.mark.full
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["smol", "qwen"])
def test_preferences_are_learnt_as_by_trl(bench, specs, tmp_path, name, adapter):
    from trl import DPOConfig, DPOTrainer

    spec = preferences_of(specs[name])
    job = job_of(bench, {name: spec}, name, loss="dpo", loss_options={"beta": 0.5}, adapter=adapter)
    prepared, training = prepared_and_training(bench, spec)
    folder, rows = Path(spec.path).parent, []
    for line in Path(spec.path).read_text().splitlines():
        pair = json.loads(line)
        of_prompt = decoded_row(pair["prompt"], folder)
        answers = {role: decoded_row(pair[role], folder)["messages"] for role in ("chosen", "rejected")}
        rows.append({"images": of_prompt["images"], "prompt": of_prompt["messages"], **answers})
    config = DPOConfig(**{**settings(tmp_path), "per_device_train_batch_size": NUM_ROWS}, beta=0.5, max_length=None)
    model = build_model(job.model, data=prepared, seed=job.seed)
    reference = copy.deepcopy(model)
    if adapter is not None:
        model = attach(model, adapter, seed=job.seed)
    losses = trained_by_trl(
        DPOTrainer, config, model, rows, name=name, seed=job.seed, num_training=len(training), ref_model=reference
    )
    trained = bench.reference(job)
    assert trained.losses == pytest.approx(losses, abs=2e-4)
    assert losses[-1] < losses[0]


OF_PAIRS = [
    Layout("single", 1, {"micro_batch": 1, "recompute": "full"}),
    Layout("ddp", 2, {"micro_batch": 1}),
    Layout("fsdp", 2, {"reshard": True}),
]


@pytest.mark.full
@pytest.mark.parametrize("layout", OF_PAIRS, ids=str)
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["smol", "qwen"])
def test_preferences_are_learnt_alike_under_every_layout(bench, specs, tmp_path, name, adapter, layout):
    changes = {"loss": "dpo", "loss_options": {"beta": 0.5}, "adapter": adapter, "optimizer": SGD, "num_steps": 4}
    job = job_of(bench, {name: preferences_of(specs[name])}, name, **changes)
    trained, alone = bench.train(job, layout, tmp_path), bench.reference(job)
    assert trained.losses == pytest.approx(alone.losses, abs=1e-5)
    assert largest_difference(trained.weights, alone.weights) < 2e-6
    assert not bench.facts(job).whole_batch


@pytest.mark.full
@pytest.mark.parametrize("name", ["smol", "qwen"])
def test_metrics_of_what_a_model_writes_are_refused(bench, specs, name):
    metrics = EvaluationSpec(metrics=("loss", "generated_exact_match"), max_batches=1)
    with pytest.raises(StepError, match="answers to images are not written for metrics"):
        bench.facts(job_of(bench, specs, name, evaluation=metrics))
