"""Losses against TRL's trainers, which train the same model on the same samples in the same order."""

import copy
from importlib.util import find_spec
from itertools import takewhile

import pytest
import torch

from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.samples import Sampler
from ringmaster.techniques.models.adapters import attach
from ringmaster.techniques.models.build import build_model
from tests.integration.losses.pairs import END, PAD, VOCAB_SIZE, compared, preferences, unpaired
from tests.integration.losses.test_losses import COMPARED, LORA, PREFERENCES, REWARD_MODEL, TINY, UNPAIRED
from tests.integration.workbench import ADAMW

pytestmark = [pytest.mark.full, pytest.mark.skipif(find_spec("trl") is None, reason="no trl, whose losses these are")]

NUM_STEPS, NUM_ROWS = 20, 8


def tokenizer():
    """Returns a tokenizer whose words are the numbers of their tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "</s>": END, **{str(i): i for i in range(2, VOCAB_SIZE)}}
    plain = Tokenizer(WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", pad_token="<pad>")


def texts_in_order(seed, *, samples=preferences, row=None):
    """Returns the samples of 20 steps as rows of text, in the order in which a job reads them."""
    from datasets import Dataset

    training, _ = samples()
    sampler = Sampler(num_samples=len(training), global_batch_size=NUM_ROWS, seed=seed)
    batches = [sampler.indices(step) for step in range(NUM_STEPS)]
    return Dataset.from_list([(row or row_of)(training[int(i)]) for batch in batches for i in batch])


def row_of(sample):
    both = list(zip(sample["input_ids"].tolist(), sample["labels"].tolist(), strict=True))
    prompt = [token for token, label in zip(*both[0], strict=True) if label == -100 and token != PAD]
    answers = [list(takewhile(lambda token: token != END, tokens[len(prompt) :])) for tokens, _ in both]
    said = [" ".join(map(str, tokens)) for tokens in (prompt, *answers)]
    return {"prompt": said[0], "chosen": f" {said[1]}", "rejected": f" {said[2]}"}


def unpaired_row_of(sample):
    both = {name: tokens.repeat(2, 1) for name, tokens in sample.items() if name != "desirable"}
    row = row_of(both)
    return {"prompt": row["prompt"], "completion": row["chosen"], "label": bool(sample["desirable"])}


def compared_row_of(sample):
    texts = [
        " ".join(str(int(token)) for token, is_there in zip(*each, strict=True) if is_there and token != END)
        for each in zip(sample["input_ids"], sample["attention_mask"], strict=True)
    ]
    return {"chosen": texts[0], "rejected": texts[1], "margin": float(sample["margin"])}


def losses_of(base, config, model, *, seed, rows=None, **more):
    """Returns the losses of 20 steps of a trainer of TRL's, by the optimizer of the tests."""

    class Recording(base):
        losses: list[float]

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.losses.append(float(loss[0] if isinstance(loss, tuple) else loss))
            return loss

        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=ADAMW.lr)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = Recording(
        model=model,
        args=config,
        train_dataset=texts_in_order(seed) if rows is None else rows,
        processing_class=tokenizer(),
        optimizers=(optimizer, schedule),
        **more,
    )
    trainer.losses = []
    trainer.train()
    return trainer.losses


def settings(folder):
    return {
        "output_dir": str(folder),
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": NUM_ROWS,
        "max_grad_norm": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def made_by_trl(loss, options, model, *, folder, seed):
    if loss == "dpo":
        from trl import DPOConfig, DPOTrainer

        said = {"beta": options["beta"], "loss_type": [options.get("loss_type", "sigmoid")]}
        more = {} if hasattr(model, "peft_config") else {"ref_model": copy.deepcopy(model)}
        return losses_of(DPOTrainer, DPOConfig(**settings(folder), **said), model, seed=seed, **more)
    if loss == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return losses_of(ORPOTrainer, ORPOConfig(**settings(folder), beta=options["beta"]), model, seed=seed)
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    said = {"beta": options["beta"], "simpo_gamma": options["gamma"], "cpo_alpha": 0.0, "loss_type": "simpo"}
    return losses_of(CPOTrainer, CPOConfig(**settings(folder), **said), model, seed=seed)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("dpo", {"beta": 0.5}),
        ("dpo", {"beta": 0.5, "loss_type": "ipo"}),
        ("orpo", {"beta": 0.3}),
        ("simpo", {"beta": 2.0, "gamma": 1.0}),
    ],
    ids=["dpo", "ipo", "orpo", "simpo"],
)
def test_twenty_steps_have_trls_losses(bench, tmp_path, loss, options):
    job = bench.job(
        TINY, data=PREFERENCES, loss=loss, loss_options=options, optimizer=ADAMW, num_steps=NUM_STEPS, seed=3
    )
    ours = bench.reference(job).losses
    model = build_model(TINY, data=prepare(PREFERENCES, cache_dir=bench.cache_dir), seed=3)
    theirs = made_by_trl(loss, options, model, folder=tmp_path, seed=3)
    assert len(theirs) == NUM_STEPS
    assert ours == pytest.approx(theirs, rel=0, abs=1e-4)
    assert ours[-1] < ours[0]


