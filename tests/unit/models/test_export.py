import dataclasses
import json

import pytest
import torch
import transformers
from PIL import Image
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers

from ringmaster.techniques.data import prepare
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.export import export_model
from tests.unit.data.test_chat_templates import ENDS, saved
from tests.unit.models.conftest import FOUR, GPT2, LLAMA, TOKENS, VIT


def trained(model):
    """A state that differs from that of a new model. Its tensors are separate, as in a gathered state."""
    return {name: tensor.detach().clone() + 1 for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("spec", "data"), FOUR)
def test_what_is_exported_is_what_from_pretrained_loads(tmp_path, spec, data):
    model = build_model(spec, data=data, seed=0)
    state = trained(model)
    export_model(tmp_path / "m", spec=spec, model=model, state=state, prepared=data)
    cls = getattr(transformers, spec.architecture)
    loaded, info = cls.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    assert getattr(loaded.config, "use_cache", True)
    assert loaded.config.architectures == [spec.architecture]


def test_a_tied_weight_is_written_once_whichever_names_the_state_has(tmp_path):
    model = build_model(GPT2, data=TOKENS, seed=0)
    for left_out in ("lm_head.weight", "transformer.wte.weight", None):
        state = {name: tensor for name, tensor in trained(model).items() if name != left_out}
        export_model(tmp_path / "m", spec=GPT2, model=model, state=state, prepared=TOKENS)
        with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
            assert "transformer.wte.weight" in file.keys()  # noqa: SIM118 - not a dict
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "m")
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight + 1)


def test_a_head_of_its_own_where_the_architecture_ties_it_is_written_too(tmp_path):
    """Such a head comes from an adapter that had saved the head whole, and was then merged."""
    model = build_model(GPT2, data=TOKENS, seed=0)
    model.config.tie_word_embeddings = False
    state = trained(model)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    export_model(tmp_path / "m", spec=GPT2, model=model, state=state, prepared=TOKENS)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "m")
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
def test_the_tokenizer_of_the_data_goes_with_the_model(tmp_path, spec):
    (tmp_path / "a.txt").write_text("many a word, and a few more\n" * 200)
    data = prepare(
        DataSpec(path=str(tmp_path / "a.txt"), seq_len=8, vocab_size=280, held_out=0.2), cache_dir=tmp_path / "c"
    )
    model = build_model(spec, data=data, seed=0)
    export_model(tmp_path / "m", spec=spec, model=model, state=model.state_dict(), prepared=data)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert len(tokenizer) == data.vocab_size == model.config.vocab_size
    assert tokenizer.eos_token_id == data.end_of_text_id
    text = "a  word\tof  Unicode: żółć"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_image_processor_of_a_base_is_exported_as_it_is(tmp_path):
    files = {
        "preprocessor_config.json": '{"image_processor_type": "ViTImageProcessor", "size": 8, "resample": 3,\n"x": 1}',
        "processor_config.json": '{"processor_class": "CLIPProcessor"}',
    }
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.effect_noise((12, 9), ord(name)).save(tmp_path / "images" / name / "0.png")
    (tmp_path / "base").mkdir()
    for name, content in files.items():
        (tmp_path / "base" / name).write_text(content)
    spec = DataSpec(
        path=str(tmp_path / "images" / "**" / "*"),
        kind="image-classification",
        kwargs={"processor": str(tmp_path / "base")},
        held_out=0,
    )
    data = prepare(spec, cache_dir=tmp_path / "c")
    model = build_model(VIT, data=data, seed=0)
    export_model(tmp_path / "m", spec=VIT, model=model, state=model.state_dict(), prepared=data, base="base")
    assert {name: (tmp_path / "m" / name).read_text() for name in files} == files


def test_a_classifier_whose_tokenizer_pads_nothing_is_exported_for_batches(tmp_path):
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["</s>", "good", "bad", "day"])}, "day"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>").save_pretrained(tmp_path / "t")
    (tmp_path / "a.csv").write_text("text,label\n" + "good day,yes\nbad,no\n" * 20)
    data = prepare(
        DataSpec(path=str(tmp_path / "a.csv"), kind="text-classification", tokenizer=str(tmp_path / "t")),
        cache_dir=tmp_path / "c",
    )
    spec = ModelSpec(architecture="LlamaForSequenceClassification", config={**LLAMA.config, "initializer_range": 1.0})
    model = build_model(spec, data=data, seed=0)
    export_model(tmp_path / "m", spec=spec, model=model, state=model.state_dict(), prepared=data)
    classify, texts = transformers.pipeline("text-classification", str(tmp_path / "m")), ["good day bad", "bad", "day"]
    together, alone = classify(texts, batch_size=3), [classify(text)[0] for text in texts]
    assert [each["label"] for each in together] == [each["label"] for each in alone]
    assert [each["score"] for each in together] == pytest.approx([each["score"] for each in alone], abs=1e-5)


