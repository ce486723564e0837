"""What an endpoint computes: each client's bits whoever else is there, states that outlive a kill, checkpoints."""

import errno
import random
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from ringmaster.features.endpoint.compute.client_adapter import ClientAdapter
from ringmaster.features.endpoint.compute.client_costs import ComputationTimes
from ringmaster.features.endpoint.compute.client_folders import ClientFolders
from ringmaster.features.endpoint.compute.request_journal import RequestJournal
from ringmaster.features.endpoint.compute.requests import (
    AdamStep,
    AdapterSpec,
    EndpointLostError,
    RequestRefusal,
    SamplingRequest,
    TokenRow,
)
from ringmaster.techniques.multi_adapter.multi_adapter_base import MultiAdapterBase

from .served import (
    LIMITS,
    LOSSES,
    SEQ_LEN,
    is_equal,
    open_endpoint,
    request_of,
    row_of,
    train,
    weights_of,
    write_base,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "llama")


NUM_CLIENTS, NUM_STEPS = 16, 3
SPECS = [
    AdapterSpec(rank=(8, 4, 2, 3)[i % 4], seed=i, train_mlp=i % 3 > 0, train_unembed=i % 2 > 0)
    for i in range(NUM_CLIENTS)
]


def lengths_of(i):
    return (SEQ_LEN, 5, 20, 33, 16)[i % 5 :][:1]


def step_of(client, i):
    return AdamStep(
        client=client,
        learning_rate=1e-2 / (i + 1),
        beta2=0.95 if i % 2 else 0.99,
        weight_decay=0.01 * (i % 3),
        grad_clip_norm=0.5 * (i % 2),
    )


def together(endpoint, *, order):
    """Every client's loop, interleaved: each computation and each step is of whichever clients are ready by chance."""
    done, waiting = dict.fromkeys(order, 0), set()
    losses = {i: [] for i in order}
    joined = set()
    chance = random.Random(0)
    while any(done[i] < NUM_STEPS for i in order):
        chosen = [i for i in order if done[i] < NUM_STEPS and chance.random() < 0.6]
        for i in chosen:
            if i not in joined:
                endpoint.add(f"c{i}", SPECS[i])
                joined.add(i)
        ready = [i for i in chosen if i not in waiting]
        requests = [
            request_of(f"c{i}", lengths=lengths_of(i), loss=LOSSES[i % len(LOSSES)], seed=10 * i + done[i])
            for i in ready
        ]
        for i, result in zip(ready, endpoint.compute(requests), strict=True):
            losses[i].append((result.metrics["loss:sum"], result.outputs[0]["logprobs"]))
            waiting.add(i)
        stepping = [i for i in sorted(waiting) if chance.random() < 0.7]
        for i, answer in zip(stepping, endpoint.step([step_of(f"c{i}", i) for i in stepping]), strict=True):
            assert not isinstance(answer, RequestRefusal)
            waiting.remove(i)
            done[i] += 1
    return losses


def test_each_of_16_clients_gets_the_bits_that_it_gets_alone(base, tmp_path):
    mixed = open_endpoint(base, tmp_path / "mixed")
    assert mixed.batches
    losses = together(mixed, order=range(NUM_CLIENTS))
    alone = open_endpoint(base, tmp_path / "alone")
    for i in range(NUM_CLIENTS):
        alone_losses = together(alone, order=[i])
        for (total, logprobs), (own_total, own_logprobs) in zip(losses[i], alone_losses[i], strict=True):
            assert total == own_total and torch.equal(logprobs, own_logprobs)
        assert is_equal(weights_of(mixed, f"c{i}"), weights_of(alone, f"c{i}"))
        alone.remove(f"c{i}")


def test_where_bits_depend_on_the_batch_clients_are_computed_one_after_another(base, tmp_path, monkeypatch):
    monkeypatch.setattr("ringmaster.features.endpoint.compute.endpoint.independent_multiple", lambda *_, **__: None)
    endpoint, alone = open_endpoint(base, tmp_path / "one"), open_endpoint(base, tmp_path / "other")
    assert not endpoint.batches
    for name in ("a", "b"):
        endpoint.add(name, AdapterSpec(rank=4))
    alone.add("a", AdapterSpec(rank=4))
    endpoint.compute([request_of("b", lengths=(2, 7), seed=3), request_of("a", lengths=(3,))])
    alone.compute([request_of("a", lengths=(3,))])
    for each in (endpoint, alone):
        each.step([AdamStep(client="a")])
    assert is_equal(weights_of(endpoint, "a"), weights_of(alone, "a"))


