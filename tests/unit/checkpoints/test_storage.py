"""Checkpoints in a folder and in an object store without renames: complete or absent, whatever attempts leave."""

import random
import struct

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ringmaster.errors import CheckpointError, ObjectStoreUnavailable
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore, CheckpointTensor, RankPieces, TensorPiece
from ringmaster.techniques.checkpoints.state import HostCopies, Reader, piece_writer
from ringmaster.techniques.checkpoints.storage import MANIFEST, UrlStorage, join_root, place_of
from ringmaster.techniques.checkpoints.tensor_files import REMOTE_BLOCK_BYTES, DistantFile, LazyTensor, blocks_of

WIDTH = 6


class Bucket(MemoryFileSystem):
    """An object store: a file appears when it is closed, and cannot be moved. Counts the bytes that are read."""

    protocol = "bucket"
    store, pseudo_dirs = {}, [""]
    num_bytes_read, num_reads = 0, 0

    def mv(self, *_, **__):
        raise NotImplementedError("objects cannot be moved")

    def cat_file(self, path, start=None, end=None, **options):
        content = super().cat_file(path, start=start, end=end, **options)
        Bucket.num_bytes_read += len(content)
        Bucket.num_reads += 1
        return content


fsspec.register_implementation("bucket", Bucket, clobber=True)


@pytest.fixture(params=["folder", "bucket"])
def root(request, tmp_path):
    if request.param == "folder":
        yield str(tmp_path / "root")
    else:
        yield f"bucket://{request.node.name}"
        Bucket.store.clear()


def rows(step, num_ranks, rank):
    """A rank's share of a matrix whose values depend on the step."""
    num = 8 // num_ranks
    return torch.full((num, WIDTH), float(step)) + torch.arange(rank * num, (rank + 1) * num)[:, None]


def part(step, num_ranks, rank):
    share = rows(step, num_ranks, rank)

    def pieces(file):
        piece = TensorPiece(file=file, key="model/w", offset=(rank * len(share), 0), shape=tuple(share.shape))
        stored = CheckpointTensor(dtype="F32", shape=(8, WIDTH), pieces=(piece,))
        return RankPieces(tensors={"model/w": stored}, blocks=blocks_of({"model/w": share}))

    return pieces


def write(root, step, *, num_ranks=2, ranks=None, attempt="one", publish=True):
    """Writes a checkpoint as the ranks do, one after another."""
    stores = [CheckpointStore(root, rank=r, num_ranks=num_ranks, attempt=attempt) for r in range(num_ranks)]
    for rank in range(num_ranks) if ranks is None else ranks:
        stores[rank].write_part(step, part(step, num_ranks, rank))
    if publish:
        stores[0].publish(step, {"job": "a"})


def newest(root):
    """The newest step, after the contents of its checkpoint were checked."""
    found = CheckpointStore(root).newest()
    if found is None:
        return None
    with Reader(found) as reader:
        assert torch.equal(reader.whole("model/w"), rows(found.manifest.step, 1, 0))
    return found.manifest.step


def test_there_is_nothing_until_it_is_published(root):
    assert newest(root) is None
    write(root, 10)
    assert newest(root) == 10
    write(root, 20, publish=False)
    assert newest(root) == 10
    write(root, 20)
    assert newest(root) == 20


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (2, 1)])
def test_nothing_of_an_attempt_with_other_ranks_gets_into_the_next(root, before, after):
    write(root, 10)
    write(root, 20, num_ranks=before, attempt="killed", publish=False)
    write(root, 20, num_ranks=after, attempt="next")
    assert newest(root) == 20
    found = CheckpointStore(root).newest()
    assert len(found.manifest.files) == len(found.manifest.tensors["model/w"].pieces) == after
    place = place_of(root)
    if isinstance(place, UrlStorage):
        assert sorted(place._list("step-00000020")) == sorted([MANIFEST, *found.manifest.files])
    else:
        assert sorted(f.name for f in found.folder.iterdir()) == sorted([MANIFEST, *found.manifest.files])


def test_a_part_that_is_missing_is_not_made_up_from_another_attempt(root):
    write(root, 10)
    write(root, 20, attempt="killed", publish=False)
    write(root, 20, ranks=[0], attempt="next", publish=False)
    with pytest.raises(OSError, match="part-00001"):
        CheckpointStore(root, num_ranks=2, attempt="next").publish(20, {})
    assert newest(root) == 10


def test_what_was_dropped_leaves_nothing(root):
    write(root, 10)
    write(root, 20, publish=False)
    CheckpointStore(root, num_ranks=2, attempt="one").drop(20)
    assert newest(root) == 10
    write(root, 30)
    assert place_of(root).names() == ["step-00000010", "step-00000030"]


def test_what_attempts_left_is_swept_by_the_next(root):
    write(root, 10)
    write(root, 20, attempt="killed", publish=False)
    write(root, 30, attempt="next")
    place = place_of(root)
    assert place.names() == ["step-00000010", "step-00000030"]
    assert place.read("latest") == b"step-00000030"


