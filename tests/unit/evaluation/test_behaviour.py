"""Behavioural tests, run on models that are simple functions."""

import numpy as np
import pytest

from ringmaster.features.behaviour_tests.behaviour import run_images, run_texts, text_cases
from ringmaster.features.behaviour_tests.suite import BehaviourEntry
from ringmaster.tasks.evaluation.scores import CAUSAL, CLASSIFIER, Scores, ScoringResult


def classified(probability):
    """The scores of a classifier with two labels. probability: of label 1, [rows]."""
    p = np.asarray(probability, float)
    both = np.stack([1 - p, p], axis=1)
    return Scores(kind=CLASSIFIER, num_rows=len(p), probabilities=both, predictions=both.argmax(1))


def sentiment(cases):
    """A classifier that knows 'good' and, in lower case, 'not'."""
    return ScoringResult(
        scores={"it": classified([(("good" in t.lower()) != ("not" in t) and 0.9) or 0.2 for t in cases.texts])}
    )


def writer(cases):
    """A language model that gives longer texts a lower probability."""
    lengths = np.array([len(text) for text in cases.texts], float)
    return ScoringResult(
        scores={"it": Scores(kind=CAUSAL, num_rows=len(lengths), log_probabilities=-lengths, num_tokens=lengths + 1)}
    )


def run(model, **test):
    (results,) = run_texts([BehaviourEntry(name="t", **test)], score=model, encode=None).values()
    return results[0]


TEMPLATE = {"template": "{a} {b}", "lexicons": {"a": ["good", "bad", "not"], "b": ["food", "good"]}}


def test_a_template_is_filled_with_every_combination_or_as_many_as_are_allowed():
    every = text_cases(BehaviourEntry(name="t", kind="minimum", label=1, **TEMPLATE))
    assert every.texts == ("good food", "good good", "bad food", "bad good", "not food", "not good")
    assert every.labels == (1,) * 6
    few = text_cases(BehaviourEntry(name="t", kind="minimum", label=1, max_cases=2, **TEMPLATE))
    assert len(few.texts) == 2
    assert set(few.texts) < set(every.texts)


def test_minimum_functionality_counts_wrong_labels_and_shows_some():
    found = run(sentiment, kind="minimum", label=1, **TEMPLATE)
    assert (found.num_cases, found.num_failures, found.passed) == (6, 2, False)
    assert found.examples == ("'bad food': predicted 0, not 1", "'not good': predicted 0, not 1")
    assert run(sentiment, kind="minimum", label=1, max_failures=0.34, **TEMPLATE).passed
    assert not run(sentiment, kind="minimum", label=1, max_failures=0.33, **TEMPLATE).passed
    assert run(sentiment, kind="minimum", texts=["good", "bad"], labels=[1, 0]).passed


def test_invariance_is_of_predictions_or_of_probabilities():
    assert run(sentiment, kind="invariance", texts=["good"], change={"append": " food"}).passed
    capitals = run(sentiment, kind="invariance", texts=["not good", "bad"], change={"case": "upper"})
    assert (capitals.num_failures, capitals.examples) == (1, ("'not good' and 'NOT GOOD': predicted 0, then 1",))
    change = {"append": " not"}
    assert run(sentiment, kind="invariance", texts=["good"], change=change, tolerance=0.71).passed
    assert not run(sentiment, kind="invariance", texts=["good"], change=change, tolerance=0.69).passed


@pytest.mark.parametrize(
    ("moves", "by", "passed"),
    [("down", 0.0, True), ("down", 0.69, True), ("down", 0.71, False), ("up", 0.0, False), ("not_up", 0.0, True),
     ("not_down", 0.0, False), ("not_down", 0.71, True)],
)  # fmt: skip
def test_a_direction_says_where_a_probability_moves(moves, by, passed):
    direction = {"label": 1, "moves": moves, "by": by}
    found = run(sentiment, kind="direction", texts=["good"], change={"append": " not"}, direction=direction)
    assert found.passed is passed


def test_a_language_model_prefers_and_moves():
    assert run(writer, kind="minimum", texts=["he goes"], over=["he goesss"]).passed
    # An equal probability is not a preference.
    assert not run(writer, kind="minimum", texts=["he goes"], over="he goes").passed
    lexicons = {"who": ["we", "they"]}
    assert run(writer, kind="minimum", template="{who} go", over="{who} goes", lexicons=lexicons).num_cases == 2
    assert not run(writer, kind="minimum", texts=["ab"], over=["abc"], per_token=True).passed
    moved = {"kind": "direction", "texts": ["a"], "change": {"append": "bc"}}
    assert run(writer, **moved, direction={"moves": "down", "by": 2}).passed
    assert not run(writer, **moved, direction={"moves": "down", "by": 3}).passed
    assert run(writer, kind="invariance", texts=["a"], change={"append": "b"}, tolerance=1).passed