def test_a_client_whose_loss_is_not_finite_leaves_the_others_alone(base, tmp_path):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("good", AdapterSpec(rank=4))
    endpoint.add("bad", AdapterSpec(rank=4))
    row = row_of(length=20, loss="cross_entropy", seed=1)
    broken = TokenRow(tokens=row.tokens, loss_inputs={**row.loss_inputs, "weights": torch.full((20,), torch.inf)})
    bad = replace(request_of("bad"), rows=(broken,))
    endpoint.compute([bad, request_of("good", seed=1)])
    answers = endpoint.step([AdamStep(client="bad"), AdamStep(client="good")])
    assert isinstance(answers[0], RequestRefusal) and "not finite" in answers[0].reason and answers[0].drops_gradients
    alone = open_endpoint(base, tmp_path / "alone")
    alone.add("good", AdapterSpec(rank=4))
    alone.compute([request_of("good", seed=1)])
    alone.step([AdamStep(client="good")])
    assert is_equal(weights_of(endpoint, "good"), weights_of(alone, "good"))
    assert endpoint.clients()["bad"].step == 0


def test_gradients_of_several_requests_and_rows_are_summed(base, tmp_path):
    endpoint = open_endpoint(base, tmp_path)
    for name in ("one", "two"):
        endpoint.add(name, AdapterSpec(rank=4))
    whole = request_of("one", lengths=(20, 7, 33))
    endpoint.compute([whole])
    endpoint.compute([replace(whole, client="two", rows=whole.rows[:1])])
    endpoint.compute([replace(whole, client="two", rows=(row,)) for row in whole.rows[1:]])
    norms = [answer["grad_norm"] for answer in endpoint.step([AdamStep(client="one"), AdamStep(client="two")])]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_losses_and_steps_are_those_of_a_plain_loop_of_peft(base, tmp_path):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4, seed=3))
    start = endpoint.save("c", "start", with_optimizer=False)
    losses = train(endpoint, "c", num_steps=4, lengths=(20, 33))
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), start, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    expected = []
    for step in range(4):
        total = 0.0
        for row in request_of("c", lengths=(20, 33), seed=step).rows:
            logits = model(input_ids=torch.tensor([row.tokens])).logits[0]
            logprobs = logits.log_softmax(-1).gather(-1, row.loss_inputs["target_tokens"][:, None])[:, 0]
            total = total - (logprobs * row.loss_inputs["weights"]).sum()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total.item())
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, value in weights_of(endpoint, "c").items():
        own = name.replace(".weight", ".default.weight") if "lora" in name else name
        assert torch.allclose(dict(model.named_parameters())[own], value, atol=2e-3), name


def test_targets_may_be_several_for_each_token(base, tmp_path):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4))
    row = row_of(length=20, loss="cross_entropy", seed=1)
    targets, weights = row.loss_inputs["target_tokens"], row.loss_inputs["weights"]
    doubled = {"target_tokens": torch.stack([targets, targets.flip(0)], 1), "weights": weights[:, None].repeat(1, 2)}
    several, one = endpoint.compute(
        [
            replace(request_of("c"), rows=(TokenRow(tokens=row.tokens, loss_inputs=doubled),), with_gradients=False),
            replace(request_of("c"), rows=(row,), with_gradients=False),
        ]
    )
    assert torch.allclose(several.outputs[0]["logprobs"][:, 0], one.outputs[0]["logprobs"], atol=1e-5)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_checkpoint_is_loaded_with_its_optimizer_or_a_fresh_one(base, tmp_path, with_optimizer):
    endpoint = open_endpoint(base, tmp_path)
    for name in ("one", "two"):
        endpoint.add(name, AdapterSpec(rank=4))
    train(endpoint, "one", num_steps=2)
    folder = endpoint.save("one", "runs/at-2", with_optimizer=with_optimizer)
    endpoint.load("two", folder, with_optimizer=with_optimizer)
    assert endpoint.clients()["two"].step == (2 if with_optimizer else 0)
    assert is_equal(weights_of(endpoint, "one"), weights_of(endpoint, "two"))
    for name in ("one", "two"):
        train(endpoint, name, num_steps=1, seed=9)
    assert is_equal(weights_of(endpoint, "one"), weights_of(endpoint, "two")) == with_optimizer


