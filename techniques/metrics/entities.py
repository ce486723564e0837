"""Precision, recall and F1 of entities, such as names of persons, that tags of tokens mark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ringmaster.techniques.metric import Metric, Outputs
from ringmaster.techniques.metrics.class_counts import ratio
from ringmaster.techniques.metrics.tokens import answers, most_likely

if TYPE_CHECKING:
    from torch import Tensor

    from ringmaster.techniques.metric import Values

OUTSIDE = "O"
TAG = re.compile(r"O|[BIES]-.+")


class EntityF1(Metric):
    """The harmonic mean of precision and recall of entities of all types together, as of CoNLL-2003 and seqeval.

    An entity is right where its first token, its last token and its type are (Tjong Kim Sang and De Meulder,
    arXiv:cs/0306050, section 2.3). The classes are tags: O, and B-TYPE, I-TYPE, E-TYPE and S-TYPE.
    """

    name = "entity_f1"
    higher_is_better = True
    sums = ("entity_hits", "entities_predicted", "entities_labelled")
    needs = "a label for each token, and the names of the classes: O, and B-TYPE, I-TYPE, E-TYPE or S-TYPE"
    reads_whole_rows = True

    def compute_sums(self, outputs: Outputs) -> Mapping[str, Tensor] | None:
        """Returns how many entities of each row are right, are predicted and are labelled, [rows] each."""
        import torch

        predicted, labels, names = most_likely(outputs), outputs.labels, outputs.class_names
        if predicted is None or labels is None or outputs.logits is None or len(names) != outputs.logits.shape[-1]:
            return None
        if not all(TAG.fullmatch(name) for name in names):
            return None
        counts = []
        for row in answers(predicted, labels):
            own, true = (entities([names[number] for number in tags]) for tags in row)
            counts.append((len(own & true), len(own), len(true)))
        columns = torch.tensor(counts, device=labels.device).reshape(-1, 3).unbind(1)
        return dict(zip(self.sums, columns, strict=True))

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns 2 hits / (predicted + labelled)."""
        hits, predicted, labelled = (sums[name] for name in self.sums)
        return ratio(2 * hits, predicted + labelled)


class EntityPrecision(EntityF1):
    """The share of predicted entities that are right."""

    name = "entity_precision"

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns hits / predicted."""
        return ratio(sums["entity_hits"], sums["entities_predicted"])


class EntityRecall(EntityF1):
    """The share of labelled entities that are found."""

    name = "entity_recall"

    def value(self, sums: Mapping[str, Values]) -> Values:
        """Returns hits / labelled."""
        return ratio(sums["entity_hits"], sums["entities_labelled"])


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Returns the entities of a row as (type, first token, last token).

    As the script conlleval, it takes wrong sequences: an I-TYPE after O or after another type begins an entity.
    """
    found: set[tuple[str, int, int]] = set()
    first, before = None, OUTSIDE
    for place, tag in enumerate([*tags, OUTSIDE]):
        is_joined = before[0] in "BI" and tag[0] in "IE" and before[2:] == tag[2:]
        if first is not None and not is_joined:
            found.add((before[2:], first, place - 1))
            first = None
        if first is None and tag != OUTSIDE:
            first = place
        before = tag
    return found
