"""The chain of a job's states: what it says, that nobody can change a link, and what it costs."""

import json
from dataclasses import replace
from unittest.mock import ANY

import pytest
import torch

from ringmaster.codec import to_json
from ringmaster.distribution import own_release
from ringmaster.techniques.checkpoints import chain as chain_module
from ringmaster.techniques.checkpoints import tensor_files
from ringmaster.techniques.checkpoints.chain import FILE, ChainWriter, StateChain, read_chain, tensor_digests
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.checkpoints.environment import present_environment
from ringmaster.techniques.checkpoints.state import piece_writer

CPU = torch.device("cpu")


def environment(**changes):
    value = present_environment(technique="t:Single", config={}, num_devices=1, device=CPU)
    return replace(value, **changes)


def save(root, step, **tensors):
    tensors = tensors or {"model/w": torch.full((3, 2), float(step))}
    CheckpointStore(root, keep=10).save(step, piece_writer(tensors), {})


def writer(root, *, step=0, weights="w"):
    chain = StateChain(job={"name": "a", "optimizer": {"lr": 0.1}}, weights=weights, data="d")
    return ChainWriter.begin(root, chain=chain, step=step, environment=environment())


def chain_of(root, steps, **changes):
    links = writer(root, **changes)
    for step in steps:
        save(root, step)
        links.extend(step, always=True)
    return links.chain


def test_a_link_says_what_the_state_was_and_what_trained_it(tmp_path):
    chain_of(tmp_path, [2, 5])

    chain = read_chain(tmp_path)

    assert [(link.first_step, link.step) for link in chain.links] == [(0, 2), (2, 5)]
    assert chain.links[1].tensors == tensor_digests(tmp_path, 5) != chain.links[0].tensors
    assert chain.links[1].parent == chain.links[0].digest
    assert chain.links[0].parent == chain.origin
    assert chain.links[0].environment == environment()
    versions = chain.links[0].environment.versions
    assert (versions["torch"], versions["ringmaster"]) == (torch.__version__, own_release())


def test_the_digest_of_a_tensor_does_not_depend_on_how_it_is_divided(tmp_path):
    whole = torch.arange(12.0).reshape(6, 2)
    save(tmp_path / "one", 1, **{"model/w": whole})
    ranks = [CheckpointStore(tmp_path / "two", rank=rank, num_ranks=2, attempt="a") for rank in range(2)]
    for rank, store in enumerate(ranks):
        store.write_part(1, half_of(whole, rank))
    ranks[0].publish(1, {})

    assert tensor_digests(tmp_path / "one", 1) == tensor_digests(tmp_path / "two", 1)


def half_of(whole, rank):
    written = piece_writer({"model/w": whole[3 * rank : 3 * rank + 3]})

    def pieces(file):
        value = written(file)
        tensor = value.tensors["model/w"]
        (piece,) = tensor.pieces
        moved = replace(tensor, shape=(6, 2), pieces=(replace(piece, offset=(3 * rank, 0)),))
        return replace(value, tensors={"model/w": moved})

    return pieces


def test_equal_bytes_of_another_dtype_or_shape_have_another_digest(tmp_path):
    zeros = {"a": torch.zeros(4), "b": torch.zeros(2, 2), "c": torch.zeros(2, dtype=torch.float64)}
    save(tmp_path, 1, **zeros)

    assert len(set(tensor_digests(tmp_path, 1).values())) == 3


def test_a_segment_goes_on_from_the_checkpoint_that_was_restored(tmp_path):
    undisturbed = chain_of(tmp_path / "undisturbed", [2, 4, 6])
    chain_of(tmp_path / "killed", [2, 4])  # the checkpoint of step 4 was damaged

    assert chain_of(tmp_path / "killed", [4, 6], step=2) == undisturbed


def test_a_step_that_is_known_has_one_link(tmp_path):
    links = writer(tmp_path)
    save(tmp_path, 2)
    links.extend(2, always=True)
    links.extend(2, always=True)

    assert len(read_chain(tmp_path).links) == 1


def test_the_chain_of_a_job_that_trains_other_weights_is_not_continued(tmp_path):
    chain_of(tmp_path, [2])

    assert [link.step for link in chain_of(tmp_path, [4], step=2, weights="other").links] == [4]


def test_links_are_left_out_where_they_would_take_too_long_but_not_the_last(tmp_path, monkeypatch):
    links = writer(tmp_path)
    links._spent_s = 1e6
    save(tmp_path, 2)

    links.extend(2, always=False)
    assert read_chain(tmp_path) is None

    links.extend(2, always=True)
    assert [link.step for link in read_chain(tmp_path).links] == [2]


def mutations(value, path=()):
    """Yields copies of a JSON value, each with one leaf changed or one entry removed."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from (((*path, key), changed) for changed in changes_of(item))
        yield from mutations(item, (*path, key))


def changes_of(item):
    if isinstance(item, str):
        return [item + "0", "0" * len(item)] if item.strip("0") else [item + "0"]
    if isinstance(item, bool) or item is None:
        return []
    return [item + 1] if isinstance(item, (int, float)) else [type(item)()] if item else []


def with_change(value, path, item):
    value = json.loads(json.dumps(value))
    at = value
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = item
    return value


def test_no_change_of_a_stored_chain_goes_unnoticed(tmp_path):
    chain = chain_of(tmp_path, [2, 5, 9])
    stored = json.loads(chain.to_text())

    changed = list(mutations(stored))
    assert len(changed) > 60
    for path, item in changed:
        with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
            StateChain.parse(json.dumps(with_change(stored, path, item)))


def test_a_chain_whose_links_were_all_made_anew_has_another_head(tmp_path):
    chain = chain_of(tmp_path, [2, 5])
    first = replace(chain.links[0], environment=environment(num_threads=7))
    forged = chain.up_to(0).add(first)
    forged = forged.add(replace(chain.links[1], parent=first.digest))

    assert StateChain.parse(forged.to_text()).head != chain.head
    assert to_json(forged) != to_json(chain)


def test_a_damaged_chain_is_no_chain(tmp_path):
    chain_of(tmp_path, [2])
    (tmp_path / FILE).write_text("{}")

    assert read_chain(tmp_path) is None


def test_digests_of_steps_are_in_the_next_link_and_those_of_the_same_steps_are_equal(tmp_path):
    tensors = torch.arange(3.0), torch.arange(3)

    def link_of(folder, digested_steps):
        own = replace(writer(folder), digested_steps=frozenset(digested_steps))
        for step in (1, 2, 3):
            own.digest_step(step, [tensor + step for tensor in tensors])
        for step in (2, 4):
            save(folder, step, w=tensors[0])
            own.extend(step, always=True)
        return [link.steps for link in read_chain(folder).links]

    first, rest = link_of(tmp_path / "a", {1, 3})
    assert (list(first), list(rest)) == (["1"], ["3"])
    assert link_of(tmp_path / "b", {1, 2, 3}) == [{**first, "2": ANY}, rest]
    assert first["1"] != rest["3"]


def test_digests_of_steps_take_at_most_their_share_of_the_time(tmp_path, monkeypatch):
    own, now_s = writer(tmp_path), [0.0]
    monkeypatch.setattr(chain_module.time, "monotonic", lambda: now_s[0])
    own = replace(own, _begun_s=0.0)

    def digest_of(tensors):
        now_s[0] += 0.1
        return "digest"

    monkeypatch.setattr(tensor_files, "digest_of", digest_of)
    for step in range(1, 101):
        now_s[0] += 1.0
        own.digest_step(step, [])
    assert 25 <= len(own._steps) <= 31  # of 100 steps, each of which takes ten times as long as a digest
