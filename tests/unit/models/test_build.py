import dataclasses
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from ringmaster.compat.transformers import MODEL_CONSTRUCTION
from ringmaster.techniques.data_source import SampleTensor
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.model_facts import check_attention, why_no_attention
from ringmaster.techniques.models.architectures import (
    architecture,
    fresh_config,
    instantiate,
    is_architecture,
    known_architectures,
)
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_model
from tests.unit.models.conftest import FOUR, GPT2, IMAGES, LLAMA, RESNET, TOKENS, VIT


def configured(spec, **fields):
    return dataclasses.replace(spec, config={**spec.config, **fields})


def same(model, other):
    states = model.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def exported(folder, spec, data, seed=0):
    model = build_model(spec, data=data, seed=seed)
    export_model(folder, spec=spec, model=model, state=model.state_dict(), prepared=data)
    return model


@pytest.mark.parametrize(("spec", "data"), FOUR)
def test_first_weights_are_a_function_of_the_seed_alone(spec, data):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.random.get_rng_state()
    first = build_model(spec, data=data, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    assert same(first, build_model(spec, data=data, seed=1))
    assert not same(first, build_model(spec, data=data, seed=2))


@pytest.mark.parametrize(("spec", "data"), FOUR)
def test_models_are_built_to_train_in_fp32_on_the_cpu(spec, data):
    model = build_model(configured(spec, dtype="bfloat16"), data=data, seed=0)
    assert model.training
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}
    assert not getattr(model.config, "use_cache", False)
    assert model.config._attn_implementation == ("eager" if spec is RESNET else "sdpa")


@pytest.mark.parametrize(("attention", "implementation"), [("sdpa", "sdpa"), ("flex", "flex_attention")])
def test_attention_is_computed_as_the_job_says(attention, implementation):
    model = build_model(dataclasses.replace(LLAMA, attention=attention), data=TOKENS, seed=0)
    assert model.config._attn_implementation == implementation
    assert same(model, build_model(LLAMA, data=TOKENS, seed=0))  # the first weights are the same under both


