"""Which adaptation broke a model: a search along its ancestry, as `git bisect` searches along commits.

A test says of a model whether it is good, or that it cannot be tested. The adaptation that broke a model is one whose
child is bad and whose parents are all good. Where a fault that came in stays in, the middle of what is undecided is
tested each time, and about log2(n) tests are enough; where that does not hold, which contradictory answers tell, all
are tested. What cannot be tested is passed over: who came from it came from its parents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ringmaster.model_lineage.graph import Adaptation, Graph

Test = Callable[[str], bool | None]
"""Whether a model is good, None where it cannot be tested; called once a model at most."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """An adaptation that broke something: its child is bad, all of its parents are good (a root has none).

    child, parents: model ids. perhaps: those between them that cannot be tested: it may have been one of theirs.
    """

    child: str
    parents: tuple[str, ...]
    perhaps: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What a search found.

    culprits: one for a fault that came in once; several where it came, went and came again, or in several lines.
    is_monotone: False where some good model has a bad ancestor: the fault does not simply stay in.
    verdicts: what was tested, in that order. untested: what could not be.
    """

    culprits: tuple[Culprit, ...]
    is_monotone: bool
    verdicts: Mapping[str, bool] = field(default_factory=dict)
    untested: tuple[str, ...] = ()


def blame(graph: Graph, model: str, test: Test, *, every: bool = False) -> Blame:
    """Who broke `model`, a bad one. every: test all of its ancestors, whatever the answers are.

    Raises ValueError where the model passes the test, or cannot be tested: there is nobody to blame.
    """
    answers = _Answers(test)
    if answers.of(model) is None:
        raise ValueError(f"{model} cannot be tested. To fix: name a model that fails")
    if answers.of(model):
        raise ValueError(f"{model} passes the test: nothing broke it. To fix: name a model that fails")
    while True:
        untested = tuple(answers.untested)
        try:
            found, is_monotone = _search(_without(graph, model, untested), model, answers, every=every)
        except _Untestable:
            continue  # with one more to be passed over; what is known is not asked again
        culprits = tuple(
            Culprit(child=each.child, parents=each.parents, perhaps=_between(graph, each.child, untested))
            for each in found
        )
        return Blame(culprits=culprits, is_monotone=is_monotone, verdicts=answers.known, untested=untested)


def first_bad(points: Sequence[str], test: Test) -> tuple[int, int]:
    """(index of the last good one of `points`, -1 where none is, index of the first bad one).

    points: in order, for example the checkpoints of a run, the last of them bad. Those between the two cannot be
    tested.
    """
    low, high, untested = -1, len(points) - 1, set[int]()
    while left := [i for i in range(low + 1, high) if i not in untested]:
        middle = left[len(left) // 2]
        is_good = test(points[middle])
        if is_good is None:
            untested.add(middle)
        elif is_good:
            low = middle
        else:
            high = middle
    return low, high


def every_bad(points: Sequence[str], test: Test) -> list[tuple[int, int]]:
    """The same of every change from good to bad, with all points tested; the beginning counts as good."""
    found: list[tuple[int, int]] = []
    low, was_good = -1, True
    for i, point in enumerate(points):
        is_good = test(point)
        if is_good is None:
            continue
        if was_good and not is_good:
            found.append((low, i))
        low, was_good = i, is_good
    return found


class _Untestable(Exception):
    """A model that was to be tested cannot be."""


class _Answers:
    def __init__(self, test: Test) -> None:
        self._test = test
        self.known: dict[str, bool] = {}
        self.untested: dict[str, None] = {}

    def of(self, model: str) -> bool | None:
        if model not in self.known and model not in self.untested:
            answer = self._test(model)
            if answer is None:
                self.untested[model] = None
            else:
                self.known[model] = answer
        return self.known.get(model)

    def is_good(self, model: str) -> bool:
        answer = self.of(model)
        if answer is None:
            raise _Untestable
        return answer


def _search(graph: Graph, model: str, answers: _Answers, *, every: bool) -> tuple[tuple[Culprit, ...], bool]:
    """(the culprits, whether what is known is monotone), among models that can be tested as far as is known."""
    if not every:
        culprit = _halve(graph, model, answers)
        if _is_monotone(graph, answers.known):
            return (culprit,), True
    for each in graph.models:  # the oldest first
        answers.is_good(each)
    culprits = tuple(
        Culprit(child=each, parents=graph.parents(each))
        for each in graph.models
        if not answers.is_good(each) and all(answers.is_good(parent) for parent in graph.parents(each))
    )
    return culprits, _is_monotone(graph, answers.known)


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


def _is_monotone(graph: Graph, known: Mapping[str, bool]) -> bool:
    """Whether no model that is known to be good has an ancestor that is known to be bad."""
    return not any(
        known.get(ancestor) is False for each in graph.models if known.get(each) for ancestor in graph.ancestors(each)
    )


def _without(graph: Graph, model: str, left_out: Collection[str]) -> Graph:
    """The ancestry of a model without some of it: who came from one that is left out came from its parents."""

    def parents(id: str) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for parent in graph.parents(id):
            found |= dict.fromkeys(parents(parent) if parent in left_out else [parent])
        return tuple(found)

    line = {model, *graph.ancestors(model)}.difference(left_out)
    return Graph(Adaptation(child=id, parents=parents(id), kind="merged") for id in graph.models if id in line)


def _between(graph: Graph, child: str, untested: Collection[str]) -> tuple[str, ...]:
    """The untested ancestors of a model that only untested ones lie before."""
    found: dict[str, None] = {}
    todo = [child]
    for each in todo:
        new = [parent for parent in graph.parents(each) if parent in untested and parent not in found]
        found |= dict.fromkeys(new)
        todo += new
    return tuple(found)
