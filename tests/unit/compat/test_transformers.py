"""The private names of transformers that `ringmaster.compat.transformers` gives do what is relied on."""

import subprocess
import sys

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    conversion_mapping,
)
from transformers.initialization import no_tie_weights

from ringmaster.compat import transformers as compat

TINY = {
    "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture
def llama():
    return LlamaForCausalLM(LlamaConfig(**TINY, attn_implementation="eager"))


def test_the_attention_of_a_config_is_read(llama):
    assert compat.attention_of(llama.config) == "eager"
    llama.set_attn_implementation("sdpa")
    assert compat.attention_of(llama.config) == "sdpa"
    assert compat.attention_of(object()) is None


def test_a_model_is_made_with_the_attention_that_is_set():
    config = LlamaConfig(**TINY)
    compat.set_attention(config, "eager")
    model = LlamaForCausalLM(config)
    assert compat.attention_of(model.config) == "eager"
    assert model(torch.ones(1, 2, dtype=torch.int64), output_attentions=True).attentions


def test_an_export_uses_the_table_that_has_been_made(llama, tmp_path, monkeypatch):
    compat.fill_caches()

    def make():
        raise AssertionError("the table is made again")

    monkeypatch.setattr(conversion_mapping, "_build_checkpoint_conversion_mapping", make)
    llama.save_pretrained(tmp_path)


def test_what_estimates_replace_is_called(monkeypatch):
    called = set()
    for place, name, value in compat.replacements_without_values():
        assert callable(getattr(place, name))
        monkeypatch.setattr(place, name, lambda *args, name=name, value=value: called.add(name) or value(*args))
    config = MixtralConfig(**TINY, num_local_experts=2, attn_implementation="sdpa")
    config._experts_implementation = "grouped_mm"
    ids = torch.ones(1, 4, dtype=torch.int64)
    MixtralForCausalLM(config)(ids, attention_mask=torch.tensor([[0, 1, 1, 1]]))
    assert called == {"_can_use_grouped_mm", "is_tracing"}


@pytest.fixture
def trainer(llama, tmp_path):
    """A Trainer of two steps, which writes a checkpoint after the first one and evaluates each."""
    from transformers import Trainer, TrainingArguments  # a second, as they import peft and bitsandbytes

    class Adopted(Trainer):
        """A class of its own, so that replaced methods stay in this test."""

    ids = torch.arange(4)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_strategy="best", eval_strategy="steps", eval_steps=1, use_cpu=True,
        metric_for_best_model="loss", per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids}] * 8
    return Adopted(llama, arguments, train_dataset=rows, eval_dataset=rows)


def test_a_trainer_calls_the_methods_that_take_the_place_of_its_own(trainer, tmp_path):
    save, determine_best = compat.checkpoint_methods(type(trainer))
    calls = []

    def saved(self, *args, **kwargs):
        calls.append(("save", self.state.global_step))
        save(self, *args, **kwargs)

    def is_best(self, *args, **kwargs):
        calls.append(("best", self.state.global_step))
        return determine_best(self, *args, **kwargs) or True

    compat.replace_checkpoint_methods(type(trainer), save=saved, determine_best=is_best)
    trainer.train()
    assert calls == [("best", 1), ("save", 1), ("best", 2), ("save", 2)]
    assert (tmp_path / "checkpoint-2").is_dir()


def test_the_rows_of_a_device_are_set_after_the_trainer_was_made(trainer):
    compat.set_rows_per_device(trainer, 4)
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape == (4, 4)


def test_a_model_is_saved_in_a_folder_alone(trainer, tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(trainer, "push_to_hub", lambda *_, **__: pushed.append(1))
    trainer.args.push_to_hub = True
    compat.save_model_here(trainer, tmp_path / "here")
    assert (tmp_path / "here" / "model.safetensors").is_file()
    assert pushed == []
    trainer.save_model(str(tmp_path / "there"))
    assert pushed == [1]


SPEECH = {
    "vocab_size": 5, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "conv_dim": [8, 8], "conv_kernel": [10, 4], "conv_stride": [5, 4], "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.2, "mask_time_length": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", ["Wav2Vec2", "Hubert"])
def test_the_frames_of_a_model_of_speech_are_counted_and_its_masks_are_drawn_by_what_is_replaced(name, monkeypatch):
    import transformers

    config = getattr(transformers, f"{name}Config")(**SPEECH)
    model = getattr(transformers, f"{name}ForCTC")(config).train()
    replaced = {module.__name__.rpartition("_")[2]: module for module, _, _ in compat.span_mask_functions()}
    calls = []
    for module, function, original in compat.span_mask_functions():
        monkeypatch.setattr(module, function, lambda *a, of=original, **kw: calls.append(1) or of(*a, **kw))
    logits = model(torch.zeros(1, 400)).logits
    assert logits.shape[1] == int(compat.num_frames_of(model, torch.tensor([400]))[0])
    assert name.lower() in replaced
    assert len(calls) == 1


LOADED = """
import sys
from ringmaster.compat import transformers as compat
compat.import_models()
assert "transformers.modeling_utils" in sys.modules
print([name for name in compat.SELDOM_USED if name in sys.modules])
from transformers.loss import loss_for_object_detection as detection
function = getattr(detection, "linear_sum_assignment", None)
if function is not None:
    print([each.tolist() for each in function([[1.0, 0.0], [0.0, 1.0]])])
    from scipy.optimize import linear_sum_assignment
    assert linear_sum_assignment is not function
"""


def test_what_models_seldom_use_is_imported_when_it_is_called():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "[]"
    assert lines[1:] in ([], ["[[0, 1], [1, 0]]"])


def test_loading_replaces_a_method_of_all_models():
    """If this fails, models may be loaded by several threads: `MODEL_CONSTRUCTION` can go."""
    method = PreTrainedModel.tie_weights
    with no_tie_weights():
        assert PreTrainedModel.tie_weights is not method
    assert PreTrainedModel.tie_weights is method
