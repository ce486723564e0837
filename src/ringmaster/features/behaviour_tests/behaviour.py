"""Behavioural tests: their cases are generated, scored together, and evaluated one test at a time.

Changes of texts and images are deterministic by seed.
"""

import itertools
import random
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringmaster.features.behaviour_tests import suite
from ringmaster.tasks.evaluation.scores import CAUSAL, CLASSIFIER, Cases, Score, Scores, ScoringResult
from ringmaster.tasks.evaluation.suite_tests import TestResult
from ringmaster.techniques.data.row_files import check_expansion

MAX_EXAMPLES = 5
MAX_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class TextCases:
    """The texts of a test.

    others: for each text, the one that it is compared with (the changed or the less likely one); None without
        comparison.
    labels: the expected labels, or None.
    """

    texts: tuple[str, ...]
    others: tuple[str, ...] | None = None
    labels: tuple[int, ...] | None = None


def text_cases(test: suite.BehaviourEntry) -> TextCases:
    """Returns the cases of a test of texts: the literal ones, or at most `max_cases` fillings of its template."""
    labels = None if test.labels is None else tuple(test.labels)
    if test.template is None:
        texts = tuple(test.texts or ())
        over = test.over if isinstance(test.over, list) else [test.over] * len(texts) if test.over else None
    else:
        slots = suite.slots_of(test.template + (test.over if isinstance(test.over, str) else ""))
        every = [
            dict(zip(slots, words, strict=True)) for words in itertools.product(*(test.lexicons[s] for s in slots))
        ]
        if len(every) > test.max_cases:
            every = random.Random(test.seed).sample(every, test.max_cases)
        texts = tuple(_filled(test.template, words) for words in every)
        over = [_filled(test.over, words) for words in every] if isinstance(test.over, str) else None
    if test.label is not None:
        labels = (test.label,) * len(texts)
    if test.change is None:
        return TextCases(texts=texts, others=None if over is None else tuple(over), labels=labels)
    changed = tuple(changed_text(text, test.change, seed=test.seed) for text in texts)
    if test.kind != suite.MINIMUM:
        return TextCases(texts=texts, others=changed)
    return TextCases(texts=changed, others=None if over is None else tuple(over), labels=labels)


def run_texts(
    tests: Sequence[suite.BehaviourEntry], *, score: Score, encode: str | None
) -> dict[str, list[TestResult]]:
    """Runs all tests of texts and returns their results by model. The texts of all tests are scored at once."""
    cases = {test.name: text_cases(test) for test in tests}
    texts = list(dict.fromkeys(t for case in cases.values() for t in (*case.texts, *(case.others or ()))))
    if not texts:
        return {}
    place = {text: i for i, text in enumerate(texts)}
    scored = score(Cases(texts=tuple(texts), encode=encode))
    result: dict[str, list[TestResult]] = {}
    for model, scores in scored.scores.items():
        for test in tests:
            case = cases[test.name]
            one = taken(scores, [place[text] for text in case.texts])
            two = None if case.others is None else taken(scores, [place[text] for text in case.others])
            pairs = (
                [(text,) for text in case.texts] if case.others is None else zip(case.texts, case.others, strict=True)
            )
            lines = [" and ".join(f"{text[:MAX_CHARACTERS]!r}" for text in pair) for pair in pairs]
            result.setdefault(model, []).append(judge(test, one, two, labels=case.labels, descriptions=lines))
    for model, fault in scored.faults.items():
        result[model] = [replace(_unrun(test), fault=fault) for test in tests]
    return result


def run_images(
    tests: Sequence[suite.BehaviourEntry], *, models: Sequence[str], images: Mapping[str, Any] | None, score: Score
) -> dict[str, list[TestResult]]:
    """Runs all tests of images and returns their results by model.

    images: the columns of the held-out images, such as `pixel_values` [rows, channels, height, width].
    """
    plain: dict[Any, ScoringResult] = {}
    result: dict[str, list[TestResult]] = {model: [] for model in models}
    for test in tests:
        one, two, labels = ScoringResult(), None, None
        try:
            columns = _columns_of(test, images)
            labels = columns.get("labels")
            change = test.change
            changed = None if change is None else changed_images(columns["pixel_values"], change, seed=test.seed)
        except ValueError as error:
            one = ScoringResult(faults=dict.fromkeys(models, str(error)))
        else:
            if changed is not None:
                two = score(Cases(columns={**columns, "pixel_values": changed}))
            if changed is not None and test.kind == suite.MINIMUM:
                assert two is not None
                one, two = two, None
            else:
                key = test.images or test.held_out
                one = plain[key] = plain.get(key) or score(Cases(columns=columns))
        for model in models:
            result[model].append(_of_images(test, model, one, two, labels=labels))
    return result


