"""The chain of a job's states: what the state was at its checkpoints, and what trained the steps between them.

A link has the digest of every tensor of the state after a step, the layout, the libraries and the devices that trained
the steps since the link before, and the digest of that link. So two trainings of a job can be compared afterwards,
although their checkpoints are gone; and nobody can change a link without changing all that follow.

The digests are of whole tensors, so that they do not depend on how a checkpoint is divided among ranks. Rank 0 reads
the checkpoint that it has just published, in the background. For the last one of a segment, links are made for at
most 2 % of the time.

A job that untrusted nodes may train has digests of single steps as well, of the tensors that rank 0 holds: for at most
3 % of the time, or after the steps that an order names, to be compared with the digests of an earlier gang.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ringmaster.codec import SINCE_LATER, digest, from_json, to_json
from ringmaster.errors import CheckpointError
from ringmaster.techniques.checkpoints.checkpoint import Checkpoint, folder_of, read_manifest
from ringmaster.techniques.checkpoints.environment import TrainingEnvironment
from ringmaster.techniques.checkpoints.storage import place_of

if TYPE_CHECKING:
    import torch

FILE = "chain.json"
"""The file in the folder of a job's checkpoints."""
MAX_OF_TIME, MAX_OF_STEPS = 0.02, 0.03


@dataclass(frozen=True, kw_only=True)
class StateLink:
    """A job's state after `step` steps.

    first_step: the number of steps after which the link before was made.
    tensors: the digest of each tensor, by its canonical name in checkpoints.
    environment: what trained the steps since the link before.
    parent: the digest of the link before or, for the first link, of the job.
    steps: the digests of rank 0's tensors after some of the steps since the link before, by step.
    """

    step: int
    first_step: int
    tensors: Mapping[str, str]
    environment: TrainingEnvironment
    parent: str
    steps: Mapping[str, str] = field(default_factory=dict, metadata=SINCE_LATER)

    @property
    def digest(self) -> str:
        """The digest of the content of the link, and so of all links before it."""
        return digest(self, length=64)


