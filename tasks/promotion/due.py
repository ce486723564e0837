"""Which production models are to be trained again: a pure rule over digests, and its reason in words."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.promotion.stage import Standing, training_digest, version_of

SHORT = 8  # characters of a digest that a person needs to see that two differ


@dataclass(frozen=True, kw_only=True)
class Due:
    """Whether a model is to be trained now, and why or why not, for a person."""

    is_due: bool
    why: str


def due(standing: Standing, *, digest: str) -> Due:
    """A model is due where its data is other than what its champion and its newest version were trained on.

    digest: of the model's data as it is now. The newest version counts although it may have lost: the same data would
    only bring the same model again.
    """
    champion, latest = standing.champion, standing.latest
    if latest is not None and training_digest(latest) == digest:
        version = version_of(latest)
        if standing.candidate is not None:
            return Due(is_due=False, why=f"version {version} was trained on this data, and is to be compared yet")
        if champion is not None and champion.version == version:
            return Due(is_due=False, why="no new data since the champion was trained")
        return Due(is_due=False, why=f"no new data since version {version} was trained, which was not promoted")
    if champion is None:
        return Due(is_due=True, why="it has no champion yet")
    known = training_digest(champion)
    if known == digest:
        return Due(is_due=False, why="its data is what the champion was trained on")
    if known is None:
        return Due(is_due=True, why="it is not recorded what data the champion was trained on")
    return Due(is_due=True, why=f"new data: {digest[:SHORT]}, the champion was trained on {known[:SHORT]}")
