"""The changes that behavioural tests make to texts and images."""

import numpy as np
import pytest

from ringmaster.features.behaviour_tests.behaviour import changed_images, changed_text
from ringmaster.features.behaviour_tests.suite import ChangeEntry

IMAGE = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)


def text(said, seed=0, **change):
    return changed_text(said, ChangeEntry(**change), seed=seed)


def image(**change):
    return changed_images(IMAGE, ChangeEntry(**change), seed=0)[0, 0].tolist()


def test_texts_change_as_is_said():
    assert text("good Food", case="upper") == "GOOD FOOD"
    assert text("Ann met Anna, Ann.", replace={"Ann": r"\1 Bob"}) == r"\1 Bob met Anna, \1 Bob."
    assert text("b", prepend="a", append="c") == "abc"
    assert text("yes", case="title", append=" NOW") == "Yes NOW"


def test_typos_swap_neighbours_the_same_ones_in_every_run():
    said = "the quick brown fox"
    once = text(said, typo=1)
    assert once == text(said, typo=1)
    assert sorted(once) == sorted(said)
    assert sum(a != b for a, b in zip(once, said, strict=True)) == 2
    assert sum(a != b for a, b in zip(text(said, typo=3), said, strict=True)) == 6
    assert len({text(said, seed=seed, typo=1) for seed in range(20)}) > 3
    assert text("a b 11", typo=2) == "a b 11"  # nothing can be swapped


def test_images_change_as_is_said():
    assert image(shift=[1, 0]) == [[0, 0, 1], [0, 3, 4], [0, 6, 7]]
    assert image(shift=[0, -1]) == [[3, 4, 5], [6, 7, 8], [0, 0, 0]]
    assert image(shift=[5, 0]) == [[0] * 3] * 3
    assert image(rotate=180) == [[8, 7, 6], [5, 4, 3], [2, 1, 0]]
    assert image(rotate=90) == [[2, 5, 8], [1, 4, 7], [0, 3, 6]]
    assert image(flip="horizontal") == [[2, 1, 0], [5, 4, 3], [8, 7, 6]]
    assert image(brightness=2) == [[2, 3, 4], [5, 6, 7], [8, 8, 8]]
    covered = np.array(image(occlude=2))
    assert 3 <= (covered != IMAGE[0, 0]).sum() <= 4
    noisy = np.array(image(noise=0.1))
    assert 0 < np.abs(noisy - IMAGE[0, 0]).max() < 0.6
    assert IMAGE.flatten().tolist() == list(range(9))  # the input is unchanged


def test_images_that_are_not_square_cannot_lie_on_their_side():
    with pytest.raises(ValueError, match="another shape"):
        changed_images(np.zeros((1, 1, 2, 3), np.float32), ChangeEntry(rotate=90), seed=0)