def test_what_does_not_fit_is_not_loaded(base, tmp_path):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("four", AdapterSpec(rank=4))
    endpoint.add("two", AdapterSpec(rank=2))
    folder = endpoint.save("four", "weights", with_optimizer=False)
    with pytest.raises(ValueError, match="rank 4"):
        endpoint.load("two", folder, with_optimizer=False)
    with pytest.raises(ValueError, match="without its optimizer"):
        endpoint.load("four", folder, with_optimizer=True)
    with pytest.raises(ValueError, match="not a name"):
        endpoint.save("four", "../weights", with_optimizer=False)


@pytest.mark.parametrize("share", [0.0, 1e9], ids=["from its journal", "from whole states"])
def test_a_killed_endpoint_goes_on_bit_by_bit(base, tmp_path, monkeypatch, share):
    monkeypatch.setattr("ringmaster.features.endpoint.compute.endpoint.STORING_SHARE", share)
    whole = open_endpoint(base, tmp_path / "whole")
    killed = open_endpoint(base, tmp_path / "killed")
    for endpoint in (whole, killed):
        endpoint.add("a", AdapterSpec(rank=4, seed=1))
        endpoint.add("gone", AdapterSpec(rank=4, seed=2))
        train(endpoint, "a", num_steps=2)
        train(endpoint, "gone", num_steps=1)
        endpoint.remove("gone")
        endpoint.add("b", AdapterSpec(rank=2, seed=3))
        train(endpoint, "b", num_steps=1, loss="ppo")
        endpoint.load("b", endpoint.save("b", "weights", with_optimizer=True), with_optimizer=True)
        endpoint.compute([request_of("a", seed=7), request_of("b", seed=7)])
    killed = open_endpoint(base, tmp_path / "killed")  # on the files of one that is not closed
    assert killed.clients() == whole.clients()
    for endpoint in (whole, killed):
        endpoint.step([AdamStep(client="a"), AdamStep(client="b")])  # of gradients from before the kill
        train(endpoint, "b", num_steps=1, seed=8)
    for client in ("a", "b"):
        assert is_equal(weights_of(whole, client), weights_of(killed, client))


def test_gradients_that_are_forgotten_stay_forgotten(base, tmp_path):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4))
    endpoint.compute([request_of("c")])
    endpoint.forget_gradients()
    for each in (endpoint, open_endpoint(base, tmp_path)):
        (answer,) = each.step([AdamStep(client="c")])
        assert isinstance(answer, RequestRefusal) and "no gradients" in answer.reason


def test_the_gradients_of_one_client_are_forgotten_alone(base, tmp_path):
    endpoint = open_endpoint(base, tmp_path)
    for name in ("one", "two"):
        endpoint.add(name, AdapterSpec(rank=4))
    endpoint.compute([request_of("one"), request_of("two")])
    endpoint.forget_gradients("one")
    forgotten, kept = endpoint.step([AdamStep(client="one"), AdamStep(client="two")])
    assert isinstance(forgotten, RequestRefusal) and kept["grad_norm"] > 0


def test_a_record_that_a_kill_cut_off_is_left_out(base, tmp_path, monkeypatch):
    # whole states remove the journal
    monkeypatch.setattr("ringmaster.features.endpoint.compute.endpoint.STORING_SHARE", 0.0)
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4))
    train(endpoint, "c", num_steps=2)
    (journal,) = tmp_path.glob("journal-*.bin")
    journal.write_bytes(journal.read_bytes()[:-1])
    again = open_endpoint(base, tmp_path)
    assert again.clients()["c"].step == 1
    train(again, "c", num_steps=1)
    assert open_endpoint(base, tmp_path).clients()["c"].step == 2