def test_flash_attention_is_asked_of_its_package(monkeypatch):
    monkeypatch.setattr("ringmaster.techniques.model_facts.FLASH_PACKAGE", "json")
    check_attention(dataclasses.replace(LLAMA, attention="flash"))
    monkeypatch.setattr("ringmaster.techniques.model_facts.FLASH_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="needs the package flash-attn"):
        build_model(dataclasses.replace(LLAMA, attention="flash"), data=TOKENS, seed=0)


def test_devices_that_cannot_compute_attention_so_are_told():
    def reason(kind, attention, precision):
        job = Job(name="a", model=ModelSpec(attention=attention), data=DataSpec(), precision=precision)
        return why_no_attention(job, device_kind=kind)

    assert reason("cpu", "auto", "fp32") is reason("cpu", "sdpa", "fp32") is reason("gpu", "flash", "bf16") is None
    assert reason("gpu", "flex", "fp32") is None
    assert "flash is a GPU's" in reason("cpu", "flash", "bf16")
    assert "flash computes in bf16 only" in reason("gpu", "flash", "fp32")
    assert "flex has no backward on CPUs" in reason("cpu", "flex", "fp32")


def test_what_the_config_leaves_open_is_the_datas():
    llama = build_model(LLAMA, data=TOKENS, seed=0).config
    assert (llama.vocab_size, llama.bos_token_id, llama.eos_token_id, llama.pad_token_id) == (64, 0, 0, None)
    vit = build_model(VIT, data=IMAGES, seed=0).config
    assert (vit.num_labels, vit.image_size, vit.num_channels) == (5, 8, 1)
    assert build_model(RESNET, data=IMAGES, seed=0).config.num_channels == 1
    assert build_model(configured(LLAMA, vocab_size=100), data=TOKENS, seed=0).config.vocab_size == 100


CLIP = ModelSpec(
    architecture="CLIPForImageClassification",
    config={
        "vision_config": {"patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "text_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
)
CONVNEXT = ModelSpec(
    architecture="ConvNextForImageClassification",
    config={"num_stages": 2, "hidden_sizes": [4, 8], "depths": [1, 1], "image_size": 32},
)


WIDE = dataclasses.replace(
    IMAGES, image_size=None, tensors=(SampleTensor(name="pixel_values", dtype="float32", shape=(1, 8, 16)),)
)


def test_a_part_for_images_gets_what_the_images_are():
    vision = build_model(CLIP, data=IMAGES, seed=0).config.vision_config
    assert (vision.image_size, vision.num_channels) == (8, 1)
    hiera = fresh_config(ModelSpec(architecture="HieraForImageClassification", config={"patch_size": [2, 2]}), IMAGES)
    assert list(hiera.image_size) == [8, 8]


def test_models_that_take_images_of_any_size_get_them():
    assert build_model(CONVNEXT, data=IMAGES, seed=0).config.image_size == 32
    sizes = {"image_size": 28, "patch_size": 4, "num_channels": 1, "hidden_size": 16, "num_hidden_layers": 1}
    dinov2 = configured(ModelSpec(architecture="Dinov2ForImageClassification"), num_attention_heads=2, **sizes)
    model = build_model(dinov2, data=IMAGES, seed=0)
    assert model.config.image_size == 28
    assert model(pixel_values=torch.zeros(1, 1, 8, 8)).logits.shape == (1, 5)


def test_special_tokens_outside_a_small_vocabulary_are_left_out():
    nameless = dataclasses.replace(TOKENS, end_of_text_id=None)
    config = build_model(configured(GPT2, pad_token_id=50256), data=nameless, seed=0).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


def test_positions_reach_as_far_as_the_samples():
    long = dataclasses.replace(TOKENS, seq_len=1500)
    model = build_model(GPT2, data=long, seed=0).eval()
    assert model.config.n_positions == 1500
    assert model(input_ids=torch.zeros(1, 1500, dtype=torch.long)).logits.shape == (1, 1500, 64)


@pytest.mark.parametrize(
    ("spec", "data", "says"),
    [
        (ModelSpec(), TOKENS, "none given.*from_pretrained or both"),
        (ModelSpec(architecture="A", factory="b:c"), TOKENS, "architecture and factory given"),
        (ModelSpec(factory="b:c", config={"a": 1}), TOKENS, "give kwargs"),
        (dataclasses.replace(LLAMA, kwargs={"a": 1}), TOKENS, "give config"),
        (ModelSpec(architecture="LamaForCausalLM"), TOKENS, "did you mean.*LlamaForCausalLM"),
        (ModelSpec(architecture="AutoTokenizer"), TOKENS, "no architecture 'AutoTokenizer'"),
        (configured(LLAMA, num_hidden_layers="two"), TOKENS, "refuses its config.*num_hidden_layers"),
        (configured(LLAMA, hidden_act="no-such"), TOKENS, "refuses its config"),
        (
            configured(LLAMA, vocab_size=10),
            TOKENS,
            r"vocab_size 10, and words has 64 tokens.*resize_token_embeddings\(64",
        ),
        (configured(GPT2, n_positions=8), TOKENS, "has positions for 8 tokens, and words has 12.*lower data.seq_len"),
        (configured(VIT, num_labels=3), IMAGES, "num_labels 3, and shapes has 5"),
        (configured(VIT, image_size=16), IMAGES, "image_size 16, and shapes has 8"),
        (configured(VIT, image_size=[16, 16]), IMAGES, "image_size 16, and shapes has 8"),
        (configured(VIT, image_size=8), WIDE, "image_size 8, and shapes has 8 x 16"),
        (
            configured(CLIP, vision_config={**CLIP.config["vision_config"], "image_size": 16}),
            IMAGES,
            "vision_config.image_size 16, and shapes has 8.*data.kwargs.image_size",
        ),
        (configured(CLIP, vision_config={"num_channels": 3}), IMAGES, "vision_config.num_channels 3, and shapes has 1"),
        (configured(RESNET, num_channels=3), IMAGES, "num_channels 3, and shapes has 1"),
        (configured(VIT, patch_size=16), IMAGES, "patches of 16.*divisor of 8"),
        (dataclasses.replace(LLAMA, attention="fast"), TOKENS, "attention 'fast' is unknown.*auto, sdpa, flash, flex"),
        (dataclasses.replace(configured(LLAMA, attn_implementation="eager"), attention="sdpa"), TOKENS, "set the same"),
        (ModelSpec(factory="b:c", attention="sdpa"), TOKENS, "chosen for Hugging Face's models"),
        (ModelSpec(from_pretrained="/no/such/model"), TOKENS, "'/no/such/model' cannot be loaded"),
    ],
)
def test_a_wrong_spec_says_what_to_do(spec, data, says):
    with pytest.raises(ValueError, match=says):
        build_model(spec, data=data, seed=0)


def test_architectures_are_known_by_name():
    names = known_architectures()
    assert {"LlamaForCausalLM", "GPT2LMHeadModel", "ViTForImageClassification", "ResNetModel"} <= names
    assert not {"AutoModel", "AutoModelForCausalLM", "LlamaPreTrainedModel", "LlamaConfig", "Trainer"} & names
    some = sorted(names)[::200]  # each imports its module
    assert all(issubclass(getattr(transformers, name), transformers.PreTrainedModel) for name in some)


def test_names_of_architectures_cost_no_torch():
    names = "import sys, ringmaster.techniques.models.architectures as models; models.known_architectures()"
    code = f"{names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_that_automatic_classes_know_costs_no_import_of_transformers():
    asked = (
        "import sys, ringmaster.techniques.models.architectures as models; models.is_architecture('LlamaForCausalLM')"
    )
    code = f"{asked}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_are_architectures_that_the_whole_list_has():
    known = known_architectures()
    tables = Path(transformers.__file__).parent / "models" / "auto" / "modeling_auto.py"
    named = set(re.findall(r'"(\w+)"', tables.read_text()))
    others = {"AutoModel", "LlamaConfig", "Trainer", "LlamaPreTrainedModel", "bert", "NoSuchModel", ""}
    wrong = {name for name in named | set(sorted(known)[::20]) | others if is_architecture(name) != (name in known)}
    for name in wrong:  # a class that a table names and transformers does not have is refused at its first use
        assert name in named
        with pytest.raises(ValueError, match="has no architecture"):
            architecture(name)


def test_a_pretrained_folder_gives_its_weights_and_config(tmp_path):
    model = exported(tmp_path / "m", LLAMA, TOKENS)
    again = build_model(ModelSpec(from_pretrained=str(tmp_path / "m")), data=TOKENS, seed=9)
    assert type(again) is transformers.LlamaForCausalLM
    assert same(model, again)
    assert again.training
    assert not again.config.use_cache


def test_one_thread_at_a_time_makes_or_loads_a_model(tmp_path, monkeypatch):
    """While transformers loads a model, no weights of any model are tied, and the endpoint loads bases in threads."""
    exported(tmp_path, configured(LLAMA, tie_word_embeddings=True), TOKENS)
    begin, was_free = transformers.PreTrainedModel.__init__, []

    def begin_model(model, *args, **kwargs):
        was_free.append(pool.submit(MODEL_CONSTRUCTION.acquire, blocking=False).result())
        begin(model, *args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", begin_model)
    with ThreadPoolExecutor() as pool:
        build_model(LLAMA, data=TOKENS, seed=0)
        instantiate(fresh_config(LLAMA, TOKENS))
        num_made = len(was_free)
        loaded = build_model(ModelSpec(from_pretrained=str(tmp_path)), data=TOKENS, seed=0)
    assert 0 < num_made < len(was_free)
    assert not any(was_free)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_pretrained_head_is_fresh_only_where_told(tmp_path):
    exported(tmp_path / "m", VIT, IMAGES)
    name = str(tmp_path / "m")
    nine = dataclasses.replace(IMAGES, num_labels=9)
    with pytest.raises(ValueError, match=r"num_labels 5, and shapes has 9.*fresh head"):
        build_model(ModelSpec(from_pretrained=name), data=nine, seed=0)
    told = ModelSpec(from_pretrained=name, config={"num_labels": 9})
    first = build_model(told, data=nine, seed=1)
    assert first.classifier.weight.shape[0] == 9
    assert same(first, build_model(told, data=nine, seed=1))
    other = build_model(told, data=nine, seed=2)
    assert not torch.equal(first.classifier.weight, other.classifier.weight)
    assert same(first.vit, other.vit)


def test_pretrained_weights_that_do_not_fit_are_refused(tmp_path):
    exported(tmp_path / "m", LLAMA, TOKENS)
    name = str(tmp_path / "m")
    for fields, says in (
        ({"num_hidden_layers": 3}, "layers.2.*is missing, and 6 more"),
        ({"hidden_size": 24}, r"is \[.*\], not \[.*\]"),
    ):
        with pytest.raises(ValueError, match=says):
            build_model(ModelSpec(from_pretrained=name, config=fields), data=TOKENS, seed=0)


def test_pickled_weights_are_never_loaded(tmp_path):
    model = exported(tmp_path / "m", LLAMA, TOKENS)
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled ones are never loaded"):
        build_model(ModelSpec(from_pretrained=str(tmp_path / "m")), data=TOKENS, seed=0)


@pytest.mark.parametrize(("spec", "data"), FOUR)
def test_a_base_gives_all_first_weights(tmp_path, spec, data):
    base = exported(tmp_path / "base", spec, data, seed=1)
    assert same(build_model(spec, data=data, seed=2, weights_from=tmp_path / "base"), base)


def test_a_base_that_does_not_fit_is_refused(tmp_path):
    exported(tmp_path / "base", LLAMA, TOKENS)
    for fields, says in (
        ({"num_hidden_layers": 3}, "layers.2.* is missing"),
        ({"num_hidden_layers": 1}, "layers.1.* has no place"),
        ({"intermediate_size": 48}, "not"),
    ):
        with pytest.raises(ValueError, match=says):
            build_model(configured(LLAMA, **fields), data=TOKENS, seed=0, weights_from=tmp_path / "base")


def test_a_base_that_learnt_other_words_is_refused(tmp_path):
    def data(vocabulary, folder):
        (tmp_path / folder / "tokenizer").mkdir(parents=True)
        (tmp_path / folder / "tokenizer" / "tokenizer.json").write_text('{"model": {"vocab": %s}}' % vocabulary)  # noqa: UP031
        return dataclasses.replace(TOKENS, folder=str(tmp_path / folder))

    own = data('{"a": 0, "b": 1}', "own")
    exported(tmp_path / "base", LLAMA, own)
    build_model(LLAMA, data=own, seed=0, weights_from=tmp_path / "base")
    with pytest.raises(ValueError, match=r"another tokenizer.*set data.tokenizer to .*base"):
        build_model(LLAMA, data=data('{"a": 1, "b": 0}', "other"), seed=0, weights_from=tmp_path / "base")


def test_a_factorys_model_is_built_seeded_and_continued(users, tmp_path):
    spec = ModelSpec(factory=f"{users}:tied", kwargs={"width": 4})
    base = exported(tmp_path / "base", spec, TOKENS, seed=1)
    assert base.embed.weight.shape == (16, 4)
    assert same(base, build_model(spec, data=TOKENS, seed=1))
    assert same(base, build_model(spec, data=TOKENS, seed=2, weights_from=tmp_path / "base"))
    wider = ModelSpec(factory=f"{users}:tied", kwargs={"width": 6})
    with pytest.raises(ValueError, match=r"does not fit Tied.*same factory and kwargs"):
        build_model(wider, data=TOKENS, seed=2, weights_from=tmp_path / "base")
    with pytest.raises(ValueError, match="does not fit Sequential"):
        build_model(ModelSpec(factory=f"{users}:stack"), data=TOKENS, seed=0, weights_from=tmp_path / "base")
    with pytest.raises(ValueError, match=r"nowhere/model.safetensors cannot be read: No such file.*To fix: "):
        build_model(spec, data=TOKENS, seed=0, weights_from=tmp_path / "nowhere")


def test_a_factory_must_return_a_module(users):
    with pytest.raises(ValueError, match="returned int"):
        build_model(ModelSpec(factory=f"{users}:nothing"), data=TOKENS, seed=0)
