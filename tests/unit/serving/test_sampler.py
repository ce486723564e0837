"""Sampling of an endpoint: as the forward computes, by seeds, whoever else samples, and until what ends a sequence."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ringmaster.features.endpoint.compute.requests import (
    AdapterSpec,
    LossRequest,
    RequestRefusal,
    SamplingRequest,
    TokenRow,
)
from ringmaster.features.endpoint.compute.sampler import choose

from .served import NUM_TOKENS, SEQ_LEN, open_endpoint, train, write_base

PROMPT = (5, 1, 7, 2, 9)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endpoint")
    base = write_base(folder / "base", eos_token_id=[3, 4])
    endpoint = open_endpoint(base, folder / "files")
    for i in range(4):
        endpoint.add(f"c{i}", AdapterSpec(rank=(8, 3)[i % 2], seed=i))
        train(endpoint, f"c{i}", num_steps=2, seed=i)
    return endpoint


def one(endpoint, **request):
    (result,) = endpoint.sample([SamplingRequest(**{"prompt": PROMPT, "stop": (), "seed": 1, **request})])
    return result


def forward(endpoint, client, tokens):
    row = TokenRow(tokens=tuple(tokens[:-1]), loss_inputs={"target_tokens": torch.tensor(tokens[1:])})
    (result,) = endpoint.compute([LossRequest(client=client, rows=(row,), loss="cross_entropy", with_gradients=False)])
    return result.outputs[0]["logprobs"].tolist()


def test_logprobs_are_those_of_the_forward(endpoint):
    result = one(endpoint, client="c0", num_samples=3, max_tokens=40, with_prompt_logprobs=True, topk_prompt_logprobs=2)
    for sequence in result.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) == 40 and sequence.stop_reason == "length"
        expected = forward(endpoint, "c0", [*PROMPT, *sequence.tokens])
        assert [*result.prompt_logprobs[1:], *sequence.logprobs] == pytest.approx(expected, abs=1e-5)
    assert len({sequence.tokens for sequence in result.sequences}) == 3
    assert result.prompt_logprobs[0] is result.topk_prompt_logprobs[0] is None
    for logprob, pairs in zip(result.prompt_logprobs[1:], result.topk_prompt_logprobs[1:], strict=True):
        assert len(pairs) == 2 and pairs[0][1] >= pairs[1][1] and logprob <= pairs[0][1] + 1e-6


def test_a_client_samples_the_same_whoever_else_does(endpoint):
    lengths = (3, 20, 5, 17)
    requests = [
        SamplingRequest(client=f"c{i}", prompt=tuple(range(n)), num_samples=1 + i, max_tokens=10 + i, seed=i, stop=())
        for i, n in enumerate(lengths)
    ] + [SamplingRequest(client="c0", prompt=PROMPT, max_tokens=30, seed=8, top_p=0.9, top_k=20)]
    together = endpoint.sample(requests)
    for request, result in zip(requests, together, strict=True):
        (alone,) = endpoint.sample([request])
        assert alone == result


def test_a_seed_decides_and_none_draws_anew(endpoint):
    assert one(endpoint, client="c1", max_tokens=20) == one(endpoint, client="c1", max_tokens=20)
    other = one(endpoint, client="c1", max_tokens=20, seed=2)
    assert one(endpoint, client="c1", max_tokens=20) != other
    assert one(endpoint, client="c1", max_tokens=20, seed=None) != one(endpoint, client="c1", max_tokens=20, seed=None)


def test_temperature_0_takes_the_most_probable_token(endpoint):
    (sequence,) = one(endpoint, client="c2", max_tokens=10, temperature=0.0, seed=None).sequences
    tokens = [*PROMPT]
    for token in sequence.tokens:
        result = one(endpoint, client="c2", prompt=(*tokens, 0), max_tokens=0, topk_prompt_logprobs=1)
        assert result.topk_prompt_logprobs[-1][0][0] == token
        tokens.append(token)


def test_the_base_and_a_checkpoint_sample_as_they_are(endpoint):
    folder = endpoint.save("c3", "sampler", with_optimizer=False)
    saved = one(endpoint, checkpoint=folder, max_tokens=20)
    assert saved == one(endpoint, client="c3", max_tokens=20)
    base = one(endpoint, max_tokens=20)
    train(endpoint, "c3", num_steps=1, seed=5)
    assert one(endpoint, checkpoint=folder, max_tokens=20) == saved
    assert one(endpoint, max_tokens=20) == base != saved
    assert one(endpoint, client="c3", max_tokens=20) != saved
    endpoint.save("c3", "sampler", with_optimizer=False)  # under the same name
    assert one(endpoint, checkpoint=folder, max_tokens=20) != saved


def test_what_ends_a_sequence(endpoint):
    (free,) = one(endpoint, client="c0", max_tokens=50).sequences
    end = next(i for i in range(3, 50) if free.tokens[i - 1 : i + 1] not in pairwise(free.tokens[:i]))
    pair = free.tokens[end - 1 : end + 1]
    (stopped,) = one(endpoint, client="c0", max_tokens=50, stop=(pair, (NUM_TOKENS,))).sequences
    assert stopped.tokens == free.tokens[: end + 1] and stopped.stop_reason == "stop"
    many = one(endpoint, client="c0", num_samples=8, stop=None)
    for sequence in many.sequences:
        assert (sequence.tokens[-1] in (3, 4)) == (sequence.stop_reason == "stop")
        assert not {3, 4} & {*sequence.tokens[:-1]}
        assert sequence.stop_reason == "stop" or len(PROMPT) + len(sequence.tokens) == SEQ_LEN


def test_texts_end_a_sequence_where_there_is_a_tokenizer(endpoint, monkeypatch):
    class Letters:
        def decode(self, tokens, **_):
            return "".join(chr(65 + token) for token in tokens)

    (refused,) = endpoint.sample([SamplingRequest(client="c0", prompt=PROMPT, stop=("A",))])
    assert isinstance(refused, RequestRefusal) and "no tokenizer" in refused.reason
    (free,) = one(endpoint, client="c0", max_tokens=30).sequences
    monkeypatch.setitem(endpoint._sampler.__dict__, "tokenizer", Letters())
    (stopped,) = one(endpoint, client="c0", max_tokens=30, stop=(chr(65 + free.tokens[4]),)).sequences
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"client": "nobody"}, "none named"),
        ({"prompt": ()}, "no tokens"),
        ({"prompt": (NUM_TOKENS,)}, "does not know"),
        ({"prompt": (1,) * (SEQ_LEN + 1)}, "takes up to"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"num_samples": 0}, "num_samples"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
        ({"target_prompt_tokens": ((1,),)}, "target_prompt_tokens"),
        ({"target_prompt_tokens": ((NUM_TOKENS,),) * 4}, "target_prompt_tokens"),
    ],
)
def test_what_cannot_be_sampled_is_refused_and_the_others_go_on(endpoint, change, reason):
    request = SamplingRequest(client="c0", prompt=PROMPT, max_tokens=2, stop=())
    refused, result = endpoint.sample([replace(request, **change), request])
    assert isinstance(refused, RequestRefusal) and reason in refused.reason
    assert len(result.sequences[0].tokens) == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {0: 0.1, 1: 0.2, 2: 0.4, 3: 0.3}),
        ({"temperature": 0.5}, {0: 0.01 / 0.3, 1: 0.04 / 0.3, 2: 0.16 / 0.3, 3: 0.09 / 0.3}),
        ({"temperature": 1e-37}, {2: 1.0}),
        ({"temperature": 1e-300, "top_k": 3, "top_p": 0.5}, {2: 1.0}),
        ({"temperature": 1e300}, {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}),
        ({"top_k": 2}, {2: 0.4 / 0.7, 3: 0.3 / 0.7}),
        ({"top_p": 0.75}, {1: 0.2 / 0.9, 2: 0.4 / 0.9, 3: 0.3 / 0.9}),
        ({"top_p": 0.01}, {2: 1.0}),
        ({"top_k": 2, "top_p": 0.5}, {2: 1.0}),
    ],
)
def test_tokens_are_drawn_by_their_probabilities(settings, expected):
    num = 1000
    logits = torch.tensor([0.1, 0.2, 0.4, 0.3]).log().expand(num, -1)
    draws = torch.arange(num, dtype=torch.float64) / num
    tokens = choose(logits, SamplingRequest(prompt=(0,), **settings), draws.unsqueeze(-1)).squeeze(-1)
    shares = {token: (tokens == token).double().mean().item() for token in sorted(set(tokens.tolist()))}
    assert shares == pytest.approx(expected, abs=2 / num)


def in_turns(endpoint, requests, *, num_tokens, joins):
    """The results of requests of which one more joins at each of some turns."""
    results, turn = {}, 0
    begun = set()
    while len(results) < len(requests):
        named = {name: each for name, each in requests.items() if name not in results and joins[name] <= turn}
        for name, result in endpoint.sample_in_turns(named, num_tokens=num_tokens, begun=begun).items():
            begun.add(name)
            if result is not None:
                results[name] = result
                begun.remove(name)
        turn += 1
    return results, turn


def test_a_sample_in_turns_has_the_bits_that_it_has_at_once(endpoint):
    folders = [endpoint.save(f"c{i}", "turns", with_optimizer=False) for i in range(4)]
    options = {"topk_sample_logprobs": 2, "with_prompt_logprobs": True, "prompt_alt_tokens": 2, "stop": None}
    requests = {
        str(i): SamplingRequest(checkpoint=folder, prompt=PROMPT[: 2 + i], num_samples=1 + i, seed=i, **options)
        for i, folder in enumerate(folders)
    }
    at_once = {name: endpoint.sample([each])[0] for name, each in requests.items()}
    results, num_turns = in_turns(endpoint, requests, num_tokens=3, joins={"0": 0, "1": 2, "2": 2, "3": 5})
    assert results == at_once and num_turns > 6


def test_a_sample_that_is_not_named_as_begun_is_given_up(endpoint):
    request = SamplingRequest(prompt=PROMPT, max_tokens=20, seed=1, stop=())
    for begun in ((), ("a",)):
        assert endpoint.sample_in_turns({"a": request}, num_tokens=5, begun=begun) == {"a": None}
    assert len(endpoint._turns._open["a"].sequences[0].tokens) > 10
    endpoint.sample_in_turns({}, num_tokens=5, begun=())
    assert not endpoint._turns._open


def test_what_is_asked_of_tokens_besides_their_logprobs(endpoint):
    targets = ((1, -1), (2, 60), (-1, -1), (9, 9))
    result = one(
        endpoint, client="c0", max_tokens=4, topk_sample_logprobs=3, target_prompt_tokens=targets, prompt_alt_tokens=4
    )
    (sequence,) = result.sequences
    for token, logprob, pairs in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
        assert len(pairs) == 3 and pairs == tuple(sorted(pairs, key=lambda pair: -pair[1]))
        assert dict(pairs).get(token, logprob) == pytest.approx(logprob)
    for place, (tokens, logprobs) in enumerate(zip(targets, result.target_prompt_logprobs, strict=True)):
        for token, logprob in zip(tokens, logprobs, strict=True):
            expected = forward(endpoint, "c0", [*PROMPT[: place + 1], token])[-1] if token >= 0 else 0.0
            assert logprob == pytest.approx(expected, abs=1e-5)
    for place, drawn in enumerate(result.prompt_alt_tokens):
        for token, logprob in drawn:
            assert logprob == pytest.approx(forward(endpoint, "c0", [*PROMPT[: place + 1], token])[-1], abs=1e-5)
    assert one(endpoint, client="c0", max_tokens=1, prompt_alt_tokens=4).prompt_alt_tokens == result.prompt_alt_tokens
    alone = one(endpoint, client="c0", prompt=(1,), max_tokens=1, target_prompt_tokens=(), prompt_alt_tokens=2)
    assert alone.target_prompt_logprobs == alone.prompt_alt_tokens == ()
