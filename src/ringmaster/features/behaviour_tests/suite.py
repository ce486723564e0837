"""Schema of behavioural tests in suite files, and when they are run.

The tests are those of CheckList (Ribeiro et al., Beyond Accuracy, ACL 2020): `minimum` functionality, `invariance` and
`direction` of change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, ValidationInfo

from ringmaster.files import is_file
from ringmaster.findings import Finding, Location, findings_where
from ringmaster.tasks.batch import references
from ringmaster.tasks.batch.references import Factory, Name, Whole
from ringmaster.tasks.batch.sections import Section
from ringmaster.tasks.evaluation.suite_tests import SuiteTests, TestResult, exactly_one, repeated_names

if TYPE_CHECKING:
    from ringmaster.tasks.evaluation.scores import Score, ScoringResult

MINIMUM, INVARIANCE, DIRECTION = KINDS = ("minimum", "invariance", "direction")
UP, DOWN, NOT_UP, NOT_DOWN = MOVES = ("up", "down", "not_up", "not_down")
TEXT_CHANGES = ("typo", "case", "replace", "append", "prepend")
IMAGE_CHANGES = ("shift", "rotate", "flip", "noise", "brightness", "occlude")

Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def _arrays(name: str, info: ValidationInfo) -> str:
    """Returns the absolute path of a file of arrays, given relative to the suite's folder."""
    assert isinstance(info.context, dict), "validation needs the file's folder as its context"
    folder = Path(info.context["folder"])
    if not name.endswith(".npz") or not is_file(folder, name):
        raise references.wrong(f"there is no file {folder / name} that ends in .npz", "write one with numpy.savez")
    return str(folder / name)


class ChangeEntry(Section):
    """The changes applied to a case, in the order of the keys."""

    typo: Whole | None = Field(default=None, description="how many pairs of neighbouring letters to swap, such as 1")
    case: Annotated[str, AfterValidator(references.one_of(("upper", "lower", "title")))] | None = Field(
        default=None, description="upper, lower or title"
    )
    replace: dict[str, str] | None = Field(default=None, description="words and what they become, such as {Ann: Bob}")
    append: str | None = Field(default=None, description='text to put behind, such as " Thanks."')
    prepend: str | None = Field(default=None, description='text to put before, such as "Well, "')
    shift: Annotated[list[int], Field(min_length=2, max_length=2)] | None = Field(
        default=None, description="pixels to the right and down, such as [1, 0]"
    )
    rotate: int | None = Field(default=None, description="90, 180 or 270 degrees, counter-clockwise")
    flip: Annotated[str, AfterValidator(references.one_of(("horizontal", "vertical")))] | None = Field(
        default=None, description="horizontal or vertical"
    )
    noise: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="the standard deviation of the noise added to each pixel, such as 0.1"
    )
    brightness: Number | None = Field(default=None, description="what is added to all pixels, such as 0.2")
    occlude: Whole | None = Field(default=None, description="the side of a covered square in pixels, such as 2")

    @property
    def of_images(self) -> bool:
        """Whether images are changed."""
        return bool(self.model_fields_set & set(IMAGE_CHANGES))


class DirectionEntry(Section):
    """The direction in which a change moves the model's output."""

    moves: Annotated[str, AfterValidator(references.one_of(MOVES))] = Field(description="up, down, not_up or not_down")
    label: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="the label whose probability moves; a language model's log-probability has none"
    )
    by: Annotated[float, Field(ge=0)] = Field(default=0.0, description="by how much at least, such as 0.1")


class BehaviourEntry(Section):
    """One behavioural test: cases, an optional change, and how many cases may fail."""

    name: Name = Field(description="a name, such as negation")
    kind: Annotated[str, AfterValidator(references.one_of(KINDS))] = Field(
        description="minimum, invariance or direction"
    )
    texts: Annotated[list[str], Field(min_length=1)] | None = Field(default=None, description="a list of texts")
    template: str | None = Field(default=None, description='a text with slots, such as "I {verb} it."')
    lexicons: dict[str, Annotated[list[str], Field(min_length=1), references.Distinct]] = Field(
        default={}, description="the words of each slot, such as {verb: [love, like]}"
    )
    held_out: Whole | None = Field(default=None, description="how many images of the held-out data, such as 100")
    images: Annotated[str, AfterValidator(_arrays)] | None = Field(
        default=None, description="an .npz file with pixel_values [rows, channels, height, width], such as cases.npz"
    )
    label: Annotated[int, Field(ge=0)] | None = Field(default=None, description="the label of every case, such as 1")
    labels: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, description="the label of each case")
    over: str | Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None, description="a less likely text for each case, as a template or a list, for language models"
    )
    change: ChangeEntry | None = Field(default=None, description="a change, such as {typo: 1}")
    direction: DirectionEntry | None = Field(
        default=None, description="the direction of the change in the output, such as {label: 1, moves: down}"
    )
    tolerance: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="by how much a probability may change, such as 0.1"
    )
    per_token: bool = Field(default=False, description="true to compare log-probabilities by token, else false")
    max_failures: Share = Field(default=0.0, description="the share of cases that may fail, such as 0.05")
    max_cases: Whole = Field(default=500, description="the most cases of a template, such as 500")
    seed: Annotated[int, Field(ge=0)] = Field(default=0, description="the seed of random changes, such as 0")

    @property
    def of_images(self) -> bool:
        """Whether the cases are images."""
        return self.held_out is not None or self.images is not None