def attach_state(model, *, seed):
    """Returns the tensors of the adapter that a job attaches to a model."""
    state = attach(model, LORA, seed=seed).state_dict()
    return {name: value for name, value in state.items() if "lora_" in name}


def set_adapter(model, state):
    """Sets the adapter of a model of peft's to given tensors."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(state.pop(name.removeprefix("base_model.model.").replace(".default", "")))
    assert not state


def test_an_adapter_has_trls_losses_too(bench, tmp_path):
    """TRL also compares with the model without its adapter."""
    from peft import LoraConfig, get_peft_model

    options = {"beta": 0.5}
    job = bench.job(
        TINY, data=PREFERENCES, loss="dpo", loss_options=options, optimizer=ADAMW, num_steps=NUM_STEPS, adapter=LORA
    )
    ours = bench.reference(job).losses
    data = prepare(PREFERENCES, cache_dir=bench.cache_dir)
    state = attach_state(build_model(TINY, data=data, seed=0), seed=0)
    theirs_model = get_peft_model(
        build_model(TINY, data=data, seed=0),
        LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    set_adapter(theirs_model, state)
    theirs = made_by_trl("dpo", options, theirs_model, folder=tmp_path, seed=0)
    assert ours == pytest.approx(theirs, rel=0, abs=1e-4)
    assert ours[-1] < ours[0]


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.7},
        {"beta": 0.5, "loss_type": "apo_zero_unpaired"},
    ],
    ids=["kto", "apo"],
)
def test_kto_has_trls_losses(bench, tmp_path, options, adapter):
    """TRL makes mismatched rows of batches in the order of the data, which are the global batches here."""
    from peft import LoraConfig, get_peft_model
    from trl import KTOConfig, KTOTrainer

    job = bench.job(
        TINY,
        data=UNPAIRED,
        loss="kto",
        loss_options=options,
        optimizer=ADAMW,
        num_steps=NUM_STEPS,
        seed=3,
        adapter=adapter,
    )
    ours = bench.reference(job).losses
    model = build_model(TINY, data=prepare(UNPAIRED, cache_dir=bench.cache_dir), seed=3)
    more = {"ref_model": copy.deepcopy(model)}
    if adapter is not None:
        config = LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        state = attach_state(model, seed=3)
        model = get_peft_model(build_model(TINY, data=prepare(UNPAIRED, cache_dir=bench.cache_dir), seed=3), config)
        set_adapter(model, state)
        more = {}
    theirs = losses_of(
        KTOTrainer,
        KTOConfig(**settings(tmp_path), **options),
        model,
        seed=3,
        rows=texts_in_order(3, samples=unpaired, row=unpaired_row_of),
        **more,
    )
    assert len(theirs) == NUM_STEPS
    assert ours == pytest.approx(theirs, rel=0, abs=1e-4)
    assert ours[-1] < ours[0]


@pytest.mark.parametrize("coefficient", [0.0, 0.05])
def test_reward_models_have_trls_losses(bench, tmp_path, coefficient):
    from trl import RewardConfig, RewardTrainer

    options = {"center_rewards_coefficient": coefficient}
    job = bench.job(
        REWARD_MODEL,
        data=COMPARED,
        loss="bradley-terry",
        loss_options=options,
        optimizer=ADAMW,
        num_steps=NUM_STEPS,
        seed=3,
    )
    ours = bench.reference(job).losses
    theirs = losses_of(
        RewardTrainer,
        RewardConfig(**settings(tmp_path), **options),
        build_model(REWARD_MODEL, data=prepare(COMPARED, cache_dir=bench.cache_dir), seed=3),
        seed=3,
        rows=texts_in_order(3, samples=compared, row=compared_row_of),
    )
    assert len(theirs) == NUM_STEPS
    assert ours == pytest.approx(theirs, rel=0, abs=1e-4)
    assert ours[-1] < ours[0]
