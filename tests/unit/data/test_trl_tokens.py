"""Tokens and labels of texts and conversations against those that TRL's trainers prepare."""

import copy
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from ringmaster.techniques.data import open_data, prepare
from ringmaster.techniques.job_specs import DataSpec

pytestmark = [pytest.mark.full, pytest.mark.skipif(find_spec("trl") is None, reason="no trl, whose tokens these are")]

BOS, EOS = "<s>", "</s>"
TEXTS = ["hello world", "hello  world ", "what is 3?", "the user asks\n", "", "naïve"]
ANSWERS = [" it is", "it is", "s, it is\n", " ", "4", "it ends</s>"]


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no-bos"])
def tokenizer(request, tmp_path_factory):
    """A byte-level tokenizer in a folder, with and without a token that begins each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = [BOS, EOS, "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(["hello world the user asks and it is the assistant what worlds\n"] * 9, trainer)
    if request.param:
        inner.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(str(folder))
    return str(folder)


def ours(tmp_path, tokenizer, kind, rows):
    """The training samples of rows, in their order."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = DataSpec(kind=kind, path=str(path), tokenizer=tokenizer, held_out=0)
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    training, _ = open_data(spec, cache_dir=tmp_path / "cache", prepared=prepared)
    assert len(training) == len(rows)
    return [training[i] for i in range(len(rows))]


def theirs(tmp_path, tokenizer, rows, *, trainer, config, **settings):
    """The rows as a trainer of TRL's prepares them."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=320)
    )
    args = getattr(trl, config)(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, report_to=[], max_length=None, **settings
    )
    more = {"ref_model": copy.deepcopy(model)} if trainer == "DPOTrainer" else {}
    made = getattr(trl, trainer)(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
        **more,
    )
    return list(made.train_dataset)


def test_completions(tmp_path, tokenizer):
    rows = [{"prompt": prompt, "completion": answer} for prompt in TEXTS if prompt for answer in ANSWERS]
    expected = theirs(tmp_path, tokenizer, rows, trainer="SFTTrainer", config="SFTConfig")
    for sample, row in zip(ours(tmp_path, tokenizer, "completion", rows), expected, strict=True):
        num = len(row["input_ids"])
        assert sample["input_ids"][:num].tolist() == row["input_ids"]
        assert sample["labels"].tolist() == row["labels"] + [-100] * (len(sample["labels"]) - num)


@pytest.mark.parametrize("has_prompt", [True, False])
def test_preferences(tmp_path, tokenizer, has_prompt):
    pairs = [(one, two) for one in ANSWERS for two in ANSWERS if one != two]
    rows = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected} if has_prompt else
        {"chosen": prompt + chosen, "rejected": prompt + rejected}
        for prompt in TEXTS if has_prompt or prompt
        for chosen, rejected in pairs
    ]  # fmt: skip
    expected = theirs(tmp_path, tokenizer, rows, trainer="DPOTrainer", config="DPOConfig")
    for sample, row in zip(ours(tmp_path, tokenizer, "preference", rows), expected, strict=True):
        for tokens, labels, answer in zip(
            sample["input_ids"], sample["labels"], (row["chosen_ids"], row["rejected_ids"]), strict=True
        ):
            num = len(row["prompt_ids"]) + len(answer)
            assert tokens[:num].tolist() == row["prompt_ids"] + answer
            assert labels[labels != -100].tolist() == answer
            assert (labels[: len(row["prompt_ids"])] == -100).all()


def test_prompts(tmp_path, tokenizer):
    from transformers import AutoTokenizer

    rows = [{"prompt": prompt} for prompt in TEXTS if prompt]
    reference = AutoTokenizer.from_pretrained(tokenizer)  # as GRPOTrainer does
    for sample, row in zip(ours(tmp_path, tokenizer, "prompt", rows), rows, strict=True):
        tokens = sample["input_ids"][sample["attention_mask"].bool()].tolist()
        assert tokens == reference(text=row["prompt"])["input_ids"]


@pytest.mark.parametrize("template", ["qwen3_training", "qwen2_5_training", "llama3_training", "phi3_training"])
def test_conversations_whose_template_marks_answers(tmp_path, tokenizer, template):
    import trl

    given = tmp_path / "given"
    shutil.copytree(tokenizer, given)
    file = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
    shutil.copyfile(file, given / "chat_template.jinja")
    turns = [
        {"role": "system", "content": "the  worlds"},
        {"role": "user", "content": "what is 3?"},
        {"role": "assistant", "content": "<think>\nhello\n</think>\n\nit is naïve\n"},
        {"role": "user", "content": "\n and 4"},
        {"role": "assistant", "content": "\n\nit ends"},
    ]
    rows = [{"messages": turns[start:stop]} for start in (0, 1) for stop in (3, 4, 5)]
    expected = theirs(tmp_path, str(given), rows, trainer="SFTTrainer", config="SFTConfig", assistant_only_loss=True)
    for sample, row in zip(ours(tmp_path, str(given), "chat", rows), expected, strict=True):
        num = len(row["input_ids"])
        assert sample["input_ids"][:num].tolist() == row["input_ids"]
        assert sample["labels"][:num].tolist() == row["labels"]
