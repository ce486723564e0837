"""What the samples of a job read of a knowledge store: the passages that are most similar to each question.

They are found when data is prepared, so that techniques and plans know nothing of stores, and the batch of a step
remains a function of (seed, step). The digest of the store is part of what the prepared data is known by.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

MANIFEST, PREPARED = "store.json", "data.json"
"""The file of a store, and of prepared passages, that says what it was made of, with its digest."""
TEMPLATE = "{passages}\n\n{prompt}"
"""What a model reads where the job gives no template: the passages, and then its prompt, behind an empty line."""


@dataclass(frozen=True, kw_only=True)
class Retriever:
    """How the passages of a question are found, and put before it.

    Attributes:
        store: the folder of a knowledge store. In batch files also the name of a version, such as wiki@champion, or of
            a job. A folder with prepared passages stands for a store that is not made yet: see `find_passages`.
        k: the passages of each question.
        template: what the model reads, with {passages}, of which each is a line, the best first, and {prompt}.
        passages: the JSON form of the data of the job that makes the store; None for a store that is there.
    """

    store: str
    k: int = 5
    template: str = TEMPLATE
    passages: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Retriever:
        """Returns the retriever of a job's data. Raises ValueError, with a remedy, where it cannot be one."""
        if not isinstance(value.get("store"), str) or (others := sorted(value.keys() - cls.__dataclass_fields__)):
            wrong = "names no store" if "store" not in value else f"has no setting {others[0]}"
            raise ValueError(f"data.retriever {wrong}. To fix: write {{store: NAME@champion, k: 5}}")
        result = cls(**value)
        try:
            names = {name for _, name, _, _ in Formatter().parse(result.template) if name is not None}
        except ValueError:
            names = set()
        if names != {"passages", "prompt"}:
            raise ValueError(
                f"data.retriever: the template {result.template!r:.100} is not of passages and a prompt. To fix: write "
                "{passages} and {prompt} where they belong, and {{ for a brace"
            )
        return result

    @property
    def is_made(self) -> bool:
        """Whether the store is there; else its folder may have the passages that it will be made of."""
        return self.passages is None or (Path(self.store) / MANIFEST).is_file()

    @property
    def digest(self) -> str:
        """The digest of the store. Raises ValueError where the folder holds none."""
        try:
            file = Path(self.store) / (MANIFEST if self.is_made else PREPARED)
            return str(json.loads(file.read_text(encoding="utf-8"))["digest"])
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"data.retriever: {self.store} is no folder of a knowledge store: {error}. To fix: name a store, or "
                "its folder (docs/retrieval.md)"
            ) from error

    def prompt(self, passages: Sequence[str], question: str) -> str:
        """Returns what the model reads."""
        return self.template.format(passages="\n".join(passages), prompt=question)
