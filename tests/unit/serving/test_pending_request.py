"""The parts in which a request is computed, and which samples are in memory at a time."""

from ringmaster.features.endpoint.server import pending_request
from ringmaster.features.endpoint.server.pending_request import PendingRequest, within_sequences
from ringmaster.features.endpoint.server.store import EndpointRequestKind, StoredRequest


def sample_of(client, number, *, num_samples, is_begun=False):
    work = {"prompt": [1, 2], "num_samples": num_samples, "max_tokens": 100, "last_n": None}
    request = StoredRequest(
        id=f"{client}:{number}",
        owner="ann",
        stream=client,
        base="tiny",
        seq=number,
        kind=EndpointRequestKind.SAMPLE,
        work=work,
    )
    pending = PendingRequest(request)
    pending.is_begun = is_begun
    return pending


def names(waiting):
    return [each.request.id for each in within_sequences(waiting)]


def test_samples_begin_while_there_is_room_for_their_sequences(monkeypatch):
    monkeypatch.setattr(pending_request, "MAX_SEQUENCES", 8)
    waiting = [
        sample_of("a", 0, num_samples=3, is_begun=True),
        sample_of("a", 1, num_samples=2),  # a client has half of them at most
        sample_of("b", 0, num_samples=4),
        sample_of("c", 0, num_samples=2),
        sample_of("a", 2, num_samples=1),
    ]
    assert names(waiting) == ["a:0", "b:0", "a:2"]


def test_a_sample_of_more_sequences_than_there_is_room_for_is_computed_alone(monkeypatch):
    monkeypatch.setattr(pending_request, "MAX_SEQUENCES", 8)
    waiting = [sample_of("a", 0, num_samples=9), sample_of("b", 0, num_samples=1)]
    assert names(waiting) == ["a:0"]


def test_a_turn_counts_its_own_tokens():
    pending = sample_of("a", 0, num_samples=2)
    assert pending.num_tokens == 2 + 2 * pending_request.SAMPLE_TOKENS
    assert pending.take(None, used_s=1.0) is None
    assert pending.is_begun and pending.num_tokens == 2 * pending_request.SAMPLE_TOKENS
    answer = pending.take({"sequences": []}, used_s=2.0)
    assert answer == {"sequences": []} and pending.used_s == 3.0
    pending.start_again()
    assert not pending.is_begun and pending.used_s == 0.0
