"""The search of a lineage graph for the adaptation that broke a model.

`blame` bisects a model's ancestry for the adaptation that broke it, as `git bisect` searches commits. A test returns
whether a model is good, or that it cannot be tested. A culprit is an adaptation whose child is bad and whose parents
are all good. If a fault persists once introduced, each step tests the middle of the undecided models, and about log2(n)
tests are enough. If the answers show that it does not persist, all models are tested. A model that cannot be tested is
skipped: its children are treated as children of its parents.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ringmaster.model_lineage.graph import Graph

Test = Callable[[str], bool | None]
"""Returns whether a model is good, or None if it cannot be tested; called at most once a model."""


@dataclass(frozen=True, kw_only=True)
class BreakingAdaptation:
    """An adaptation that broke a model: its child is bad, and all of its parents are good (a root has none).

    child, parents: model ids.
    perhaps: untestable models between them, each of which may be the culprit instead.
    """

    child: str
    parents: tuple[str, ...]
    perhaps: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BisectionResult:
    """The result of a bisection.

    culprits: one if the fault was introduced once; several if it was fixed and introduced again, or occurs in several
        lines of ancestry.
    is_monotone: False if some good model has a bad ancestor, so that the fault does not persist.
    verdicts: the tested models and whether each is good, in the order of the tests.
    untested: the models that could not be tested.
    """

    culprits: tuple[BreakingAdaptation, ...]
    is_monotone: bool
    verdicts: Mapping[str, bool] = field(default_factory=dict)
    untested: tuple[str, ...] = ()


def blame(graph: Graph, model: str, test: Test, *, every: bool = False) -> BisectionResult:
    """Returns the adaptations that broke `model`, a bad one. every: test all of its ancestors instead of bisecting.

    Raises ValueError if the model passes the test or cannot be tested.
    """
    answers = _Answers(test)
    if answers.of(model) is None:
        raise ValueError(f"{model} cannot be tested. To fix: name a model that fails")
    if answers.of(model):
        raise ValueError(f"{model} passes the test: nothing broke it. To fix: name a model that fails")
    while True:
        untested = tuple(answers.untested)
        try:
            result, is_monotone = _search(_without(graph, model, untested), model, answers, every=every)
        except _ModelNotTestable:
            continue  # the next search skips one more model and reuses the known answers
        culprits = tuple(
            BreakingAdaptation(child=each.child, parents=each.parents, perhaps=_between(graph, each.child, untested))
            for each in result
        )
        return BisectionResult(culprits=culprits, is_monotone=is_monotone, verdicts=answers.known, untested=untested)


def first_bad(points: Sequence[str], test: Test) -> tuple[int, int]:
    """Returns (index of the last good point or -1, index of the first bad point); points between cannot be tested.

    points: an ordered sequence whose last point is bad, for example the checkpoints of a run.
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
    """Returns such a pair for every change from good to bad. All points are tested; the beginning counts as good."""
    result: list[tuple[int, int]] = []
    low, was_good = -1, True
    for i, point in enumerate(points):
        is_good = test(point)
        if is_good is None:
            continue
        if was_good and not is_good:
            result.append((low, i))
        low, was_good = i, is_good
    return result


class _ModelNotTestable(Exception):
    """Raised when a model that is to be tested cannot be tested."""


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
            raise _ModelNotTestable
        return answer


def _search(graph: Graph, model: str, answers: _Answers, *, every: bool) -> tuple[tuple[BreakingAdaptation, ...], bool]:
    """Returns (the culprits, whether the known answers are monotone).

    Raises _ModelNotTestable if a test gives no answer.
    """
    if not every:
        culprit = _halve(graph, model, answers)
        if _is_monotone(graph, answers.known):
            return (culprit,), True
    for each in graph.models:  # oldest first
        answers.is_good(each)
    culprits = tuple(
        BreakingAdaptation(child=each, parents=graph.parents(each))
        for each in graph.models
        if not answers.is_good(each) and all(answers.is_good(parent) for parent in graph.parents(each))
    )
    return culprits, _is_monotone(graph, answers.known)


def _halve(graph: Graph, model: str, answers: _Answers) -> BreakingAdaptation:
    """Returns the culprit, assuming that the fault persists once introduced.

    Each step tests the suspect whose answer leaves the fewest suspects in the worse case.
    """
    bad, good = model, set[str]()
    while True:
        suspects = [each for each in graph.ancestors(bad) if each not in good]
        if not suspects:
            return BreakingAdaptation(child=bad, parents=graph.parents(bad))
        middle = min(suspects, key=lambda each: _worse_case(graph, each, suspects))
        if answers.is_good(middle):
            good |= {middle, *graph.ancestors(middle)}
        else:
            bad = middle


def _worse_case(graph: Graph, each: str, suspects: Sequence[str]) -> int:
    cleared = {each, *graph.ancestors(each)} & set(suspects)
    return max(len(cleared), len(suspects) - len(cleared))


def _is_monotone(graph: Graph, known: Mapping[str, bool]) -> bool:
    """Whether no known-good model has a known-bad ancestor."""
    return not any(
        known.get(ancestor) is False for each in graph.models if known.get(each) for ancestor in graph.ancestors(each)
    )


def _without(graph: Graph, model: str, left_out: Collection[str]) -> Graph:
    """Returns the ancestry of a model without `left_out`, whose children become children of their parents."""

    def parents(id: str) -> tuple[str, ...]:
        result: dict[str, None] = {}
        for parent in graph.parents(id):
            result |= dict.fromkeys(parents(parent) if parent in left_out else [parent])
        return tuple(result)

    line = {model, *graph.ancestors(model)}.difference(left_out)
    return Graph((id, parents(id)) for id in graph.models if id in line)


def _between(graph: Graph, child: str, untested: Collection[str]) -> tuple[str, ...]:
    """Returns the untested ancestors that only untested models separate from `child`."""
    result: dict[str, None] = {}
    todo = [child]
    for each in todo:
        new = [parent for parent in graph.parents(each) if parent in untested and parent not in result]
        result |= dict.fromkeys(new)
        todo += new
    return tuple(result)
