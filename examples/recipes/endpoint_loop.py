"""A reinforcement loop on a training endpoint: answers that begin as docstrings do get a reward."""

import tinker
from tinker import types

NUM_STEPS, GROUP = 20, 8
PROMPTS = ["What does open do?", "What does sorted do?", "What does join do?", "What does parse do?"]


def reward(text: str) -> float:
    """Returns 1 for an answer that begins with "Return", and less for one that only has letters of it."""
    return 1.0 if text.strip().startswith("Return") else len(set("Return") & set(text)) / 20


def row(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Returns a row whose loss is over the sampled tokens alone."""
    num_before, tokens = len(prompt) - 1, list(sequence.tokens)
    inputs = {
        "target_tokens": [0] * num_before + tokens,
        "logprobs": [0.0] * num_before + list(sequence.logprobs or ()),
        "advantages": [0.0] * num_before + [advantage] * len(tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(prompt + tokens[:-1]), loss_fn_inputs=inputs)


with tinker.ServiceClient() as service:
    metadata = {"name": "begins-with-return"}  # the model is endpoint.begins-with-return in the lineage
    client = service.create_lora_training_client("tiny-llama", rank=8, seed=0, user_metadata=metadata).result()
    tokenizer = client.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    params = types.SamplingParams(max_tokens=12, temperature=1.0)
    for step in range(NUM_STEPS):
        sampler = client.save_weights_and_get_sampling_client().result()  # the weights as they are now
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
        rows, rewards = [], []
        for prompt, future in zip(prompts, futures, strict=True):
            sequences = future.result().sequences
            own = [reward(tokenizer.decode(each.tokens)) for each in sequences]
            rewards += own
            rows += [row(prompt, each, r - sum(own) / GROUP) for each, r in zip(sequences, own, strict=True)]
        loss = client.forward_backward(rows, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        print(f"step {step}: reward {sum(rewards) / len(rewards):.3f}, loss {loss.result().metrics['loss:sum']:.3f}")
    print(client.save_state("trained").result().path)
