"""Optimizers of jobs: each takes the steps of a plain loop, with the settings of each parameter."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from ringmaster.codec import digest, from_json, to_json
from ringmaster.techniques import DataSpec, Job, ModelSpec, OptimizerSpec, ScheduleSpec
from ringmaster.techniques.job_specs import OPTIMIZER_OPTIONS, ParameterGroup
from ringmaster.techniques.training.optimizers import build_optimizer, check_options, parameter_settings, update_
from ringmaster.techniques.training.rank_job import weights_digest

NUM_STEPS = 5


def llama(*, seed=0, **config):
    torch.manual_seed(seed)
    small = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=1, **config))


def vit():
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **small))


def job(optimizer, **changes):
    model = ModelSpec(architecture="LlamaForCausalLM")
    return Job(
        name="a", model=model, data=DataSpec(source="digits"), optimizer=optimizer, num_steps=NUM_STEPS, **changes
    )


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (4, 12), generator=generator) for _ in range(NUM_STEPS)]


def trained_by_us(spec, **changes):
    model, ours = llama(), job(spec, **changes)
    settings = parameter_settings(ours, model)
    of = {parameter: settings[name] for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(ours, model.parameters(), settings=of)
    for step, tokens in enumerate(batches()):
        model(input_ids=tokens, labels=tokens).loss.backward()
        update_(ours, optimizer, list(model.parameters()), step=step, to_mean=1.0, norm=None)
        model.zero_grad()
    return model


def trained_by_a_plain_loop(make, *, schedule=None):
    model = llama()
    optimizers = make(model)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) for optimizer in optimizers if schedule]
    for tokens in batches():
        model(input_ids=tokens, labels=tokens).loss.backward()
        for each in [*optimizers, *schedulers]:
            each.step()
        model.zero_grad()
    return model


def assert_equal(one, other, *, atol=0.0):
    for (name, ours), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=atol), name


def lion_of_the_paper(parameters, averages, *, lr, betas, decay):
    """Algorithm 2 of arXiv:2302.06675, written out."""
    for parameter in parameters:
        average = averages.setdefault(parameter, torch.zeros_like(parameter))
        update = torch.sign(betas[0] * average + (1 - betas[0]) * parameter.grad)
        averages[parameter] = betas[1] * average + (1 - betas[1]) * parameter.grad
        parameter.data -= lr * (update + decay * parameter.data)


def test_adafactor_is_that_of_torch():
    ours = trained_by_us(OptimizerSpec(name="adafactor", lr=1e-2, options={"eps": [None, 1e-3], "weight_decay": 0.1}))
    assert_equal(
        ours,
        trained_by_a_plain_loop(lambda m: [torch.optim.Adafactor(m.parameters(), lr=1e-2, weight_decay=0.1)]),
    )


def test_lion_is_that_of_the_paper():
    ours = trained_by_us(OptimizerSpec(name="lion", lr=1e-3, options={"betas": [0.8, 0.95], "weight_decay": 0.1}))
    theirs, averages = llama(), {}
    for tokens in batches():
        theirs(input_ids=tokens, labels=tokens).loss.backward()
        lion_of_the_paper(list(theirs.parameters()), averages, lr=1e-3, betas=(0.8, 0.95), decay=0.1)
        theirs.zero_grad()
    assert_equal(ours, theirs, atol=1e-6)


def test_muon_updates_the_matrices_of_the_layers_and_adamw_the_rest():
    options = {"momentum": 0.9, "weight_decay": 0.2, "adamw_lr": 1e-3, "adamw_weight_decay": 0.05}
    ours = trained_by_us(OptimizerSpec(name="muon", lr=2e-2, options=options))

    def make(model):
        matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2]
        others = [p for name, p in model.named_parameters() if ".layers." not in name or p.dim() < 2]
        assert (len(matrices), len(others)) == (14, 7)
        return [
            torch.optim.Muon(matrices, lr=2e-2, momentum=0.9, weight_decay=0.2),
            torch.optim.AdamW(others, lr=1e-3, weight_decay=0.05, fused=True),
        ]

    assert_equal(ours, trained_by_a_plain_loop(make))


def test_groups_and_a_schedule_are_those_of_torch():
    spec = OptimizerSpec(
        lr=1e-2,
        options={"weight_decay": 0.1},
        groups=(ParameterGroup(match="lm_head.*", lr=1e-1), ParameterGroup(match="*norm*", weight_decay=0.0)),
    )
    ours = trained_by_us(spec, schedule=ScheduleSpec(name="linear"))

    def make(model):
        named = dict(model.named_parameters())
        norms = [p for name, p in named.items() if "norm" in name]
        rest = [p for name, p in named.items() if "norm" not in name and name != "lm_head.weight"]
        groups = [
            {"params": rest},
            {"params": norms, "weight_decay": 0.0},
            {"params": [named["lm_head.weight"]], "lr": 1e-1},
        ]
        return [torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)]

    assert_equal(ours, trained_by_a_plain_loop(make, schedule=lambda step: 1 - step / NUM_STEPS))


def test_layers_decay_as_in_beit():
    model = vit()
    settings = parameter_settings(job(OptimizerSpec(lr=1.0, layer_decay=0.5)), model)
    rates = {name: each.lr for name, each in settings.items()}
    assert rates["vit.embeddings.cls_token"] == rates["vit.embeddings.position_embeddings"] == 0.5**4
    of_layers = [
        {rate for name, rate in rates.items() if f"layer.{i}." in name or f"layers.{i}." in name} for i in range(3)
    ]
    assert of_layers == [{0.5**3}, {0.5**2}, {0.5}]
    assert rates["vit.layernorm.weight"] == rates["classifier.weight"] == rates["classifier.bias"] == 1.0
    assert set(rates) == {name for name, _ in model.named_parameters()}


def test_a_group_overrides_the_decay_over_layers_and_a_later_group_an_earlier_one():
    groups = (
        ParameterGroup(match="*.bias", lr=0.3, weight_decay=0.0),
        ParameterGroup(match="classifier.*", lr=0.7),
    )
    found = parameter_settings(job(OptimizerSpec(lr=1.0, layer_decay=0.5, groups=groups)), vit())
    assert (found["vit.layernorm.bias"].lr, found["vit.layernorm.bias"].weight_decay) == (0.3, 0.0)
    assert (found["classifier.bias"].lr, found["classifier.bias"].weight_decay) == (0.7, 0.0)
    assert (found["classifier.weight"].lr, found["classifier.weight"].weight_decay) == (0.7, None)


def test_norms_and_biases_need_not_decay():
    model = vit()
    found = parameter_settings(job(OptimizerSpec(decay_norms_and_biases=False)), model)
    undecayed = {name for name, each in found.items() if each.weight_decay == 0.0}
    assert undecayed == {name for name, _ in model.named_parameters() if name.endswith(".bias") or "norm" in name}


def test_a_tied_weight_is_found_by_each_of_its_names():
    model = llama(tie_word_embeddings=True)
    spec = OptimizerSpec(groups=(ParameterGroup(match="lm_head.*", lr=0.5),))
    found = parameter_settings(job(spec), model)
    assert found["lm_head.weight"].lr == found["model.embed_tokens.weight"].lr == 0.5


@pytest.mark.parametrize(
    ("spec", "model", "message"),
    [
        (
            OptimizerSpec(groups=(ParameterGroup(match="clasifier.*", lr=1.0),)),
            vit,
            r"optimizer\.groups\[0\]\.match: 'clasifier\.\*' matches no trained parameter.*classifier\.",
        ),
        (
            OptimizerSpec(groups=2 * (ParameterGroup(match="*.bias", lr=1.0),)),
            vit,
            r"optimizer\.groups\[0\]: has no effect.*later groups set it anew for all parameters that '\*\.bias'",
        ),
        (
            OptimizerSpec(groups=(ParameterGroup(match="classifier.*", lr=1.0), ParameterGroup(match="*", lr=0.5))),
            vit,
            r"optimizer\.groups\[0\]: has no effect.*put it after them",
        ),
        (
            OptimizerSpec(groups=(ParameterGroup(match="*"),)),
            vit,
            r"optimizer\.groups\[0\]: has no effect: it sets nothing",
        ),
        (OptimizerSpec(layer_decay=0.9), lambda: nn.Linear(2, 2), "the model has no repeated layers"),
        (OptimizerSpec(name="muon"), lambda: nn.Linear(2, 2), "muon: no trained matrix is in repeated layers"),
    ],
    ids=["group", "double-group", "overridden-group", "empty-group", "layers", "muon"],
)
def test_settings_that_do_not_suit_the_model_are_refused(spec, model, message):
    with pytest.raises(ValueError, match=message):
        parameter_settings(job(spec), model())


@pytest.mark.parametrize("name", OPTIMIZER_OPTIONS)
def test_an_unknown_option_is_refused_with_the_known_ones(name):
    known = ", ".join(OPTIMIZER_OPTIONS[name])
    with pytest.raises(ValueError, match=f"optimizer {name}: has no option speed. To fix: use some of {known}"):
        check_options(job(OptimizerSpec(name=name, options={"speed": 1})))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adafactor", {"d": 0.5}),
        ("lion", {"betas": [0.9, 1.5]}),
        ("lion", {"weight_decay": -1}),
        ("muon", {"adjust_lr_fn": "none"}),
        ("muon", {"adamw_betas": [0.9, 1.5]}),
        ("sgd", {"nesterov": True}),
    ],
)
def test_a_wrong_value_of_an_option_is_refused(name, options):
    with pytest.raises(ValueError, match=rf"optimizer {name}: .*To fix: correct its options"):
        check_options(job(OptimizerSpec(name=name, options=options)))


def test_all_listed_options_are_taken():
    values = {"betas": [0.9, 0.9], "eps": 1e-8, "adamw_betas": [0.9, 0.9], "ns_coefficients": [3.4, -4.7, 2.0]}
    values |= {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 4, "nesterov": True, "amsgrad": True, "d": 1.5}
    values |= {"momentum": 0.9, "dampening": 0.0, "beta2_decay": -0.7}
    for name, known in OPTIMIZER_OPTIONS.items():
        options = {option: values.get(option, 0.01) for option in known}
        check_options(
            job(OptimizerSpec(name=name, options=options | ({"eps": [None, 1e-3]} if name == "adafactor" else {})))
        )


def test_what_trains_other_weights_has_another_digest():
    plain = job(OptimizerSpec())
    others = [
        job(OptimizerSpec(layer_decay=0.9)),
        job(OptimizerSpec(groups=(ParameterGroup(match="*", lr=0.1),))),
        job(OptimizerSpec(decay_norms_and_biases=False)),
        job(OptimizerSpec(), freeze=("*", "!lm_head.*")),
        job(OptimizerSpec(), schedule=ScheduleSpec(min_lr_ratio=0.1)),
    ]
    digests = [weights_digest(each, data_digest="d") for each in [plain, *others]]
    assert len(set(digests)) == len(digests)
    assert all(from_json(Job, to_json(each)) == each for each in others)


def test_jobs_without_the_new_fields_keep_their_digest():
    assert to_json(OptimizerSpec()) == {"name": "adamw", "lr": 1e-3, "options": {}}
    assert "freeze" not in to_json(job(OptimizerSpec()))
    assert digest(OptimizerSpec()) == digest({"name": "adamw", "lr": 1e-3, "options": {}})
