"""On-policy distillation against TRL, of which only the generation is replaced: it draws the same numbers."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from ringmaster.features.loss_teacher.job import LossTeacher
from ringmaster.features.on_policy.distillation import OnPolicyDistillation
from ringmaster.features.on_policy.rollout import sample_completions
from ringmaster.techniques import EvaluationSpec, ModelSpec
from ringmaster.techniques.data import prepare
from ringmaster.techniques.loss import loss_function
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.training.token_sampling import end_tokens_of, prompt_seed
from tests.integration.losses.prompt_rows import rows_of_steps
from tests.integration.losses.test_grpo_trl import MODEL, PLAIN, prompts  # noqa: F401 - a fixture
from tests.integration.losses.test_on_policy import LARGER
from tests.integration.workbench import largest_difference

pytestmark = [pytest.mark.full, pytest.mark.skipif(find_spec("trl") is None, reason="no trl, whose trainer this is")]

NUM_STEPS, NUM_PROMPTS = 20, 4
SMALL = replace(PLAIN, lr=0.1)
TEACHER = ModelSpec(architecture="LlamaForCausalLM", config={**LARGER.config, "eos_token_id": 5})


def trained_by_trl(bench, data, options, *, seed, folder):
    """Returns the losses of TRL's trainer, and its weights."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM
    from trl import DistillationConfig, DistillationTrainer

    prepared, tokenizer, rows = rows_of_steps(bench, data, num_steps=NUM_STEPS, num_prompts=NUM_PROMPTS, seed=seed)
    generation = loss_function(OnPolicyDistillation.name, options).generation

    class WithOurCompletions(DistillationTrainer):
        losses: list[float]

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            groups = sample_completions(
                self.accelerator.unwrap_model(self.model),
                prompt_ids,
                seeds=[prompt_seed(seed, self.state.global_step, place) for place in range(NUM_PROMPTS)],
                generation=generation,
                ends=end_tokens_of(tokenizer, model),
                device=torch.device("cpu"),
            )
            return [completion for group in groups for completion in group]

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.losses.append(float(loss))
            return loss

    config = DistillationConfig(
        output_dir=str(folder),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=NUM_PROMPTS,
        max_completion_length=options["max_new_tokens"],
        beta=options.get("beta", 1.0),
        temperature=options.get("temperature", 1.0),
        max_grad_norm=0.0,
        shuffle_dataset=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    build_model(MODEL, data=prepared, seed=seed).save_pretrained(folder / "model")
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=SMALL.lr)
    trainer = WithOurCompletions(
        model=model,
        teacher_model=LlamaForCausalLM.from_pretrained(folder / "teacher"),
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
    [{}, {"beta": 0.0}, {"beta": 0.3, "temperature": 0.7}],
    ids=["default", "forward", "between"],
)
def test_the_losses_and_weights_are_trls(bench, prompts, tmp_path, options):  # noqa: F811 - the fixture
    options = {"max_new_tokens": 8, **options}
    prepared = prepare(prompts, cache_dir=bench.cache_dir)
    teacher = build_model(TEACHER, data=prepared, seed=11)
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(20)
    teacher.save_pretrained(tmp_path / "teacher")
    job = bench.job(
        MODEL,
        data=prompts,
        loss=OnPolicyDistillation.name,
        loss_options=options,
        optimizer=SMALL,
        num_steps=NUM_STEPS,
        global_batch_size=NUM_PROMPTS,
        seed=3,
        evaluation=EvaluationSpec(max_batches=1, metrics=("loss",)),
    ).with_features(LossTeacher(model=ModelSpec(from_pretrained=str(tmp_path / "teacher"))))
    ours = bench.reference(job)
    assert ours.outcome.status == "done", ours.outcome
    losses, weights = trained_by_trl(bench, prompts, options, seed=3, folder=tmp_path)
    assert len(losses) == NUM_STEPS
    assert ours.losses == pytest.approx(losses, rel=0, abs=1e-4)
    found = {name: weights[name] for name in ours.weights}
    assert largest_difference(found, ours.weights) <= 1e-4
    initial = build_model(MODEL, data=prepared, seed=3).state_dict()
    assert largest_difference({name: initial[name] for name in found}, found) > 1e-3
