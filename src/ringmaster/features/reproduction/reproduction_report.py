"""The result of a reproduction as sentences and plain values."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.techniques.checkpoints.chain import StateLink
from ringmaster.text import enumerated


@dataclass(frozen=True, kw_only=True)
class RepeatedLink:
    """A link of a model's chain that was trained again. tensors: the names of those that differ."""

    link: StateLink
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReproductionReport:
    """The result of a reproduction, or of an audit.

    is_equal: whether all that was compared has the same bits.
    links: the links that were trained again, and num_links how many there are.
    steps, num_steps: how many steps were trained again, and how many the model has.
    first_step: the first step whose loss differs; None where none does, or no losses are recorded.
    files: the tensors of the model's files that differ from those of the repeated training, or of the last link.
    causes: what is different about the repeated training, or about the record.
    folder: the model that the repeated training made; None for an audit.
    """

    model: str
    is_equal: bool
    links: tuple[RepeatedLink, ...]
    num_links: int
    steps: int
    num_steps: int
    first_step: int | None
    files: tuple[str, ...]
    causes: tuple[str, ...]
    folder: Path | None

    @property
    def first(self) -> RepeatedLink | None:
        """The first repeated link that differs."""
        return next((each for each in self.links if each.tensors), None)

    @property
    def probability(self) -> float:
        """The probability with which a change of one recorded state is found by a draw of as many states."""
        return len(self.links) / self.num_links if self.num_links else 1.0

    def sentences(self) -> list[str]:
        """Returns the report as sentences."""
        what = f"{self.steps:,} of {self.num_steps:,} steps, {len(self.links)} of {self.num_links} recorded states"
        if self.is_equal:
            equal = f"{self.model} was made again ({what}): every tensor is equal, bit by bit"
            chance = f"a change of one state would have been found with a probability of {self.probability:.0%}"
            return [equal if self.folder is not None else f"{self.model}: {what} are equal, bit by bit; {chance}"]
        result = [f"{self.model} is not what its training makes again ({what})"]
        if self.first is not None:
            link, step = self.first.link, self.first_step
            where = f"step {step}" if step is not None else f"the steps {link.first_step + 1} to {link.step}"
            result.append(
                f"first difference: {where}, in {enumerated(self.first.tensors)} of the state after step {link.step}"
            )
        if self.files:
            result.append(f"different in the model's files: {enumerated(self.files)}")
        return [*result, *(f"cause: {cause}" for cause in self.causes)]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        first = self.first
        difference = None if first is None else {"first_step": first.link.first_step, "last_step": first.link.step}
        return {
            "model": self.model,
            "is_equal": self.is_equal,
            "num_steps": self.num_steps,
            "repeated_steps": self.steps,
            "states": [each.link.step for each in self.links],
            "num_states": self.num_links,
            "probability": self.probability,
            "first_difference": difference and {**difference, "tensors": list(first.tensors if first else ())},
            "first_step": self.first_step,
            "files": list(self.files),
            "causes": list(self.causes),
            "folder": self.folder and str(self.folder),
        }
