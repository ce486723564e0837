"""Random mutations of valid files, and assertions on the readers of these files.

A reader returns a value or reports faults that explain the error and its remedy. It must not raise another exception,
nor do unbounded work. `assert_answered` checks that for a number of mutants of a valid file, all drawn from a seed. A
mutant is changed as a tree (values replaced, keys lost, renamed or doubled, parts moved) or as bytes.
"""

from __future__ import annotations

import copy
import difflib
import json
import random
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU_LIMIT_S = 30  # for one mutant, in CPU time, which does not depend on the machine's load
MEMORY_LIMIT_KB = 1_000_000  # the most that the process may grow over all mutants
MAX_TOLD = 50
MAX_SHOWN = 12


class Raw(str):
    """Text that is written to the file verbatim."""


class Tree(list):
    """A mapping as [key, value] pairs, so that a key may occur twice."""


SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**64), 10**400, -(10**30), 0.0, -0.0, 1e-320, 1e308, 1.5, -3.7,
    "", " ", "\t", "null", "None", "nan", "-", "~", ".", "..", "/", "//", "~nobody-of-that-name/x", "~", "a b", "ä",
    "\N{CIRCUS TENT}", "\u202e", "\ud83c", "\0", "a\0b", "\x1b[31m", "a\nb", "x" * 300, "y" * 20_000, "a.b.c", "a:b",
    "os:system", "__main__:x", "{", "{x}", "{0}", "%s", "*", "**", "[", "a[", "models:/", "models:/x@y", "models:/x/1",
    "../../etc/passwd", "/dev/null", "/proc/self/environ", "2026-01-01", "25:99", "1e-3", "$HOME", "$", "all", "auto",
    "name", "jobs[0]", "é" * 200, "\ufeff", "[" * 50, "a" * 120 + "!", "/" * 300, "a/b/c", "./nothing", "-1",
]  # fmt: skip
COLLECTIONS: list[Any] = [
    [], {}, [[]], [{}], [None], {"": None}, {"a": 1}, {"name": "a"}, [1, "a", None, 1.5], [0] * 200,
    {str(i): i for i in range(200)}, {"a.b": {"c": [1]}}, ["a"], ["loss"], {"x": [[[[[[1]]]]]]}, [True, 1, 1.0],
]  # fmt: skip
# Texts that JSON cannot express, or that only Python's reader accepts.
OF_JSON = [Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("1" * 5000), Raw('"\\ud800"'), Raw("")]
OF_JSON += [Raw("[" * depth + "]" * depth) for depth in (60, 2000, 100_000)]
OF_YAML = [
    Raw(text)
    for text in (
        ".inf", "-.inf", ".nan", "1e999", "0x1F", "0o17", "1_000", "2026-01-01", "2026-01-01T00:00:00Z", "12:30:45",
        "on", "no", "~", "&a [*a]", "&a {<<: *a}", "*missing", "&x 1", "!!int x", "!!float ''", "!!binary aGk=",
        "!!timestamp x", "!!set {a, b}", "!!python/object/apply:os.system ['true']", "!mine 3", "{<<: {name: b}}",
        "{<<: 3}", "{<<: [{a: 1}, 2]}", "{? [1] : 2}", "{1: 2, null: 3}", "{true: 1}", "|", "'", "@", "`", "%YAML 9.9",
        "{<<: [{a: 1}, {a: 2}], a: 3}", "? a", "- b", "---", "...", "# comment", "!!str", "!", "&", "*", "=", "<<",
        "1" * 5000, "[" * 60 + "]" * 60, "[" * 2000 + "]" * 2000, "{a: " * 300 + "1" + "}" * 300,
        "[" + ", ".join(f"&a{i} [{', '.join(f'*a{i - 1}' for _ in range(9)) or '1'}]" for i in range(9)) + "]",
        "[" + ", ".join(["&k0 {a: 1}", *(f"&k{i} {{<<: [{', '.join([f'*k{i - 1}'] * 9)}]}}" for i in range(1, 9))])
        + "]",
    )
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The numbers of accepted and refused mutants."""

    num_taken: int
    num_refused: int


def assert_answered(
    read: Callable[[Path], object],
    *,
    right: Any,
    file: Path,
    faults: type[ValueError],
    count: int,
    seed: int = 0,
    is_json: bool = False,
) -> Answers:
    """Asserts that each of `count` mutants of `right`, read from `file`, is accepted or raises `faults`.

    right: plain values, or a text, of which only bytes are changed.

    A fault must have a `faults` attribute with texts that are not empty and not too long.
    """
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    crashes: dict[str, str] = {}
    num_refused = 0
    for number, content in enumerate(mutants(right, count=count, seed=seed, is_json=is_json)):
        file.write_bytes(content)
        fault = ""
        try:
            with limited():
                read(file)
        except faults as error:
            num_refused += 1
            fault = _untold(error)
        except Exception as error:  # noqa: BLE001 - unexpected exceptions are what this looks for
            own = [at for at in traceback.extract_tb(error.__traceback__) if "/lib/python" not in at.filename]
            fault = f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].lineno}: {str(error)[:200]}"
        if fault:
            crashes.setdefault(fault, f"mutant {number}: {fault}\n{_difference(content, _written(_start(right)))}")
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    told = "\n\n".join(list(crashes.values())[:MAX_SHOWN])
    assert not crashes, f"{len(crashes)} mutants are not answered (seed {seed}):\n{told}"
    assert grown_kb < MEMORY_LIMIT_KB, f"the process grew by {grown_kb / 1000:.0f} MB"
    return Answers(num_taken=count - num_refused, num_refused=num_refused)


def mutants(right: Any, *, count: int, seed: int, is_json: bool = False) -> Iterator[bytes]:
    """Yields `count` mutants, each a function of the seed and its number alone."""
    for number in range(count):
        draw = random.Random(f"{seed}-{number}")
        tree = [_start(right)]
        is_text = isinstance(right, str)
        if not is_text and draw.random() < 0.8:
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                _change(tree, draw, OF_JSON if is_json else OF_YAML)
        content = _written(tree[0]).encode("utf-8", "surrogatepass")
        yield torn(content, draw) if is_text or draw.random() < 0.3 else content


@contextmanager
def limited() -> Iterator[None]:
    """Raises TimeoutError in a block that takes more than CPU_LIMIT_S of processor time."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {CPU_LIMIT_S} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _start(right: Any) -> Any:
    return Raw(right) if isinstance(right, str) else _tree(right)


def _tree(value: Any) -> Any:
    if isinstance(value, dict):
        return Tree([key, _tree(item)] for key, item in value.items())
    return [_tree(item) for item in value] if isinstance(value, list) else value


def _slots(node: Any) -> Iterator[tuple[Any, int]]:
    """Yields the place of every value: (container, index)."""
    for i, item in enumerate(node):
        if isinstance(node, Tree):
            yield item, 1
            item = item[1]
        else:
            yield node, i
        if isinstance(item, list):
            yield from _slots(item)


def _change(root: list[Any], draw: random.Random, raw: list[Raw]) -> None:
    slots = list(_slots(root))
    holder, at = draw.choice(slots)
    mappings = [h[a] for h, a in slots if isinstance(h[a], Tree) and h[a]]
    lists = [h[a] for h, a in slots if isinstance(h[a], list) and not isinstance(h[a], Tree) and h[a]]
    match draw.randrange(12):
        case 0 | 1 | 2:
            holder[at] = draw.choice(SCALARS)
        case 3:
            holder[at] = _tree(draw.choice(COLLECTIONS))
        case 4:
            holder[at] = draw.choice(raw)
        case 5 if mappings:
            pairs = draw.choice(mappings)
            del pairs[draw.randrange(len(pairs))]
        case 6 if mappings:
            pairs = draw.choice(mappings)
            pairs[draw.randrange(len(pairs))][0] = draw.choice([s for s in SCALARS if isinstance(s, str)])
        case 7 if mappings:
            pairs = draw.choice(mappings)
            pairs.append([draw.choice(pairs)[0], draw.choice(SCALARS)])
        case 8 if mappings:  # a key from another mapping
            draw.choice(mappings).append(copy.deepcopy(draw.choice(draw.choice(mappings))))
        case 9 if lists:
            items = draw.choice(lists)
            items += items[: draw.randrange(1, 4)]
        case 10:  # a copy of another part of the file
            other, where = draw.choice(slots)
            holder[at] = copy.deepcopy(other[where])
        case _:
            value = holder[at]
            holder[at] = [value] if draw.random() < 0.5 else Tree([["name", value]])


def _written(node: Any, indent: str = "") -> str:
    """The text of the file: JSON with a line for each value, which is also YAML."""
    inner = f"{indent} "
    if isinstance(node, Tree):
        return "{" + ",".join(f"\n{inner}{json.dumps(key)}: {_written(value, inner)}" for key, value in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(f"\n{inner}{_written(item, inner)}" for item in node) + "]"
    return node if isinstance(node, Raw) else json.dumps(node)


def torn(content: bytes, draw: random.Random) -> bytes:
    """The content with some bytes changed, lost, doubled or inserted."""
    torn = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(torn)) if torn else 0
        match draw.randrange(6):
            case 0 if torn:
                torn[at] ^= 1 << draw.randrange(8)
            case 1 if torn:
                torn[at] = draw.choice(b"\0\x01\x1b\x7f\x85\xa0\xff\xfe:,{}[]&*!|>'\"#%@`-?\t\n\r ")
            case 2:
                del torn[at:]
            case 3:
                del torn[at : at + draw.randrange(1, 20)]
            case 4:
                torn[at:at] = torn[at : at + draw.randrange(1, 200)]
            case _:
                torn[at:at] = draw.choice((b"\xef\xbb\xbf", b"\0", b"\xc3", b"\xed\xa0\x80", b"\r", b"---\n", b"\t"))
    return bytes(torn)


def _untold(error: ValueError) -> str:
    """Why an error's faults do not help a user. Empty where they do."""
    told = getattr(error, "faults", None)
    if not told:
        return "a refusal without a fault"
    if any(not str(fault).strip() for fault in told):
        return "a fault without a word"
    if len(str(error).splitlines()) > MAX_TOLD + 1:
        return f"{len(str(error).splitlines())} lines of faults"
    if (longest := max(len(str(fault)) for fault in told)) > 5000:
        return f"a fault of {longest} characters"
    return ""


def _difference(content: bytes, right: str) -> str:
    """The lines in which a mutant differs from the valid file."""
    lines = difflib.unified_diff(right.splitlines(), content.decode("utf-8", "replace").splitlines(), lineterm="", n=1)
    return "\n".join([f"    {line[:120]}" for line in lines][2:26])
