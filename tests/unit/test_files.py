"""Files that are written whole or not at all."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ringmaster.files import read_value, write_atomically, write_value


@dataclass(frozen=True)
class Rate:
    flops_per_s: float


def test_parts_replace_what_was_there(tmp_path: Path):
    file = tmp_path / "a" / "b.bin"
    write_atomically(file, b"old")
    write_atomically(file, b"ne", memoryview(b"w"))
    assert file.read_bytes() == b"new"
    assert [each.name for each in file.parent.iterdir()] == ["b.bin"]


def test_a_secret_is_its_owners_alone(tmp_path: Path):
    write_atomically(tmp_path / "password", b"x", mode=0o600)
    assert (tmp_path / "password").stat().st_mode & 0o777 == 0o600


def test_what_fails_half_way_leaves_the_old_content_alone(tmp_path: Path):
    def parts() -> Iterator[bytes]:
        yield b"half"
        raise OSError("no space left on device")

    write_atomically(tmp_path / "a", b"old")
    with pytest.raises(OSError, match="no space"):
        write_atomically(tmp_path / "a", *parts())
    with pytest.raises(TypeError):
        write_atomically(tmp_path / "a", b"half", "text")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("content", [None, "", "{", '{"flops": 3}'])
def test_a_value_that_cannot_be_read_is_none(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "rate.json").write_text(content)
    assert read_value(Rate, tmp_path / "rate.json") is None
    write_value(Rate(3.5), tmp_path / "rate.json")
    assert read_value(Rate, tmp_path / "rate.json") == Rate(3.5)
