"""Which adaptation broke a model: a search along its ancestry, as `git bisect` searches along commits.

A test says of a model whether it is good. The adaptation that broke a model is one whose child is bad and whose parents
are all good. Where a fault that came in stays in, the middle of what is undecided is tested each time, and about
log2(n) tests are enough; where that does not hold, which contradictory answers tell, all are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from model_lineage.graph import Graph

Test = Callable[[str], bool]
"""Whether a model is good; called once a model at most."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """An adaptation that broke something: its child is bad, all of its parents are good (a root has none).

    child, parents: model ids.
    """

    child: str
    parents: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What a search found.

    culprits: one for a fault that came in once; several where it came, went and came again, or in several lines.
    is_monotone: False where some good model has a bad ancestor: the fault does not simply stay in.
    verdicts: what was tested, in that order.
    """

    culprits: tuple[Culprit, ...]
    is_monotone: bool
    verdicts: Mapping[str, bool] = field(default_factory=dict)


def blame(graph: Graph, model: str, test: Test, *, every: bool = False) -> Blame:
    """Who broke `model`, a bad one. every: test all of its ancestors, whatever the answers are.

    Raises ValueError where the model passes the test: there is nobody to blame.
    """
    answers = _Answers(test)
    if answers.is_good(model):
        raise ValueError(f"{model} passes the test: nothing broke it. To fix: name a model that fails")
    line = {model, *graph.ancestors(model)}
    family = [each for each in graph.models if each in line]  # the oldest first
    if not every:
        culprit = _halve(graph, model, answers)
        if _is_monotone(graph, family, answers.known):
            return Blame(culprits=(culprit,), is_monotone=True, verdicts=answers.known)
    for each in family:
        answers.is_good(each)
    culprits = tuple(
        Culprit(child=each, parents=graph.parents(each))
        for each in family
        if not answers.is_good(each) and all(answers.is_good(parent) for parent in graph.parents(each))
    )
    return Blame(culprits=culprits, is_monotone=_is_monotone(graph, family, answers.known), verdicts=answers.known)


def first_bad(points: Sequence[str], test: Test) -> tuple[int, bool]:
    """(index of the first bad one of `points`, whether all that was tested fits one change from good to bad).

    points: in order, for example the checkpoints of a run, the last of them bad.
    """
    answers = _Answers(test)
    low, high = -1, len(points) - 1  # points[high] is bad, all up to low are taken for good
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if answers.is_good(points[middle]) else (low, middle)
    good = [i for i, point in enumerate(points) if answers.known.get(point) is True]
    return high, all(i < high for i in good)


class _Answers:
    def __init__(self, test: Test) -> None:
        self._test = test
        self.known: dict[str, bool] = {}

    def is_good(self, model: str) -> bool:
        if model not in self.known:
            self.known[model] = self._test(model)
        return self.known[model]


def _halve(graph: Graph, model: str, answers: _Answers) -> Culprit:
    """The culprit, if a fault that came in stays in: of a bad model's suspects, the one is tested whose answer leaves
    the fewer in the worse case.
    """
    bad, good = model, set[str]()
    while True:
        suspects = [each for each in graph.ancestors(bad) if each not in good]
        if not suspects:
            return Culprit(child=bad, parents=graph.parents(bad))
        middle = min(suspects, key=lambda each: _worse_case(graph, each, suspects))
        if answers.is_good(middle):
            good |= {middle, *graph.ancestors(middle)}
        else:
            bad = middle


def _worse_case(graph: Graph, each: str, suspects: Sequence[str]) -> int:
    cleared = {each, *graph.ancestors(each)} & set(suspects)
    return max(len(cleared), len(suspects) - len(cleared))


def _is_monotone(graph: Graph, family: Sequence[str], known: Mapping[str, bool]) -> bool:
    """Whether no model that is known to be good has an ancestor that is known to be bad."""
    return not any(
        known.get(ancestor) is False for each in family if known.get(each) for ancestor in graph.ancestors(each)
    )
