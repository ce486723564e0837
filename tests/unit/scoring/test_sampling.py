"""Sampling of completions: whose random numbers they draw, and which tokens they end with."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ringmaster.features.on_policy.loss import Generation
from ringmaster.features.on_policy.rollout import sample_completions
from ringmaster.techniques.training.token_sampling import EndTokens

GENERATION = Generation(num_generations=3, max_new_tokens=6, temperature=1.0)
ENDS = EndTokens(token_ids=(3, 4, 5), pad_id=0)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).train()


def sampled(model, prompts, seeds, *, generation=GENERATION, ends=ENDS):
    return sample_completions(model, prompts, seeds=seeds, generation=generation, ends=ends, device=torch.device("cpu"))


def test_completions_belong_to_the_seed_and_not_to_the_batch(model):
    prompts = [[7, 8, 9, 10], [11], [12, 13]]
    together = sampled(model, prompts, [1, 2, 3])
    assert [sampled(model, [prompt], [seed])[0] for prompt, seed in zip(prompts, [1, 2, 3], strict=True)] == together
    assert sampled(model, prompts, [1, 2, 4])[:2] == together[:2]
    assert sampled(model, prompts, [1, 2, 4])[2] != together[2]
    assert model.training


def test_a_completion_ends_with_the_first_end(model):
    every = [row for group in sampled(model, [[7]] * 30, range(30)) for row in group]
    assert all(token not in ENDS.token_ids for row in every for token in row[:-1])
    assert {len(row) for row in every} >= {1, 2, 6}
    assert all(row[-1] in ENDS.token_ids for row in every if len(row) < 6)


def test_trials_have_the_longest_completions(model):
    found = sampled(model, [[7]] * 10, range(10), ends=EndTokens(token_ids=(3, 4, 5), pad_id=0, are_ignored=True))
    assert {len(row) for group in found for row in group} == {6}


def test_tokens_have_the_probabilities_of_the_policy(model):
    """4,000 first tokens at temperature 0.7, whatever the model's own settings of generation say."""
    one = Generation(num_generations=4000, max_new_tokens=1, temperature=0.7)
    model.generation_config.temperature, model.generation_config.repetition_penalty = 9.0, 50.0
    (rows,) = sampled(model, [[7, 8]], [0], generation=one)
    model.generation_config.temperature, model.generation_config.repetition_penalty = 1.0, 1.0
    found = torch.bincount(torch.tensor([row[0] for row in rows]), minlength=20) / len(rows)
    with torch.no_grad():
        expected = (model(torch.tensor([[7, 8]])).logits[0, -1] / 0.7).softmax(-1)
    assert (found - expected).abs().max() < 0.02  # three standard deviations of the most probable token