def _columns_of(test: suite.BehaviourEntry, held_out: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the images that a test requests. Raises ValueError if there are none."""
    if test.images is None:
        if held_out is None or "pixel_values" not in held_out:
            raise ValueError("it requires held-out images, and there are none")
        return {key: values[: test.held_out] for key, values in held_out.items()}
    try:
        with zipfile.ZipFile(test.images) as archive:
            stored, num_bytes = Path(test.images).stat().st_size, sum(part.file_size for part in archive.infolist())
            check_expansion(test.images, num_bytes, num_stored_bytes=stored)
        with np.load(test.images, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(f"{test.images} is no .npz file: {error}") from error
    if "pixel_values" not in columns or columns["pixel_values"].ndim != 4:
        raise ValueError(f"{test.images} has no pixel_values [rows, channels, height, width]")
    return columns


def judge(
    test: suite.BehaviourEntry,
    one: Scores,
    two: Scores | None,
    *,
    labels: Sequence[int] | None,
    descriptions: Sequence[str],
) -> TestResult:
    """Returns the result of a test.

    one: the scores of its cases.
    two: the scores of what each case is compared with, or None.
    descriptions: a description of each case for messages.
    """
    result = replace(_unrun(test), num_cases=one.num_rows)
    has_label = labels is not None or (test.direction is not None and test.direction.label is not None)
    if one.kind not in (CAUSAL, CLASSIFIER) or (one.kind == CAUSAL and has_label):
        wanted = "a classifier" if has_label else "a classifier or a causal language model"
        return replace(result, fault=f"it requires {wanted}, and the model is not one")
    if one.kind == CLASSIFIER and test.over is not None:
        return replace(result, fault="`over` requires a causal language model, and the model is not one")
    if test.direction is not None and one.probabilities is not None:
        label, num_labels = test.direction.label, one.probabilities.shape[1]
        if label is None or label >= num_labels:
            return replace(result, fault=f"`direction` needs a label of the model's, 0 to {num_labels - 1}")
    failing, how = _failing(test, one, two, labels)
    places = np.flatnonzero(failing)
    examples = tuple(f"{descriptions[i]}: {how[i]}" for i in places[:MAX_EXAMPLES])
    return replace(result, num_failures=len(places), examples=examples)


def taken(scores: Scores, rows: Sequence[int]) -> Scores:
    """Returns the scores of some rows in a given order; rows may repeat."""

    def of(values: Any) -> Any:
        return None if values is None else values[list(rows)]

    return Scores(
        kind=scores.kind,
        num_rows=len(rows),
        log_probabilities=of(scores.log_probabilities),
        predictions=of(scores.predictions),
        probabilities=of(scores.probabilities),
        num_tokens=of(scores.num_tokens),
    )


def _failing(
    test: suite.BehaviourEntry, one: Scores, two: Scores | None, labels: Sequence[int] | None
) -> tuple[Any, list[str]]:
    """Returns which cases fail, [rows], and a description of each case's outcome. A score that is NaN fails."""
    if one.kind == CAUSAL:
        assert two is not None, "a test of a language model compares"
        a, b = _log_probabilities(one, test), _log_probabilities(two, test)
        how = [f"log-probability {x:.3g} and {y:.3g}" for x, y in zip(a, b, strict=True)]
        if test.kind == suite.MINIMUM:
            return ~(a > b), how
        if test.kind == suite.INVARIANCE:
            return ~(np.abs(b - a) <= (test.tolerance or 0.0)), how
        return ~_moved(test, b - a), how
    p, value = one.probabilities, one.predictions
    assert p is not None and value is not None, "a classifier says both"
    broken = ~np.isfinite(p).all(1)
    if test.kind == suite.MINIMUM:
        wanted = np.asarray(labels)
        how = [f"predicted {x}, not {y}" for x, y in zip(value, wanted, strict=True)]
        return (value != wanted) | broken, how
    assert two is not None and two.probabilities is not None and two.predictions is not None
    q = two.probabilities
    broken |= ~np.isfinite(q).all(1)
    if test.kind == suite.INVARIANCE:
        how = [f"predicted {x}, then {y}" for x, y in zip(value, two.predictions, strict=True)]
        if test.tolerance is None:
            return (value != two.predictions) | broken, how
        change = np.abs(q - p).max(1)
        return ~(change <= test.tolerance) | broken, [f"a probability changed by {x:.3g}" for x in change]
    assert test.direction is not None and test.direction.label is not None
    label = test.direction.label
    how = [f"probability of {label} {x:.3g}, then {y:.3g}" for x, y in zip(p[:, label], q[:, label], strict=True)]
    return ~_moved(test, q[:, label] - p[:, label]) | broken, how


def _moved(test: suite.BehaviourEntry, change: Any) -> Any:
    assert test.direction is not None
    by = test.direction.by
    return {
        suite.UP: (change > 0) & (change >= by),
        suite.DOWN: (change < 0) & (change <= -by),
        suite.NOT_UP: change <= by,
        suite.NOT_DOWN: change >= -by,
    }[test.direction.moves]


def _log_probabilities(scores: Scores, test: suite.BehaviourEntry) -> Any:
    assert scores.log_probabilities is not None
    if not test.per_token:
        return scores.log_probabilities
    assert scores.num_tokens is not None
    return scores.log_probabilities / np.maximum(scores.num_tokens - 1, 1)


def _of_images(
    test: suite.BehaviourEntry, model: str, one: ScoringResult, two: ScoringResult | None, *, labels: Any
) -> TestResult:
    faults = [s.faults.get(model) for s in (one, two) if s is not None]
    if test.kind == suite.MINIMUM and labels is None:
        faults.append("the images have no labels")
    if fault := next((fault for fault in faults if fault), None):
        return replace(_unrun(test), fault=fault)
    scores = one.scores[model]
    lines = [f"{'held-out image' if test.images is None else 'image'} {i}" for i in range(scores.num_rows)]
    known = [int(label) for label in labels[: scores.num_rows]] if test.kind == suite.MINIMUM else None
    return judge(test, scores, None if two is None else two.scores[model], labels=known, descriptions=lines)


def _unrun(test: suite.BehaviourEntry) -> TestResult:
    return TestResult(test=test.name, kind=test.kind, max_failures=test.max_failures)


def _filled(template: str, words: Mapping[str, str]) -> str:
    return re.sub(r"{(\w+)}", lambda slot: words[slot[1]], template)


Images = npt.NDArray[np.float32]


def changed_text(text: str, change: suite.ChangeEntry, *, seed: int) -> str:
    """Returns a text after a change. seed: with the text, the seed of random typos."""
    if change.typo is not None:
        text = _with_typos(text, change.typo, random.Random(f"{seed} {text}"))
    if change.case is not None:
        text = {"upper": text.upper(), "lower": text.lower(), "title": text.title()}[change.case]
    for word, other in (change.replace or {}).items():
        text = other.join(re.split(rf"(?<!\w){re.escape(word)}(?!\w)", text))
    return f"{change.prepend or ''}{text}{change.append or ''}"


def changed_images(images: Images, change: suite.ChangeEntry, *, seed: int) -> Images:
    """Returns images [rows, channels, height, width] after a change; uncovered areas get the smallest pixel value."""
    result = images.astype(np.float32)
    for key in IMAGE_CHANGES:
        value = getattr(change, key)
        if value is not None:
            result = IMAGE_CHANGES[key](result, value, np.random.default_rng(seed))
    return np.ascontiguousarray(result)


def _with_typos(text: str, number: int, draw: random.Random) -> str:
    """Swaps neighbouring letters in `number` places, or in as many as there are."""
    letters = list(text)
    places = [
        i for i in range(len(letters) - 1)
        if letters[i].isalpha() and letters[i + 1].isalpha() and letters[i] != letters[i + 1]
    ]  # fmt: skip
    for _ in range(number):
        if not places:
            break
        place = draw.choice(places)
        letters[place], letters[place + 1] = letters[place + 1], letters[place]
        places = [i for i in places if abs(i - place) > 1]
    return "".join(letters)


def _shifted(images: Images, by: list[int], _: np.random.Generator) -> Images:
    from scipy.ndimage import shift  # type: ignore[import-untyped]

    right, down = by
    shifted: Images = shift(images, (0, 0, down, right), order=0, cval=images.min())
    return shifted


def _rotated(images: Images, degrees: int, _: np.random.Generator) -> Images:
    if degrees != 180 and images.shape[-1] != images.shape[-2]:
        raise ValueError(f"images of {images.shape[-1]}x{images.shape[-2]} turned by {degrees} are of another shape")
    return np.rot90(images, k=degrees // 90, axes=(-2, -1))


def _occluded(images: Images, side: int, draw: np.random.Generator) -> Images:
    result = images.copy()
    height, width = images.shape[-2:]
    side = min(side, height, width)
    for image in result:
        y, x = draw.integers(0, height - side + 1), draw.integers(0, width - side + 1)
        image[..., y : y + side, x : x + side] = images.min()
    return result


IMAGE_CHANGES: Mapping[str, Callable[[Images, Any, np.random.Generator], Images]] = {
    "shift": _shifted,
    "rotate": _rotated,
    "flip": lambda images, how, _: np.flip(images, axis=-1 if how == "horizontal" else -2),
    "noise": lambda images, deviation, draw: images + draw.normal(0, deviation, images.shape).astype(np.float32),
    "brightness": lambda images, by, _: np.clip(images + np.float32(by), images.min(), images.max()),
    "occlude": _occluded,
}