def test_whole_states_take_a_small_share_of_the_time(base, tmp_path, monkeypatch):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4))
    written = []
    monkeypatch.setattr(ClientFolders, "write", lambda self, client, adapter, number: written.append(number))
    monkeypatch.setattr("ringmaster.features.endpoint.compute.endpoint.STORING_SHARE", 0.0)
    train(endpoint, "c", num_steps=2)
    assert written == []
    monkeypatch.setattr("ringmaster.features.endpoint.compute.endpoint.STORING_SHARE", 1e9)
    train(endpoint, "c", num_steps=2)
    assert written == [5, 6, 7, 8]


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_refuses_steps_and_changes_nothing(base, tmp_path, monkeypatch):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4))
    endpoint.compute([request_of("c")])
    with monkeypatch.context() as full:
        full.setattr(RequestJournal, "append", full_disk)
        (refused,) = endpoint.step([AdamStep(client="c")])
    assert isinstance(refused, RequestRefusal) and "No space left" in refused.reason
    endpoint.step([AdamStep(client="c")])
    assert endpoint.clients()["c"].step == 1


def test_whole_states_that_a_full_disk_does_not_take_are_left_to_the_journal(base, tmp_path, monkeypatch):
    monkeypatch.setattr("ringmaster.features.endpoint.compute.endpoint.STORING_SHARE", 1e9)
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4))
    with monkeypatch.context() as full:
        full.setattr(ClientFolders, "write", full_disk)
        train(endpoint, "c", num_steps=2)
    weights = weights_of(endpoint, "c")
    assert is_equal(weights_of(open_endpoint(base, tmp_path), "c"), weights)


def test_a_checkpoint_is_not_loaded_where_the_disk_is_full(base, tmp_path, monkeypatch):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4))
    folder = endpoint.save("c", "first", with_optimizer=True)
    train(endpoint, "c", num_steps=1)
    endpoint.compute([request_of("c")])
    weights = weights_of(endpoint, "c")
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(ClientFolders, "write", full_disk)
        endpoint.load("c", folder, with_optimizer=True)
    assert is_equal(weights_of(endpoint, "c"), weights)
    assert endpoint.clients()["c"].step == 1
    assert endpoint.step([AdamStep(client="c")])[0]["grad_norm"] > 0


def no_memory(*_, **__):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("fails", ["learn", "outputs", "hidden_states", "take_step"])
def test_an_endpoint_whose_computation_fails_is_opened_anew(base, tmp_path, monkeypatch, fails):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4))
    endpoint.compute([request_of("c")])
    acts = {
        "learn": lambda: endpoint.compute([request_of("c")]),
        "outputs": lambda: endpoint.compute([request_of("c", with_gradients=False)]),
        "hidden_states": lambda: endpoint.sample([SamplingRequest(prompt=(1, 2), max_tokens=1)]),
        "take_step": lambda: endpoint.step([AdamStep(client="c")]),
    }
    with monkeypatch.context() as full, pytest.raises(EndpointLostError, match="out of memory"):
        full.setattr(ClientAdapter if fails == "take_step" else MultiAdapterBase, fails, no_memory)
        acts[fails]()


@pytest.mark.parametrize("fails", ["append", "sync"])
def test_an_endpoint_that_is_ahead_of_its_disk_is_opened_anew(base, tmp_path, monkeypatch, fails):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4))
    train(endpoint, "c", num_steps=1)
    if fails == "sync":
        endpoint.compute([request_of("c")])
    with monkeypatch.context() as full, pytest.raises(EndpointLostError, match="No space left"):
        full.setattr(RequestJournal, fails, full_disk)
        if fails == "sync":
            endpoint.step([AdamStep(client="c")])
        else:
            endpoint.compute([request_of("c")])
    assert open_endpoint(base, tmp_path).clients()["c"].step == (2 if fails == "sync" else 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"client": "nobody"}, "none named"),
        ({"loss": "stable_reinforce"}, "no loss 'stable_reinforce'"),
        ({"loss_config": {"beta": 1.0}}, "no setting 'beta'"),
        ({"rows": ()}, "no rows"),
        ({"rows": (row_of(length=SEQ_LEN + 1, loss="cross_entropy", seed=0),)}, "takes up to 64"),
        ({"rows": (TokenRow(tokens=(1, 99), loss_inputs={"target_tokens": torch.tensor([1, 2])}),)}, "does not know"),
        ({"rows": (TokenRow(tokens=(1, 2), loss_inputs={"target_tokens": torch.tensor([1, 99])}),)}, "not tokens"),
        ({"rows": (TokenRow(tokens=(1, 2), loss_inputs={"target_tokens": torch.tensor([1])}),)}, "of shape"),
        ({"rows": (TokenRow(tokens=(1, 2), loss_inputs={}),)}, "no target_tokens"),
        ({"loss": "ppo"}, "no logprobs"),
    ],
)
def test_a_request_that_cannot_be_computed_is_refused_and_the_others_go_on(base, tmp_path, change, reason):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4))
    endpoint.add("d", AdapterSpec(rank=4))
    refused, result = endpoint.compute([replace(request_of("c"), **change), request_of("d")])
    assert isinstance(refused, RequestRefusal) and reason in refused.reason
    assert result.outputs[0]["logprobs"].shape == (20,)
    stepped = endpoint.step([AdamStep(client="c"), AdamStep(client="d")])
    assert isinstance(stepped[0], RequestRefusal) and "no gradients" in stepped[0].reason
    assert stepped[1]["grad_norm"] > 0


