"""Checkpoints after interrupted saves and damaged bytes: the newest complete one is found."""

import json
import os
import pickle
import resource
import shutil
import signal
import sys
import threading

import pytest

from ringmaster.codec import digest
from ringmaster.errors import CheckpointError, CheckpointNotFound
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore, CheckpointTensor, RankPieces, TensorPiece
from ringmaster.techniques.checkpoints.storage import MANIFEST
from tests.children import in_a_child
from tests.matrix import matrix

CONTENT = "weights of step {step}, rank {rank}"


def writer(step, rank=0, *, room=None):
    """A function that writes a file as a rank does, in two halves. `room` is called in between, for example to kill."""

    def write(file):
        text = CONTENT.format(step=step, rank=rank).encode()

        def blocks():
            yield text[:10]
            if room is not None:
                room()
            yield text[10:]

        piece = TensorPiece(file=file, key="w", offset=(rank,), shape=(1,))
        return RankPieces(
            tensors={"model/w": CheckpointTensor(dtype="U8", shape=(2,), pieces=(piece,))}, blocks=blocks()
        )

    return write


def save(root, step, **options):
    CheckpointStore(root, **options).save(step, writer(step), {"job": "a"})


def save_on_two_ranks(root, step):
    barrier, votes = threading.Barrier(2), [True, True]

    def work(rank):
        def agree(yes):
            votes[rank] = yes
            barrier.wait()
            agreed = all(votes)
            barrier.wait()
            return agreed

        store = CheckpointStore(root, rank=rank, num_ranks=2, agree=agree)
        store.save(step, writer(step, rank), {"job": "a"})

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def newest(root):
    """The newest checkpoint's step, after its contents were checked."""
    found = CheckpointStore(root).newest()
    if found is None:
        return None
    for piece in found.manifest.tensors["model/w"].pieces:
        content = (found.folder / piece.file).read_text()
        assert content == CONTENT.format(step=found.manifest.step, rank=piece.offset[0])
    return found.manifest.step


class _Killer:
    """Kills this process at its n-th operation on a file, counted by the interpreter's audit events."""

    OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir", "shutil.rmtree")

    def __init__(self, moment):
        self.left = moment

    def __call__(self, event, _):
        if event in self.OPERATIONS:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def save_until(moment, save_step, root, step):
    sys.addaudithook(_Killer(moment))
    save_step(root, step)


def save_half(root, step):
    """Is killed between the halves of its file."""
    CheckpointStore(root).save(step, writer(step, room=lambda: os.kill(os.getpid(), signal.SIGKILL)), {})


def save_and_watch(root):
    """Fails if reading or saving opens a pickle."""
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    assert newest(root) == 10
    save(root, 20)
    assert len(opened) > 5
    assert not [name for name in opened if name.endswith((".pt", ".pkl", ".metadata"))]


@pytest.mark.parametrize(
    "save_step", matrix([save, save_on_two_ranks], quick=[save_on_two_ranks], ids=["one rank", "two ranks"])
)
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path, save_step):
    before = tmp_path / "before"
    save_step(before, 10)
    save_step(before, 20)
    found, moment, status = [], 0, None
    while status != 0:
        moment += 1
        root = tmp_path / "root"
        shutil.copytree(before, root)
        status = in_a_child(save_until, moment, save_step, root, 30)
        assert status in (0, -signal.SIGKILL)
        found.append(newest(root))
        save_step(root, 40)  # the next save continues, and cleans up
        assert newest(root) == 40
        assert not list(root.glob("*.tmp"))
        shutil.rmtree(root)
    assert set(found) == {20, 30}
    assert found == sorted(found) or save_step is save_on_two_ranks  # two ranks may take turns in another order
    assert moment > 15


def test_a_kill_in_the_middle_of_a_file_leaves_the_checkpoint_before(tmp_path):
    save(tmp_path, 10)
    assert in_a_child(save_half, tmp_path, 20) == -signal.SIGKILL
    assert len(list(tmp_path.glob("step-00000020.*.tmp"))) == 1
    assert newest(tmp_path) == 10


@pytest.mark.parametrize(
    "flip", [0x01, *(pytest.param(flip, marks=pytest.mark.full) for flip in (0x10, 0xFF))], ids=hex
)
def test_a_flipped_byte_anywhere_is_found_and_the_checkpoint_before_is_used(tmp_path, flip):
    save(tmp_path, 10)
    save(tmp_path, 20)
    intact = json.loads((tmp_path / "step-00000020" / MANIFEST).read_text())
    for file in sorted((tmp_path / "step-00000020").iterdir()):
        right = file.read_bytes()
        for i in range(len(right)):
            file.write_bytes(right[:i] + bytes([right[i] ^ flip]) + right[i + 1 :])
            # White space in the manifest's JSON has no meaning.
            says_the_same = file.name == MANIFEST and right[i : i + 1].isspace() and newest(tmp_path) == 20
            if says_the_same:
                assert json.loads(file.read_text()) == intact
            else:
                assert newest(tmp_path) == 10, f"byte {i} of {file.name}"
        file.write_bytes(right)
    assert newest(tmp_path) == 20


