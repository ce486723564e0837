"""Quantization-aware training: torchao's numbers used by hand, and the same under every technique."""

from importlib.util import find_spec

import pytest
import torch

from ringmaster.techniques import AdaptationSpec, registry
from ringmaster.techniques.data import fetch, open_data, prepare, sampler_of
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.quantization import torchao_config
from tests.integration.techniques.test_conformance import SWITCHED
from tests.integration.workbench import SINGLE, Layout, largest_difference
from tests.matrix import matrix

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra torchao is not installed")
DYNAMIC, WEIGHTS = (
    AdaptationSpec(kind="quantization-aware", method=method) for method in ("dynamic-int8-int4", "weight-only-int4")
)
DIVIDED_BATCH = Layout("single", 1, {"micro_batch": 3, "recompute": "full"})
WHOLE_LAYERS = [layout for layout in SWITCHED[1:] if registry.load(layout.path).whole_layers]


@pytest.mark.parametrize("said", matrix([DYNAMIC, WEIGHTS], quick=[WEIGHTS], ids=["dynamic", "weights"]))
def test_twenty_steps_are_those_of_torchao_by_hand(bench, tmp_path, said):
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    job = bench.job(features=(said,), num_steps=20)
    trained = bench.train(job, SINGLE, tmp_path)
    data = prepare(job.data, cache_dir=bench.cache_dir)
    training, _ = open_data(job.data, cache_dir=bench.cache_dir, prepared=data)
    model, sampler = build_model(job.model, data=data, seed=job.seed), sampler_of(job, training)
    quantize_(
        model, QATConfig(torchao_config(said.method, group_size=32), step="prepare"), lambda m, name: "_proj" in name
    )
    optimizer, losses, num_threads = torch.optim.SGD(model.parameters(), lr=0.1), [], torch.get_num_threads()
    torch.set_num_threads(1)  # as of a rank, so that sums have its order: last digits decide roundings
    for step in range(20):
        batch = fetch(training, sampler.indices(step))
        logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.mul_(1 / labels.numel())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / labels.numel())
    torch.set_num_threads(num_threads)
    difference = largest_difference(trained.weights, {k: v.detach() for k, v in model.state_dict().items()})
    assert trained.losses == pytest.approx(losses, rel=0, abs=1e-5)
    assert difference <= 1e-5


@pytest.mark.parametrize("said", matrix([DYNAMIC, WEIGHTS], quick=[WEIGHTS], ids=["dynamic", "weights"]))
@pytest.mark.parametrize("layout", matrix([DIVIDED_BATCH, *WHOLE_LAYERS], quick=[]))
def test_rounded_weights_are_trained_alike_under_every_technique(bench, tmp_path, said, layout):
    """The first step is the same. Later a last digit may decide to which side a weight is rounded."""
    one, more = bench.job(features=(said,), num_steps=1), bench.job(features=(said,))
    trained = bench.train(one, layout, tmp_path / "one")
    assert largest_difference(trained.weights, bench.reference(one).weights) <= (2e-7 if said is WEIGHTS else 1e-4)
    losses = bench.train(more, layout, tmp_path / "more").losses
    assert losses == pytest.approx(bench.reference(more).losses, rel=0, abs=2e-3)


def test_its_evaluations_round_and_its_export_does_not(bench):
    trained, plain = bench.reference(bench.job(features=(WEIGHTS,))), bench.reference(bench.job())
    assert trained.weights.keys() == plain.weights.keys()
    assert {tensor.dtype for tensor in trained.weights.values()} == {torch.float32}
    assert len(trained.weights["model.layers.0.mlp.up_proj.weight"].unique()) > 1000
    (compared,) = trained.outcome.result.compared
    assert compared["metrics"]["loss"] != pytest.approx(trained.outcome.result.metrics["loss"], abs=1e-6)


@pytest.mark.parametrize("said", matrix([DYNAMIC, WEIGHTS], quick=[WEIGHTS], ids=["dynamic", "weights"]))
def test_the_quantized_model_has_the_numbers_of_the_rounded_one(bench, tmp_path, said):
    trained = bench.reference(bench.job(features=(said,)))
    how = AdaptationSpec(kind="quantized", method=said.method)
    job = bench.job(name="converted", base="tiny", num_steps=0, features=(how,))
    folder = trained.order.model_dir
    changes = {"weights_from": folder, "parents": {"tiny": folder}}
    converted = bench.train(job, Layout("rewrite"), tmp_path, **changes).outcome.result
    metrics, plain = trained.outcome.result.metrics, converted.compared[1]["metrics"]
    assert converted.metrics["loss"] == pytest.approx(metrics["loss"], abs=2e-6 if said is WEIGHTS else 1e-4)
    assert converted.metrics["loss"] != pytest.approx(plain["loss"], abs=1e-6)
