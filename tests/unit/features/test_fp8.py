"""Products in fp8: torchao's numbers, and what they depend on."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from ringmaster.codec import from_json, to_json
from ringmaster.features.fp8 import trainer
from ringmaster.features.fp8.job import Float8
from ringmaster.tasks.batch import Batch, parse_batch
from ringmaster.techniques import Job, registry

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra torchao is not installed")
LARGEST_E4M3 = 448.0


class Layers(nn.Module):
    """Two repeated layers with a bias and without, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(32, 48), nn.Linear(48, 32, bias=False)])
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rounded(values, *, dim):
    """Values rounded to e4m3 with a scale along `dim` (None: of the whole), a power of two, as of the recipe."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(LARGEST_E4M3 / largest.double()))).float()
    return (values.float() * scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).float() / scale


def step(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    (output.float() ** 2).sum().backward()
    return output.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@needs_torchao
def test_a_layer_multiplies_the_rounded_rows():
    torch.manual_seed(1)
    x, y = torch.randn(3, 5, 32).bfloat16(), torch.randn(3, 5, 48).bfloat16()
    linear = nn.Linear(32, 48, bias=False)
    model = trainer.convert(nn.ModuleList([linear]), emulate=True)[0]
    inputs = x.clone().requires_grad_()
    output = model(inputs)
    output.backward(y)
    assert torch.equal(output, (rounded(x, dim=-1) @ rounded(linear.weight, dim=-1).T).bfloat16())
    assert torch.equal(inputs.grad, (rounded(y, dim=-1) @ rounded(linear.weight, dim=None)).bfloat16())
    of_weight = torch.mm(y.reshape(-1, 48).T, x.reshape(-1, 32))  # not rounded
    assert torch.equal(model.weight.grad, of_weight.float())


@needs_torchao
def test_steps_have_the_numbers_of_torchaos_own_conversion():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    object.__setattr__(config, "emulate", True)
    plain = Layers()
    made = trainer.convert(copy.deepcopy(plain), emulate=True)
    by_hand = convert_to_float8_training(plain, config=config, module_filter_fn=lambda _, name: "layers" in name)
    x, optimizers = torch.randn(6, 32).bfloat16(), [torch.optim.SGD(m.parameters(), lr=0.01) for m in (made, by_hand)]
    for _ in range(20):
        # Without autocast, which torchao reads of GPUs alone: the inputs are in bf16, as under autocast.
        outputs = [model.layers[1](model.layers[0](x)) for model in (made, by_hand)]
        assert torch.equal(*outputs)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            (output.float() ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), by_hand.parameters(), strict=True))


@needs_torchao
def test_rows_do_not_depend_on_the_rows_beside_them():
    model, rows = trainer.convert(Layers(), emulate=True), torch.randn(8, 32) * torch.logspace(-3, 3, 8)[:, None]
    whole, gradients = step(copy.deepcopy(model), rows)
    parts, outputs = copy.deepcopy(model), []
    for part in (rows[:3], rows[3:]):
        output, summed = step(parts, part)
        outputs.append(output)
    assert torch.equal(torch.cat(outputs), whole)
    for name, gradient in gradients.items():
        assert torch.allclose(summed[name], gradient, rtol=2e-2, atol=1e-3 * float(gradient.abs().max())), name


@needs_torchao
def test_the_kernels_agree_with_the_emulation():
    model, x = Layers(), torch.randn(4, 32)
    (emulated, _), (output, gradients) = (
        step(trainer.convert(copy.deepcopy(model), emulate=emulate), x) for emulate in (True, False)
    )
    assert torch.allclose(output, emulated, rtol=2e-2, atol=1e-2)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())


@needs_torchao
def test_evaluations_are_of_the_model_in_bf16():
    plain, x = Layers(), torch.randn(4, 32)
    made = trainer.convert(copy.deepcopy(plain), emulate=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(made.eval()(x), plain(x))
        assert not torch.equal(made.train()(x), plain(x))


@needs_torchao
def test_layers_of_other_sides_and_the_head_stay():
    model = Layers()
    model.layers.append(nn.Linear(32, 24))
    parameters = dict(model.named_parameters())
    trainer.convert(model, emulate=True)
    assert [type(layer).__name__ for layer in model.layers] == ["LinearInFloat8", "LinearInFloat8", "Linear"]
    assert type(model.head) is nn.Linear
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


@needs_torchao
def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match=r"no linear layers .* multiples of 16. To fix: set precision to bf16"):
        trainer.convert(nn.ModuleList([nn.Linear(20, 20)]))


def test_a_gpu_that_cannot_multiply_in_fp8_is_refused(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert trainer.why_no_products(gpu).endswith("needs compute capability 8.9, and NVIDIA A100 has 8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert trainer.why_no_products(gpu) == ""
    assert "CPUs have no units for fp8" in trainer.why_no_products(torch.device("cpu"))


def test_techniques_that_divide_layers_are_refused():
    reasons = {
        name: Float8().why_not(registry.load(registry.dotted_path(name)))
        for name in ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp_static", "offload", "pipeline", "context")
    }
    assert set(reasons.values()) == {None}
    for name in ("tensor", "mesh"):
        assert name in Float8().why_not(registry.load(registry.dotted_path(name)))


JOB = "{name: a, model: {architecture: GPT2LMHeadModel}, data: {path: a.txt, seq_len: 8, vocab_size: 300}, num_steps: 1"


def parsed(tmp_path, more, *, batch=""):
    (tmp_path / "a.txt").write_text("text " * 99)
    return parse_batch(f"jobs: [{JOB}, {more}}}]\n{batch}", folder=tmp_path, name="batch.yaml")


@needs_torchao
@pytest.mark.parametrize(("more", "emulate"), [("", False), (", fp8: {emulate: true}", True)])
def test_files_give_jobs_in_bf16_with_the_feature(tmp_path, more, emulate):
    (job,) = parsed(tmp_path, f"precision: fp8{more}").jobs
    assert (job.precision, job.features) == ("bf16", (Float8(emulate=emulate),))
    assert from_json(Job, to_json(job)) == job
    assert Batch.of(name="again", jobs=[job], folder=tmp_path).jobs == (job,)


@needs_torchao
@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("fp8: {emulate: true}", r"fp8: is for precision: fp8. To fix: set precision to fp8"),
        ("precision: bf16, fp8: {}", r"fp8: is for precision: fp8"),
        ("precision: bf16-params, fp8: {}", r"fp8: is for precision: fp8"),
        ("precision: fp8, adapter: {rank: 4}", r"precision: fp8 is for models of which all weights are trained"),
        ("precision: fp9", r"precision: 'fp9' is unknown. To fix: did you mean `fp8`"),
    ],
)
def test_jobs_that_cannot_compute_in_fp8_are_refused(tmp_path, more, fault):
    with pytest.raises(ValueError, match=fault):
        parsed(tmp_path, more)


@needs_torchao
def test_jobs_that_share_a_component_are_refused(tmp_path):
    shared = "shared_components: {part: {jobs: {a: transformer, b: transformer}}}"
    with pytest.raises(ValueError, match=r"part.jobs.b: has precision: fp8, which is not trained with a shared"):
        parsed(tmp_path, f"precision: fp8}}, {JOB.replace('name: a', 'name: b')}, precision: fp8", batch=shared)


def test_devices_that_have_no_products_in_fp8_are_refused():
    assert "CPUs have no units" in (Float8().why_not_on("cpu") or "")
    assert Float8().why_not_on("gpu") is None
    assert Float8(emulate=True).why_not_on("cpu") is None


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("ringmaster.extras.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"precision: fp8 needs torchao, not installed. To fix: pip install"):
        parsed(tmp_path, "precision: fp8")
    with pytest.raises(ValueError, match=r"precision: fp8 needs torchao, not installed. To fix: pip install"):
        trainer.convert(Layers())  # on a node that lacks it
