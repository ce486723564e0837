"""A base that is stored in bf16: half the memory, and each client still has the bits that it has alone."""

import pytest
import torch

from ringmaster.features.endpoint.compute.endpoint import Endpoint
from ringmaster.features.endpoint.compute.requests import AdamStep, AdapterSpec
from tests.unit.serving.served import LIMITS, is_equal, request_of, train, weights_of, write_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def opened(base):
    """Opens an endpoint of the base in a folder."""
    endpoints = []

    def open_in(folder, *, precision="bf16"):
        endpoints.append(Endpoint(base=base, limits=LIMITS, folder=folder, precision=precision))
        return endpoints[-1]

    yield open_in
    for endpoint in endpoints:
        endpoint.close()


def test_its_weights_are_in_bf16_and_those_of_adapters_in_fp32(opened, tmp_path):
    endpoint = opened(tmp_path)
    endpoint.add("ann", AdapterSpec(rank=2))
    weights = [p for p in endpoint._stem.model.parameters() if p.dim() > 1]
    assert {each.dtype for each in weights} == {torch.bfloat16}
    assert {each.dtype for each in endpoint._adapters["ann"].state().values()} == {torch.float32}


def test_it_learns_what_a_base_in_fp32_learns_nearly(opened, tmp_path):
    losses = {}
    for precision in ("fp32", "bf16"):
        endpoint = opened(tmp_path / precision, precision=precision)
        endpoint.add("ann", AdapterSpec(rank=4, seed=1))
        losses[precision] = [train(endpoint, "ann", num_steps=1, seed=0)[0] for _ in range(6)]
    assert losses["bf16"][:3] == pytest.approx(losses["fp32"][:3], rel=0.01)
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"][-1] < losses["bf16"][0]


def test_clients_that_compute_together_have_the_bits_that_each_has_alone(opened, tmp_path):
    alone = {}
    for i, name in enumerate(("ann", "bob", "cid")):
        endpoint = opened(tmp_path / name)
        endpoint.add(name, AdapterSpec(rank=1 + i, seed=i))
        train(endpoint, name, num_steps=2, seed=10 * i, lengths=(5 + 9 * i, 12))
        alone[name] = weights_of(endpoint, name)
    together = opened(tmp_path / "all")
    for i, name in enumerate(alone):
        together.add(name, AdapterSpec(rank=1 + i, seed=i))
    for step in range(2):
        together.compute(
            [request_of(name, seed=10 * i + step, lengths=(5 + 9 * i, 12)) for i, name in enumerate(alone)]
        )
        together.step([AdamStep(client=name, learning_rate=1e-2) for name in alone])
    assert all(is_equal(weights_of(together, name), alone[name]) for name in alone)


def test_a_killed_one_continues_with_the_same_bits(opened, tmp_path):
    undisturbed, killed = opened(tmp_path / "a"), opened(tmp_path / "b")
    for endpoint in (undisturbed, killed):
        endpoint.add("ann", AdapterSpec(rank=2, seed=3))
        train(endpoint, "ann", num_steps=2)
    restored = opened(tmp_path / "b")  # from the journal: the other one has stored nothing whole since
    for endpoint in (undisturbed, restored):
        train(endpoint, "ann", num_steps=2, seed=7)
    assert is_equal(weights_of(undisturbed, "ann"), weights_of(restored, "ann"))