@dataclass(frozen=True, kw_only=True)
class StateChain:
    """The links of a job, the oldest first.

    job: the JSON form of the job.
    weights: the digest of all that determines the job's weights (`rank_job.weights_digest`).
    data: the digest of its samples. Which samples a step reads is a function of them, the job's seed and the step.
    """

    job: Mapping[str, Any]
    weights: str
    data: str
    links: tuple[StateLink, ...] = ()

    @property
    def origin(self) -> str:
        """The parent of the first link."""
        return digest({"job": self.job, "weights": self.weights, "data": self.data}, length=64)

    @property
    def head(self) -> str:
        """The digest of the last link."""
        return self.links[-1].digest if self.links else self.origin

    def up_to(self, step: int) -> StateChain:
        """Returns the chain without links of later steps."""
        return replace(self, links=tuple(link for link in self.links if link.step <= step))

    def add(self, link: StateLink) -> StateChain:
        """Returns the chain with one more link."""
        return replace(self, links=(*self.links, link))

    def to_text(self) -> str:
        """Returns the chain as JSON, with the digest of its last link, which `parse` checks."""
        return json.dumps({"head": self.head, **to_json(self)})

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Returns the chain whose `to_text` is `text`.

        Raises ValueError where a link does not follow from the link before it, or the text is none of a chain.
        """
        value = json.loads(text)
        head = value.pop("head")
        chain = from_json(cls, value)
        parent, step = chain.origin, 0
        for link in chain.links:
            if link.parent != parent or link.first_step < step or link.step < link.first_step:
                raise ValueError(f"the link of step {link.step} does not follow from the link before it")
            parent, step = link.digest, link.step
        if parent != head:
            raise ValueError("its last link was changed")
        return chain


def read_chain(root: str | Path) -> StateChain | None:
    """Returns the chain stored with the checkpoints under `root`; None where there is none, or it was damaged."""
    try:
        return StateChain.parse(place_of(root).read(FILE))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


@dataclass(kw_only=True)
class ChainWriter:
    """Extends the chain of one job, on rank 0 of its gang.

    root: the job's checkpoints.
    chain: the links so far, of the checkpoint that the segment starts from and of those before.
    first_step: the step after which the segment starts.
    environment: what trains the segment.
    digested_steps: the steps after which `digest_step` takes a digest; empty for what fits into its share of the time.
    """

    root: str | Path
    chain: StateChain
    first_step: int
    environment: TrainingEnvironment
    digested_steps: frozenset[int] = frozenset()
    _linked_s: float = field(default_factory=time.monotonic)
    _spent_s: float = 0.0
    _steps: dict[str, str] = field(default_factory=dict)  # the digests of steps that no link has yet
    _begun_s: float = field(default_factory=time.monotonic)
    _digesting_s: float = 0.0
    _last_digest_s: float = 0.0

    @classmethod
    def begin(
        cls,
        root: str | Path,
        *,
        chain: StateChain,
        step: int,
        environment: TrainingEnvironment,
        digested_steps: Collection[int] = (),
    ) -> Self:
        """Returns the writer for a segment that starts after `step` steps.

        chain: the job's, without links; the stored one is continued where it is of a job that trains the same weights.
            It is linked again where the job has got another batch size, which is part of the job.
        """
        stored = read_chain(root)
        if stored is not None and stored.weights == chain.weights:
            if stored.job.get("phases") == chain.job.get("phases"):
                chain = stored
            for link in stored.links if chain is not stored else ():
                chain = chain.add(replace(link, parent=chain.head))
            chain = chain.up_to(step)
        steps = frozenset(digested_steps)
        return cls(root=root, chain=chain, first_step=step, environment=environment, digested_steps=steps)

    def digest_step(self, step: int, tensors: Iterable[torch.Tensor]) -> None:
        """Takes a digest of the state after `step`, for the next link, where it is due.

        tensors: the tensors that rank 0 holds, in the same order in every gang of the same layout.
        """
        from ringmaster.techniques.checkpoints.tensor_files import digest_of

        began_s = time.monotonic()
        share_s = MAX_OF_STEPS * (began_s - self._begun_s)
        is_too_much = self._digesting_s + self._last_digest_s > share_s
        if step not in self.digested_steps if self.digested_steps else is_too_much:
            return
        self._steps[str(step)] = digest_of(tensors)
        self._last_digest_s = time.monotonic() - began_s
        self._digesting_s += self._last_digest_s

    def extend(self, step: int, *, always: bool) -> None:
        """Adds the link of the checkpoint of `step`, unless links would take more than 2 % of the time.

        always: add it however long it takes. Raises OSError where the checkpoint or the chain cannot be accessed.
        """
        began_s = time.monotonic()
        is_known = any(link.step == step for link in self.chain.links)
        if is_known or (not always and self._spent_s > MAX_OF_TIME * (began_s - self._linked_s)):
            return
        last = self.chain.links[-1].step if self.chain.links else self.first_step
        link = StateLink(
            step=step,
            first_step=last,
            tensors=tensor_digests(self.root, step),
            environment=self.environment,
            parent=self.chain.head,
            steps={each: self._steps.pop(each) for each in list(self._steps) if int(each) <= step},
        )
        self.chain = self.chain.add(link)
        place_of(self.root).write_whole(FILE, self.chain.to_text().encode())
        self._linked_s = time.monotonic()
        self._spent_s = self._linked_s - began_s


def tensor_digests(root: str | Path, step: int) -> dict[str, str]:
    """Returns the digest of each tensor of the checkpoint of `step`: of its dtype, its shape and its bytes."""
    from ringmaster.techniques.checkpoints.state import Reader
    from ringmaster.techniques.checkpoints.tensor_files import bytes_of

    place, name = place_of(root), folder_of(step)
    manifest = read_manifest(place, name)
    if manifest is None:
        raise CheckpointError(f"{place.location(name)} is not a whole checkpoint")
    result = {}
    with Reader(Checkpoint(place=place, name=name, manifest=manifest)) as reader:
        for tensor in sorted(manifest.tensors):
            stored = manifest.tensors[tensor]
            value = sha256(f"{stored.dtype} {list(stored.shape)}".encode())
            value.update(memoryview(bytes_of(reader.whole(tensor))))
            result[tensor] = value.hexdigest()[:32]
    return result
