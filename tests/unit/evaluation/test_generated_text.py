"""Metrics of what a model writes: their values of texts, and what a model is given to write to."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from ringmaster.techniques.job_specs import EvaluationSpec
from ringmaster.techniques.metric import Outputs, answer_of, metric_named, why_generating
from ringmaster.techniques.training.generation import AnswerWriter, WriterContext, answer_writer_of
from ringmaster.techniques.training.token_sampling import end_tokens_of
from tests.drawing import draws
from tests.unit.data.test_chat_templates import tokenizer_of, turns

NAMES = ("generated_exact_match", "generated_rouge_1", "generated_rouge_2", "generated_rouge_l")
TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def values(pairs):
    """Returns the metrics of pairs of what is written and the answer. Tokens take the place of words."""
    width = max(len(answer) for _, answer in pairs) + 2
    labels = [[-100, *answer, *[-100] * (width - len(answer))] for _, answer in pairs]
    outputs = Outputs(
        output=None,
        batch={},
        logits=None,
        labels=torch.tensor(labels),
        losses=None,
        written=[written for written, _ in pairs],
    )
    sums = {name: metric_named(name).compute_sums(outputs) for name in NAMES}
    return {
        name: float(metric_named(name).value({key: np.asarray(each.sum()) for key, each in found.items()}))
        for name, found in sums.items()
    }


@draws(50)
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=4))
def test_they_are_those_of_rouge_score(pairs):
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    texts = [[" ".join(f"w{token}" for token in each) for each in pair] for pair in pairs]
    scores = [scorer.score(answer, written) for written, answer in texts]
    found = values(pairs)
    assert found["generated_exact_match"] == pytest.approx(np.mean([one == other for one, other in pairs]))
    for name, theirs in (("1", "rouge1"), ("2", "rouge2"), ("l", "rougeL")):
        assert found[f"generated_rouge_{name}"] == pytest.approx(np.mean([each[theirs].fmeasure for each in scores]))


def test_the_answer_is_the_first_run_of_labels():
    assert answer_of([-100, 4, 5, -100, 6]) == [4, 5]
    assert answer_of([-100, -100]) == []


def test_rows_that_the_model_writes_nothing_to_do_not_suit():
    outputs = Outputs(output=None, batch={}, logits=None, labels=torch.zeros(2, 3).long(), losses=None)
    assert all(metric_named(name).compute_sums(outputs) is None for name in NAMES)
    assert why_generating(["loss", "generated_rouge_l"]) == "the metric generated_rouge_l"
    assert why_generating(["loss", "rouge_l"]) is None


def llama(**changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, eos_token_id=3,
        **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def writer(model, max_new_tokens=6):
    spec = EvaluationSpec(metrics=("loss", "generated_rouge_l"), max_new_tokens=max_new_tokens)
    context = WriterContext(model=model, tokenizer_dir=None, device=torch.device("cpu"), autocast=nullcontext)
    return answer_writer_of(spec, context)


def rows(prompts, answers, width=12):
    ids, labels = torch.zeros(len(prompts), width).long(), torch.full((len(prompts), width), -100)
    mask = torch.zeros_like(ids)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        whole = torch.tensor(prompt + answer)
        ids[i, : len(whole)], mask[i, : len(whole)] = whole, 1
        labels[i, len(prompt) : len(whole)] = torch.tensor(answer)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def test_a_model_writes_greedily_to_each_prompt_whatever_else_is_in_the_batch():
    model, prompts = llama().eval(), [[7, 8, 9, 10], [11], [12, 13]]
    batch = rows(prompts, [[4, 5], [6, 7, 8], [9]])
    written = writer(model).written(model, batch)
    for i, prompt in enumerate(prompts):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0)
        expected = theirs[0, len(prompt) :].tolist()
        assert written[i] == expected[: len(written[i])]
        assert len(written[i]) == 6 or written[i][-1] == 3
        assert writer(model).written(model, {k: v[i : i + 1] for k, v in batch.items()}) == [written[i]]


def test_an_encoder_decoder_writes_to_its_input():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=20, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0, eos_token_id=1
    )
    model = T5ForConditionalGeneration(config).eval()
    batch = {"input_ids": torch.tensor([[5, 6, 7, 1], [8, 9, 1, 0]]), "labels": torch.tensor([[4, 1], [5, 1]])}
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    written = writer(model).written(model, batch)
    theirs = model.generate(batch["input_ids"][:1], max_new_tokens=6, do_sample=False)[0, 1:].tolist()
    assert written[0] == theirs[: len(written[0])]
    assert len(written) == 2


def test_an_encoder_decoder_with_learned_positions_writes_to_an_input_whatever_else_is_in_the_batch():
    torch.manual_seed(1)
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"vocab_size": 20, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "forced_eos_token_id": None}
    config = BartConfig(max_position_embeddings=32, init_std=1.0, decoder_start_token_id=1, **sizes, **layers, **tokens)
    model = BartForConditionalGeneration(config).eval()
    model.get_encoder().embed_positions.weight.data *= 30
    model.generation_config.forced_bos_token_id = 9
    ids = torch.tensor([[5, 6, 7, 4, 3, 8, 2, 1], [8, 9, 1, 0, 0, 0, 0, 0]])
    batch = {"input_ids": ids, "labels": torch.tensor([[4, 1], [5, 1]]), "attention_mask": (ids != 0).long()}
    theirs = model.generate(ids[1:, :3], max_new_tokens=6, do_sample=False)[0, 1:].tolist()
    written = writer(model).written(model, batch)[1]
    assert written == theirs[: len(written)]
    assert written[0] == 9


def test_a_prompt_loses_its_beginning_where_the_model_has_too_few_positions():
    model = llama(max_position_embeddings=8).eval()
    long, short = rows([[7, 8, 9, 10, 11]], [[4]]), rows([[10, 11]], [[4]])
    assert writer(model).written(model, long) == writer(model).written(model, short)
    with pytest.raises(ValueError, match=r"answers have up to 8 tokens, and the model 8 positions. To fix: lower"):
        writer(model, max_new_tokens=8).written(model, long)


@pytest.mark.parametrize("batch", [
    {"input_ids": torch.ones(2, 4).long()},
    {"input_ids": torch.ones(2, 4).long(), "labels": torch.ones(2, 4).long()},
    {"input_ids": torch.ones(2, 2, 4).long(), "labels": torch.ones(2, 2, 4).long()},
])  # fmt: skip
def test_rows_without_prompts_are_refused(batch):
    model = llama()
    with pytest.raises(ValueError, match=r"the samples .* To fix: give data of kind completion, chat or seq2seq"):
        writer(model).written(model, batch)


def test_a_model_that_cannot_write_is_refused():
    with pytest.raises(ValueError, match=r"metric generated_rouge_l: Linear has no generate\. To fix"):
        writer(torch.nn.Linear(2, 2))


class Letters(LlamaForCausalLM):
    """A model that writes a text letter by letter, and then begins anew."""

    following: dict[int, int]

    def forward(self, input_ids=None, **inputs):
        output = super().forward(input_ids=input_ids, **inputs)
        following = torch.tensor([self.following.get(int(token), 0) for token in input_ids[:, -1]])
        output.logits = torch.nn.functional.one_hot(following, self.config.vocab_size).float()[:, None]
        return output


def letters(template, text):
    """A model that writes `text`, and its tokenizer."""
    tokenizer = tokenizer_of(template)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    model = Letters(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        eos_token_id=tokenizer.eos_token_id,
    )).eval()  # fmt: skip
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "what"}], add_generation_prompt=True)
    model.following = dict(zip([prompt["input_ids"][-1], *tokens], [*tokens, tokens[0]], strict=True))
    return model, tokenizer, prompt["input_ids"]


def answer(model, tokenizer, prompt, *, is_trial=False, most=12, label=(5,)):
    ends = replace(end_tokens_of(tokenizer, model), are_ignored=is_trial)
    writer = AnswerWriter(max_new_tokens=most, ends=ends, device=torch.device("cpu"), autocast=nullcontext)
    (written,) = writer.written(model, rows([prompt], [[*label]], width=len(prompt) + len(label)))
    return written


def test_an_answer_ends_with_the_token_that_the_chat_template_writes():
    header = "<|start_header_id|>assistant<|end_header_id|>"
    model, tokenizer, prompt = letters(turns("<|start_header_id|>{role}", "<|eot_id|>", header), "yes<|eot_id|>qr")
    assert tokenizer.eos_token != "<|eot_id|>"
    assert tokenizer.decode(answer(model, tokenizer, prompt)) == "yes<|eot_id|>"


def test_an_answer_ends_with_a_text_where_the_template_writes_no_token():
    model, tokenizer, prompt = letters(turns("{role}>", " [END]\n", "assistant>"), "yo [END]qr")
    assert tokenizer.decode(answer(model, tokenizer, prompt)) == "yo [END]"
    # A prompt that is not a conversation ends only with the end of text.
    assert len(answer(model, tokenizer, prompt[:-1] + tokenizer("y", add_special_tokens=False)["input_ids"])) == 12


def test_trials_write_as_many_tokens_as_the_true_answers_have():
    model, tokenizer, prompt = letters(turns("<|{role}|>", "<|end|>", "<|assistant|>"), "y<|end|>qr")
    assert len(answer(model, tokenizer, prompt, is_trial=True, label=(5, 6, 7))) == 3
    assert len(answer(model, tokenizer, prompt, is_trial=True, most=2, label=(5, 6, 7))) == 2