def test_a_client_learns_its_price_before_it_joins(base, tmp_path):
    endpoint = open_endpoint(base, tmp_path)
    first = endpoint.price(AdapterSpec(rank=8))
    assert first.step_s_now == 0.0 < first.step_s_after
    assert endpoint.clients() == {}
    small, large = (endpoint.price(AdapterSpec(rank=rank)).memory_bytes_after for rank in (1, 8))
    assert small < large < first.memory_bytes_limit
    for i in range(3):
        endpoint.add(f"c{i}", AdapterSpec(rank=8))
    for num in (1, 2, 3):
        endpoint.compute([request_of(f"c{i}") for i in range(num)])
    joined = endpoint.price(AdapterSpec(rank=8))
    assert 0.0 < joined.step_s_now <= joined.step_s_after


def test_seconds_are_fitted_to_tokens():
    times = ComputationTimes()
    for tokens, clients in ((10, 1), (20, 2), (40, 4)):
        times.note(num_tokens=tokens, num_clients=clients, seconds=0.5 + 0.01 * tokens)
    assert times.seconds_of(8) == pytest.approx(1.3)


def test_an_adapter_without_room_in_memory_is_refused(base, tmp_path):
    endpoint = open_endpoint(base, tmp_path, limits=replace(LIMITS, memory_bytes=1_000_000))
    with pytest.raises(ValueError, match="GB of memory"):
        endpoint.add("c", AdapterSpec(rank=8))
    with pytest.raises(ValueError, match="GB of memory"):
        endpoint.price(AdapterSpec(rank=8))


@pytest.mark.parametrize("change", [{"learning_rate": float("nan")}, {"beta2": 1.0}, {"eps": -1.0}])
def test_a_step_with_settings_out_of_their_range_is_refused_and_may_be_taken_again(base, tmp_path, change):
    endpoint = open_endpoint(base, tmp_path)
    endpoint.add("c", AdapterSpec(rank=4))
    endpoint.compute([request_of("c")])
    (refused,) = endpoint.step([AdamStep(client="c", **change)])
    assert isinstance(refused, RequestRefusal) and next(iter(change)) in refused.reason
    (taken,) = endpoint.step([AdamStep(client="c")])
    assert taken["grad_norm"] > 0 and endpoint.clients()["c"].step == 1


def test_limits(base, tmp_path):
    endpoint = open_endpoint(base, tmp_path, limits=replace(LIMITS, max_adapters=1))
    with pytest.raises(ValueError, match="1 to 8"):
        endpoint.add("c", AdapterSpec(rank=9))
    with pytest.raises(ValueError, match="trains nothing"):
        endpoint.add("c", AdapterSpec(rank=1, train_mlp=False, train_attn=False, train_unembed=False))
    with pytest.raises(ValueError, match="not a name"):
        endpoint.add("../c", AdapterSpec(rank=1))
    endpoint.add("c", AdapterSpec(rank=1))
    with pytest.raises(ValueError, match="already"):
        endpoint.add("c", AdapterSpec(rank=1))
    with pytest.raises(ValueError, match="1 adapters, the most"):
        endpoint.add("d", AdapterSpec(rank=1))
    endpoint.remove("c")
    endpoint.add("d", AdapterSpec(rank=1))
    with pytest.raises(ValueError, match="128 positions"):
        open_endpoint(base, tmp_path, limits=replace(LIMITS, seq_len=129))
