"""GRPO against TRL's trainer, of which only the generation is replaced: it samples with the same random numbers."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from ringmaster.features.on_policy.rollout import sample_completions
from ringmaster.techniques import EvaluationSpec
from ringmaster.techniques.data import prepare
from ringmaster.techniques.loss import loss_function
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.training.token_sampling import end_tokens_of, prompt_seed
from tests.integration.losses.my_rewards import letter, some
from tests.integration.losses.prompt_rows import prompt_data, repeated_text, rows_of_steps
from tests.integration.workbench import LLAMA, SGD, largest_difference

pytestmark = [pytest.mark.full, pytest.mark.skipif(find_spec("trl") is None, reason="no trl, whose trainer this is")]

NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS, MAX_TOKENS = 6, 4, 4, 8
# AdamW would make whole steps of gradients that are only rounding, such as of tokens that no completion has.
PLAIN = replace(SGD, lr=0.5)
REWARDS = "tests.integration.losses.my_rewards"
# Many tokens that end a completion, so that lengths differ.
MODEL = replace(LLAMA, config={**LLAMA.config, "vocab_size": 320, "eos_token_id": [*range(5, 65)]})


def optimizer_of(options):
    """Returns an optimizer with a smaller rate for gradients that are sums over tokens, and not means."""
    return replace(PLAIN, lr=0.05) if options.get("loss_type") == "rloo" else PLAIN


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    rows = [{"prompt": f"{repeated_text(i)} {i}:", "number": i} for i in range(40)]
    return prompt_data(tmp_path_factory.mktemp("prompts"), rows)


def trained_by_trl(bench, data, options, *, seed, folder):
    """Returns the losses of TRL's trainer, and its weights."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    is_rloo = options.get("loss_type") == "rloo"
    trainer_class, config_class = (RLOOTrainer, RLOOConfig) if is_rloo else (GRPOTrainer, GRPOConfig)

    prepared, tokenizer, rows = rows_of_steps(bench, data, num_steps=NUM_STEPS, num_prompts=NUM_PROMPTS, seed=seed)
    generation = loss_function("grpo", options).generation

    class WithOurCompletions(trainer_class):
        losses: list[float]

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            step = self.state.global_step
            groups = sample_completions(
                self.accelerator.unwrap_model(self.model),
                prompt_ids[::NUM_GENERATIONS],
                seeds=[prompt_seed(seed, step, place) for place in range(NUM_PROMPTS)],
                generation=generation,
                ends=end_tokens_of(tokenizer, model),
                device=torch.device("cpu"),
            )
            completions = [completion for group in groups for completion in group]
            return completions if is_rloo else (completions, None)

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.losses.append(float(loss))
            return loss

    said = {key: value for key, value in options.items() if key not in ("rewards", "max_new_tokens")}
    if is_rloo:
        del said["loss_type"]
        said = {"beta": 0.0, "normalize_advantages": said.pop("scale_rewards", "none") == "batch", **said}
    config = config_class(
        output_dir=str(folder),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=NUM_PROMPTS * NUM_GENERATIONS,
        steps_per_generation=1,
        max_completion_length=MAX_TOKENS,
        max_grad_norm=0.0,
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **said,
    )
    build_model(MODEL, data=prepared, seed=seed).save_pretrained(folder / "model")
    model = LlamaForCausalLM.from_pretrained(folder / "model")  # TRL loads its reference from there
    optimizer = torch.optim.SGD(model.parameters(), lr=optimizer_of(options).lr)
    trainer = WithOurCompletions(
        model=model,
        reward_funcs=[lambda completions, **_: letter(completions), lambda completions, **_: some(completions)],
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    )
    trainer.losses = []
    trainer.eos_token_ids = end_tokens_of(tokenizer, model).token_ids
    trainer.train()
    return trainer.losses, dict(model.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.2, "temperature": 0.7, "loss_type": "grpo"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "bnpo", "scale_rewards": "batch", "reward_weights": [1.0, 0.2]},
        {"loss_type": "dapo", "beta": 0.1, "epsilon_high": 0.3, "use_bias_correction_kl": False},
        {"loss_type": "dapo", "mask_truncated_completions": True},
        {"loss_type": "rloo"},
        {"loss_type": "rloo", "beta": 0.2, "temperature": 0.7},
        {"loss_type": "rloo", "scale_rewards": "batch"},
    ],
    ids=["default", "grpo", "dr_grpo", "bnpo", "dapo", "truncated", "rloo", "rloo-beta", "rloo-batch"],
)
def test_the_losses_and_weights_are_trls(bench, prompts, tmp_path, options):
    options = {
        "rewards": [f"{REWARDS}:letter", f"{REWARDS}:some"],
        "num_generations": NUM_GENERATIONS,
        "max_new_tokens": MAX_TOKENS,
        **options,
    }
    job = bench.job(
        MODEL,
        data=prompts,
        loss="grpo",
        loss_options=options,
        optimizer=optimizer_of(options),
        num_steps=NUM_STEPS,
        global_batch_size=NUM_PROMPTS,
        seed=3,
        evaluation=EvaluationSpec(max_batches=1, metrics=("reward",)),
    )
    ours = bench.reference(job)
    losses, weights = trained_by_trl(bench, prompts, options, seed=3, folder=tmp_path)
    assert len(losses) == NUM_STEPS
    assert ours.losses == pytest.approx(losses, rel=0, abs=2e-5)
    found = {name: weights[name] for name in ours.weights}
    assert largest_difference(found, ours.weights) <= 1e-4
    initial = build_model(MODEL, data=prepare(prompts, cache_dir=bench.cache_dir), seed=3).state_dict()
    assert largest_difference({name: initial[name] for name in found}, found) > 1e-3