@pytest.mark.parametrize("name", ["rank-00000.safetensors", MANIFEST])
def test_a_file_cut_short_longer_or_gone_is_found(tmp_path, name):
    save(tmp_path, 10)
    save(tmp_path, 20)
    file = tmp_path / "step-00000020" / name
    right = file.read_bytes()
    for wrong in (b"", right[:-1], right[: len(right) // 2], right + b"x"):
        file.write_bytes(wrong)
        assert newest(tmp_path) == 10
    file.unlink()
    assert newest(tmp_path) == 10


def test_no_checkpoint_is_no_error(tmp_path):
    assert newest(tmp_path / "nowhere") is None
    save(tmp_path, 10)
    (tmp_path / "step-00000010" / MANIFEST).unlink()
    assert newest(tmp_path) is None


def test_a_corrupt_checkpoint_is_replaced_when_its_step_is_trained_again(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "step-00000020" / MANIFEST).write_text("{}")
    save(tmp_path, 20)
    assert newest(tmp_path) == 20


@pytest.mark.parametrize("keep", [1, 2])
def test_corrupt_newer_ones_do_not_crowd_out_whole_ones(tmp_path, keep):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3)
    for step in (20, 30):
        (tmp_path / f"step-000000{step}" / MANIFEST).unlink()
    save(tmp_path, 15, keep=keep)
    assert newest(tmp_path) == 15
    assert (tmp_path / "step-00000010").is_dir() == (keep == 2)


def test_the_last_ones_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]
    assert (tmp_path / "latest").read_text() == "step-00000004"


def test_a_file_that_cannot_grow_leaves_the_earlier_checkpoints_and_no_rest(tmp_path):
    """A limit on the size of files fails at the same place as a full disk."""
    save(tmp_path, 10)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (15, before[1]))
        with pytest.raises(CheckpointError, match=r"step-00000020 could not be written under .*File too large"):
            save(tmp_path, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert newest(tmp_path) == 10
    assert not list(tmp_path.glob("*.tmp"))
    save(tmp_path, 20)
    assert newest(tmp_path) == 20


def test_a_rank_that_cannot_write_fails_all(tmp_path):
    save(tmp_path, 10)
    barrier, votes, errors = threading.Barrier(2), [True, True], {}

    def full():
        raise OSError(28, "No space left on device")

    def work(rank):
        def agree(yes):
            votes[rank] = yes
            barrier.wait()
            agreed = all(votes)
            barrier.wait()
            return agreed

        store = CheckpointStore(tmp_path, rank=rank, num_ranks=2, agree=agree)
        try:
            store.save(20, writer(20, rank, room=full if rank == 1 else None), {})
        except CheckpointError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "on another rank" in errors[0]
    assert "No space left on device" in errors[1]
    assert newest(tmp_path) == 10
    assert not list(tmp_path.glob("*.tmp"))


def test_pickles_that_lie_there_are_never_opened(tmp_path):
    save(tmp_path, 10)
    for name in ("latest.pkl", "step-00000010/rank-00000.pt", "step-00000010/.metadata", "step-00000020.pt"):
        (tmp_path / name).write_bytes(pickle.dumps("weights"))
    assert in_a_child(save_and_watch, tmp_path) == 0
    assert newest(tmp_path) == 20


def test_checkpoints_that_are_nowhere_to_be_seen_are_no_reason_to_begin_again(tmp_path):
    assert CheckpointStore(tmp_path).newest() is None
    with pytest.raises(CheckpointNotFound, match=r"step 5 was stored in .* mount that folder"):
        CheckpointStore(tmp_path).newest(known_step=5)
    save(tmp_path, 3)  # an earlier step: later ones may be damaged or incomplete
    assert CheckpointStore(tmp_path).newest(known_step=5).manifest.step == 3
    next(tmp_path.glob("step-*/*.json")).write_text("{}")
    # A damaged checkpoint is reported, and training restarts.
    assert CheckpointStore(tmp_path).newest(known_step=5) is None


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "..", "x\0"])
@pytest.mark.parametrize("key", ["files", "tensors"])
def test_a_manifest_that_names_files_elsewhere_is_none_of_ours(tmp_path, name, key):
    save(tmp_path, 1)
    path = tmp_path / "step-00000001" / MANIFEST
    said = json.loads(path.read_text())
    del said["sha256"]
    if key == "files":
        said["files"][name] = {"num_bytes": 0, "sha256": ""}
    else:
        said["tensors"]["model/w"]["pieces"][0]["file"] = name
    path.write_text(json.dumps({"sha256": digest(said, length=64), **said}))
    assert newest(tmp_path) is None


def test_a_manifest_of_nested_brackets_is_passed_over(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-00000001" / MANIFEST).write_text("[" * 100_000)
    assert newest(tmp_path) is None