def chats(folder):
    """The prepared data of a few conversations, and with them a trained tokenizer."""
    turns = [{"role": "user", "content": "many a word"}, {"role": "assistant", "content": "and a few more"}]
    (folder / "a.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    spec = DataSpec(path=str(folder / "a.jsonl"), kind="chat", vocab_size=280, held_out=0)
    return prepare(spec, cache_dir=folder / "c")


def test_a_base_keeps_how_it_generates(tmp_path):
    """Also what transformers would refuse to save: a temperature where nothing is sampled."""
    data = prepare(DataSpec(source="python-stdlib", seq_len=8, vocab_size=280), cache_dir=tmp_path / "c")
    base = build_model(LLAMA, data=data, seed=0)
    base.save_pretrained(tmp_path / "base")
    said = {"eos_token_id": [1, 3], "temperature": 0.7, "top_p": 0.9, "do_sample": False}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(said))
    spec = ModelSpec(from_pretrained=str(tmp_path / "base"))
    model = build_model(spec, data=data, seed=0)
    export_model(tmp_path / "m", spec=spec, model=model, state=model.state_dict(), prepared=data)
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m").generation_config
    assert {name: getattr(found, name) for name in said} == said


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
def test_a_model_of_chats_stops_at_the_end_of_its_turn(tmp_path, spec):
    data = chats(tmp_path)
    model = build_model(spec, data=data, seed=0)
    export_model(tmp_path / "m", spec=spec, model=model, state=model.state_dict(), prepared=data)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    found = getattr(transformers, spec.architecture).from_pretrained(tmp_path / "m").generation_config
    assert found.eos_token_id == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_the_end_of_a_turn_is_that_of_the_chat_template(tmp_path):
    template, _ = ENDS["llama 3 with builtin tools"]
    tokenizer = saved(tmp_path, template)
    spec = DataSpec(path=str(tmp_path / "a.jsonl"), kind="completion", tokenizer=tokenizer, held_out=0)
    turn = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    (tmp_path / "a.jsonl").write_text((json.dumps(turn) + "\n") * 4)
    data = prepare(spec, cache_dir=tmp_path / "c")
    model = build_model(LLAMA, data=data, seed=0)
    export_model(tmp_path / "m", spec=LLAMA, model=model, state=model.state_dict(), prepared=data)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m").generation_config.eos_token_id
    assert tokenizer.convert_ids_to_tokens(found) == ["</s>", "<|eot_id|>", "<|eom_id|>"]


def test_a_factorys_model_names_its_factory(users, tmp_path):
    spec = ModelSpec(factory=f"{users}:tied", kwargs={"width": 4})
    model = build_model(spec, data=TOKENS, seed=0)
    export_model(tmp_path / "m", spec=spec, model=model, state=trained(model), prepared=TOKENS)
    assert json.loads((tmp_path / "m" / "model.json").read_text()) == {"factory": spec.factory, "kwargs": spec.kwargs}
    again = build_model(spec, data=TOKENS, seed=0, weights_from=tmp_path / "m")
    assert torch.equal(again.head.weight, model.head.weight + 1)


def test_an_older_export_is_replaced_and_a_failed_one_leaves_it(tmp_path):
    model = build_model(LLAMA, data=TOKENS, seed=0)
    export_model(tmp_path / "m", spec=LLAMA, model=model, state=model.state_dict(), prepared=TOKENS)
    (tmp_path / "m" / "stale").write_text("of the first")
    with pytest.raises(AssertionError, match="lacks"):
        export_model(tmp_path / "m", spec=LLAMA, model=model, state={}, prepared=TOKENS)
    assert (tmp_path / "m" / "stale").exists()
    export_model(tmp_path / "m", spec=LLAMA, model=model, state=model.state_dict(), prepared=TOKENS)
    assert not (tmp_path / "m" / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_only_the_config_of_the_trained_model_is_needed(tmp_path):
    """The weights and the class of the model may have been changed by a technique."""
    model = build_model(LLAMA, data=TOKENS, seed=0)
    state = trained(model)
    model.to("meta")
    export_model(tmp_path / "m", spec=dataclasses.replace(LLAMA), model=model, state=state, prepared=TOKENS)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m")
    assert torch.equal(loaded.model.norm.weight, state["model.norm.weight"])