class BehaviourKeys(Section):
    """Behavioural tests in a suite file."""

    encode: Factory | None = Field(
        default=None, description='"package.module:function", from a list of texts to a dict of tensors'
    )
    tests: list[BehaviourEntry] = Field(default=[], description="a list of tests")


class BehaviourTests(SuiteTests[BehaviourKeys]):
    """Tests of texts and images."""

    keys = BehaviourKeys

    def entries(self, suite: BehaviourKeys) -> Sequence[BehaviourEntry]:
        """Returns all tests."""
        return suite.tests

    def on_held_out(self, suite: BehaviourKeys) -> Sequence[BehaviourEntry]:
        """Returns those of held-out images."""
        return [test for test in suite.tests if test.held_out is not None]

    def findings(self, suite: BehaviourKeys) -> Iterator[Finding]:
        """Yields the faults of the tests."""
        yield from repeated_names("tests", suite.tests)
        for i, test in enumerate(suite.tests):
            yield from _of_test(test, ("tests", i))

    def run(
        self, suite: BehaviourKeys, *, models: Sequence[str], scored: ScoringResult, score: Score
    ) -> Mapping[str, Sequence[TestResult]]:
        """Runs all tests, of which those of texts are scored at once."""
        from ringmaster.features.behaviour_tests.behaviour import run_images, run_texts

        texts = [test for test in suite.tests if not test.of_images]
        pictures = [test for test in suite.tests if test.of_images]
        match = run_texts(texts, score=score, encode=suite.encode)
        shown: dict[str, list[TestResult]] = {}
        if pictures:
            images = next((scores.inputs for scores in scored.scores.values()), None)
            shown = run_images(pictures, models=models, images=images, score=score)
        order = [test.name for test in suite.tests]
        return {
            name: sorted([*match.get(name, ()), *shown.get(name, ())], key=lambda result: order.index(result.test))
            for name in models
        }


def slots_of(template: str) -> list[str]:
    """Returns the distinct slots of a template."""
    return list(dict.fromkeys(re.findall(r"{(\w+)}", template)))


def _of_test(test: BehaviourEntry, at: Location) -> Iterator[Finding]:
    yield from exactly_one(test, ("texts", "template", "held_out", "images"), at)
    if test.template is not None:
        wanted = slots_of(test.template) + (slots_of(test.over) if isinstance(test.over, str) else [])
        for slot in dict.fromkeys(slot for slot in wanted if slot not in test.lexicons):
            yield Finding((*at, "lexicons"), f"lacks the words of {{{slot}}}", f"give {slot}: [...]")
    reported = [key for key in ("label", "labels", "over") if getattr(test, key) is not None]
    num_texts, no_meaning = len(test.texts or ()), f"has no meaning for kind {test.kind}"
    yield from findings_where(
        (
            test.template is None and test.lexicons,
            (*at, "lexicons"),
            "has no template",
            "give template: instead of texts",
        ),
        (
            isinstance(test.over, list) and len(test.over) != num_texts,
            (*at, "over"),
            "has not one text for each of texts",
            "give as many, in the same order",
        ),
        (
            test.labels is not None and len(test.labels) != num_texts,
            (*at, "labels"),
            "has not one label for each of texts",
            "give as many, in the same order",
        ),
        (
            test.kind == MINIMUM and not test.of_images and len(reported) != 1,
            at,
            "has no expected value",
            "give one of label, labels and over",
        ),
        (test.kind != MINIMUM and reported, (*at, *reported[:1]), no_meaning, "leave it out"),
        (
            test.kind != MINIMUM and test.change is None,
            (*at, "change"),
            "is missing",
            "give the change, such as {typo: 1}",
        ),
        (
            (test.kind == DIRECTION) != (test.direction is not None),
            (*at, "direction"),
            "is missing" if test.direction is None else no_meaning,
            "kind: direction goes with direction: {moves: down}",
        ),
    )
    if test.change is not None:
        yield from _of_change(test.change, (*at, "change"), is_text=not test.of_images)


def _of_change(change: ChangeEntry, at: Location, *, is_text: bool) -> Iterator[Finding]:
    own, others, what = (TEXT_CHANGES, IMAGE_CHANGES, "texts") if is_text else (IMAGE_CHANGES, TEXT_CHANGES, "images")
    given = change.model_fields_set
    yield from findings_where(
        *((key in given, (*at, key), f"does not change {what}", "leave it out") for key in sorted(others)),
        (not given, at, "changes nothing", f"give one of {', '.join(own)}"),
        (change.rotate not in (None, 90, 180, 270), (*at, "rotate"), f"is {change.rotate}", "give 90, 180 or 270"),
    )


SUITE_TESTS = (BehaviourTests(),)