def test_what_a_model_cannot_be_asked_is_a_fault_and_no_pass():
    for model, test, told in (
        (writer, {"kind": "minimum", "texts": ["a"], "label": 1}, "a classifier"),
        (sentiment, {"kind": "minimum", "texts": ["a"], "over": ["b"]}, "causal"),
        (
            sentiment,
            {"kind": "direction", "texts": ["a"], "change": {"append": "b"}, "direction": {"moves": "up"}},
            "0 to 1",
        ),
        (
            lambda cases: ScoringResult(faults={"it": "it broke"}),
            {"kind": "minimum", "texts": ["a"], "label": 1},
            "it broke",
        ),
    ):
        found = run(model, **test)
        assert not found.passed
        assert told in found.fault


def test_a_score_that_is_not_a_number_fails():
    broken = ScoringResult(scores={"it": classified([np.nan, 0.9])})
    found = run(lambda _: broken, kind="minimum", texts=["a", "b"], label=1)
    assert found.num_failures == 1


def test_equal_texts_of_all_tests_are_scored_once():
    asked = []

    def model(cases):
        asked.append(cases.texts)
        return sentiment(cases)

    tests = [BehaviourEntry(name=n, kind="minimum", texts=["good", "good not"], labels=[1, 0]) for n in "ab"]
    assert all(result.passed for result in run_texts(tests, score=model, encode=None)["it"])
    assert asked == [("good", "good not")]


def bright(cases):
    """A classifier that predicts label 1 where the left half of the image is brighter."""
    pixels = cases.columns["pixel_values"]
    half = pixels.shape[-1] // 2
    return ScoringResult(
        scores={"it": classified((pixels[..., :half].sum((1, 2, 3)) > pixels[..., half:].sum((1, 2, 3))) * 1.0)}
    )


def test_images_are_changed_and_asked_again():
    pixels = np.zeros((4, 1, 4, 4), np.float32)
    pixels[:2, ..., 0], pixels[2:, ..., 3] = 1.0, 1.0
    images = {"pixel_values": pixels, "labels": np.array([1, 1, 0, 1])}
    tests = [
        BehaviourEntry(name="known", kind="minimum", held_out=99),
        BehaviourEntry(name="noisy", kind="minimum", held_out=2, change={"noise": 0.01}),
        BehaviourEntry(name="upside", kind="invariance", held_out=4, change={"flip": "vertical"}),
        BehaviourEntry(name="mirrored", kind="invariance", held_out=4, change={"flip": "horizontal"}),
        BehaviourEntry(
            name="away", kind="direction", held_out=2, change={"shift": [2, 0]}, direction={"label": 1, "moves": "down"}
        ),
    ]
    found = {r.test: r for r in run_images(tests, models=["it"], images=images, score=bright)["it"]}
    assert {name: (r.num_cases, r.num_failures) for name, r in found.items()} == {
        "known": (4, 1),
        "noisy": (2, 0),
        "upside": (4, 0),
        "mirrored": (4, 4),
        "away": (2, 0),
    }
    assert found["known"].examples == ("held-out image 3: predicted 0, not 1",)


def test_images_without_labels_and_of_another_shape_are_faults():
    images = {"pixel_values": np.zeros((2, 1, 2, 4), np.float32)}
    tests = [
        BehaviourEntry(name="known", kind="minimum", held_out=2),
        BehaviourEntry(name="turned", kind="invariance", held_out=2, change={"rotate": 90}),
    ]
    known, turned = run_images(tests, models=["it"], images=images, score=bright)["it"]
    assert "no labels" in known.fault
    assert "another shape" in turned.fault
    assert not known.passed
    assert not turned.passed


def test_images_may_come_from_a_file(tmp_path):
    pixels = np.zeros((2, 1, 4, 4), np.float32)
    pixels[0, ..., 0], pixels[1, ..., 3] = 1.0, 1.0
    np.savez(tmp_path / "cases.npz", pixel_values=pixels, labels=[1, 1])
    np.savez(tmp_path / "other.npz", pixels=pixels)
    (tmp_path / "broken.npz").write_text("nothing")

    def results(name):
        test = BehaviourEntry.model_validate(
            {"name": "t", "kind": "minimum", "images": name}, context={"folder": tmp_path}
        )
        return run_images([test], models=["it"], images=None, score=bright)["it"][0]

    assert results("cases.npz").examples == ("image 1: predicted 0, not 1",)
    assert "has no pixel_values" in results("other.npz").fault
    assert "is no .npz file" in results("broken.npz").fault