def test_the_same_step_again_replaces_one_that_is_damaged(root):
    write(root, 10)
    write(root, 20)
    place = place_of(root)
    found = CheckpointStore(root).newest()
    place.write(f"step-00000020/{min(found.manifest.files)}", [b"noise"])
    assert newest(root) == 10
    write(root, 20, attempt="again", publish=False)
    assert newest(root) == 10
    write(root, 20, attempt="again")
    assert newest(root) == 20


def test_old_ones_are_removed(root):
    for step in (10, 20, 30):
        write(root, step)
    assert place_of(root).names() == ["step-00000020", "step-00000030"]


def test_a_store_that_refuses_fails_the_save(root, monkeypatch):
    write(root, 10)
    store = CheckpointStore(root)

    def refuse(path, blocks):
        raise PermissionError("403")

    monkeypatch.setattr(store._place, "write", refuse)
    with pytest.raises(CheckpointError, match=r"step-00000020 could not be written under .*403"):
        store.save(20, part(20, 1, 0), {})
    assert newest(root) == 10


def test_only_the_rows_that_are_wanted_are_read_from_afar():
    root = "bucket://ranges"
    whole = {"model/w": torch.arange(4_000_000.0).reshape(50_000, 80), "model/step": torch.tensor(7.0)}
    CheckpointStore(root).save(1, piece_writer(whole), {})
    found = CheckpointStore(root).newest()
    Bucket.num_bytes_read = 0
    with Reader(found) as reader:
        target = torch.zeros(10, 20)
        reader._read(found.manifest.tensors["model/w"], ((25_000, 30), (10, 20)), target)
        assert float(reader.whole("model/step")) == 7.0
    assert torch.equal(target, whole["model/w"][25_000:25_010, 30:50])
    # The blocks with the header, the rows and the step, which lies at either end.
    assert Bucket.num_bytes_read <= 3 * REMOTE_BLOCK_BYTES
    Bucket.store.clear()


def test_small_tensors_beside_each_other_are_read_together():
    root = "bucket://small"
    whole = {f"model/{number}": torch.full((number % 7 + 1, 3), float(number)) for number in range(500)}
    CheckpointStore(root).save(1, piece_writer(whole), {})
    found = CheckpointStore(root).newest()
    Bucket.num_reads = 0
    with Reader(found) as reader:
        assert all(torch.equal(reader.whole(name), tensor) for name, tensor in whole.items())
    assert Bucket.num_reads == 1
    Bucket.store.clear()


@given(st.data())
def test_any_range_of_a_remote_file_is_read_as_it_is(data):
    content = random.Random(0).randbytes(40)
    start = data.draw(st.integers(0, 39))
    end = data.draw(st.integers(start + 1, 40))
    length = len(header := b"{}      ")
    file = DistantFile(lambda first, last: (struct.pack("<Q", length) + header + content)[first:last], block_bytes=7)
    assert file._read(16 + start, 16 + end) == content[start:end]


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(monkeypatch):
    root = "bucket://away"
    write(root, 10)

    def refuse(*_, **__):
        raise ConnectionError("no answer")

    for name in ("ls", "cat_file", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(Bucket, name, refuse)
            with pytest.raises(ObjectStoreUnavailable, match="no answer"):
                CheckpointStore(root).newest()
    assert newest(root) == 10
    Bucket.store.clear()


def test_copies_stay_as_they_were_and_their_buffers_are_used_again():
    weights = torch.arange(6.0)
    copies = HostCopies(is_pinned=False)
    pieces = piece_writer({"model/w": weights}, copies=copies)
    weights.zero_()
    assert b"".join(pieces("f").blocks)[-24:] == torch.arange(6.0).numpy().tobytes()
    address = copies._buffers["model/w"].data_ptr()
    piece_writer({"model/w": weights}, copies=copies)
    assert copies._buffers["model/w"].data_ptr() == address


def test_files_are_what_safetensors_reads(tmp_path):
    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "flag": torch.tensor([True, False, True]),
        "count": torch.tensor(3),
        "wide": torch.randn(4, 6).double().T,
        "late": LazyTensor(dtype=torch.float32, shape=(2,), load=lambda: torch.ones(2)),
    }
    (tmp_path / "f").write_bytes(b"".join(blocks_of(tensors, metadata={"format": "pt"})))
    read = load_file(tmp_path / "f")
    assert read.keys() == tensors.keys()
    assert torch.equal(read.pop("late"), torch.ones(2))
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in read)


def test_a_library_that_is_missing_is_named_with_the_remedy():
    with pytest.raises(ValueError, match=r"cannot be stored at nowhere://x: .* To fix: install"):
        place_of("nowhere://x")


def test_places_below_others():
    assert join_root("s3://bucket/a/", "b", "c") == "s3://bucket/a/b/c"
    assert join_root("/tmp/a", "b") == "/tmp/a/b"
