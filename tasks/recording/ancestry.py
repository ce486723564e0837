"""The ancestry of a job's model in the lineage: the kind of its adaptation and its parents' models."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ringmaster.codec import from_json
from ringmaster.errors import LedgerError
from ringmaster.model_lineage.base_models import record_base
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.snapshot import LineageNode, Snapshot
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques import Job
from ringmaster.techniques.checkpoints.storage import is_url
from ringmaster.techniques.job import COMPOSED, EXTRACTED

KINDS_OF_ADAPTERS: Mapping[str, str] = {
    "lora": "lora",
    "prefix": "prefix-tuned",
    "ia3": "ia3",
    "prompt": "prompt-tuned",
}


def kind_of(job: Job, *, has_parents: bool) -> str:
    """Returns how a job's model is made: one of `ADAPTATION_KINDS`."""
    if job.adaptation is not None:
        return job.adaptation.kind
    if kinds := [feature.model_kind for feature in job.features if feature.model_kind]:
        return kinds[0]
    if job.adapter is not None:
        return KINDS_OF_ADAPTERS[job.adapter.kind]
    return "fine-tuned" if has_parents else "pretrained"


@dataclass(frozen=True, kw_only=True)
class Ancestry:
    """Finds the recorded parents of a batch's models.

    jobs: those of the batch, by name.
    lost: why models from outside the batch cannot be recorded, as they are found.
    """

    ledger: Ledger
    journal: Journal
    jobs: Mapping[str, Job]
    lost: dict[str, str] = field(default_factory=dict)

    def parents(self, job: Job) -> list[str]:
        """Returns the URIs or ids of a job's parents: other jobs' models, registered models, and models from elsewhere.

        The first one is the one that its weights are from. A folder or a hub name becomes a node of its own. Raises
        LedgerError if a parent is not recorded.
        """
        result = [*(self._named(job, name) for name in self._models(job))]
        sources = [*map(self._imported, _sources(job))]
        result = [*sources, *result] if job.base is None else [*result, *sources]
        result.append(self._started_from(job))
        if job.adapter is not None and job.adapter.continues_base and result[0] is not None:
            result.insert(0, self.ledger.resolve_model(result[0]).weights_from)  # the weights that both adapters are on
        return list(dict.fromkeys(uri for uri in result if uri is not None))

    def continued_job(self, name: str) -> str | None:
        """Returns the job from whose checkpoint a job continues that was added to a running batch; None for others."""
        records = self.journal.jobs()
        while name in records and (variation := records[name].variation):
            name = variation.job
            if variation.step is not None:
                return name
        return None

    def _started_from(self, job: Job) -> str | None:
        """Returns the model of which a checkpoint, that no job of the batch is named for, is the job's first state."""
        start = job.started_from
        if start is None or start.checkpoints in self.jobs:
            return None
        if (source := self.continued_job(job.name)) is not None:  # its model may be recorded later
            return self.journal.jobs()[source].model_uri
        own = self.journal.get(f"run:{job.name}")
        with tempfile.TemporaryDirectory() as aside:
            models = Snapshot.of(self.ledger, cache=Path(aside)).models
        there = trained_at(start.checkpoints, models)
        # Neither itself, whose steps were set, nor what it is trained in place of, without what that has read later.
        others = [n.id for n in there if n.record.run_id != own and n.repeating_job != job.name]
        return others[-1] if others else None

    def stores(self, job: Job) -> list[str]:
        """Returns the URI of the version of the store that a job's data was read with, if it has one."""
        uri = self.journal.get(f"store:{job.data.store}")
        return [] if uri is None else [uri]

    def named_parents(self, job: Job) -> dict[str, str]:
        """Returns the URIs or ids of a job's parents, and of its store, by the names that the job uses."""
        uris = {name: self._named(job, name) for name in self._models(job)}
        uris |= {source: self._imported(source) for source in _sources(job)}
        uris |= {str(job.data.store): uri for uri in self.stores(job)}
        return {name: uri for name, uri in uris.items() if uri is not None}

    def forget(self, job: Job) -> None:
        """Forgets the nodes of the models from elsewhere that a job came from."""
        for source in {*job.parents, *_sources(job)}:
            self.journal.remove(f"imported:{source}")

    def first_weights(self, job: Job) -> str | None:
        """Returns the URI or id of the model that a student starts from, where it is not its teacher; else None."""
        name = next((feature.teacher for feature in job.features if feature.teacher is not None), None)
        if name is None:
            return None
        teacher = self._named(job, name)
        starts = (
            [self._imported(source) for source in _sources(job)] if job.base is None else [self._named(job, job.base)]
        )
        return next((uri for uri in starts if uri is not None and uri != teacher), None)

    def _models(self, job: Job) -> list[str]:
        """Returns the names of a job's parents; of stores and checkpoints, only those of jobs of the batch."""
        return [name for name in job.parents if name in self.jobs or name in job.models]

    def _named(self, job: Job, name: str) -> str | None:
        if name in self.jobs:
            return self._of_job(job, name)
        if not name.startswith("models:/"):
            return self._imported(name)
        # The version that was used for training, as the alias may name another one by now.
        known: str = self.journal.get(f"base:{job.name if name == job.base else name}", name)
        return known

    def _of_job(self, job: Job, name: str) -> str:
        uri = self.journal.jobs()[name].model_uri
        if uri is None:
            what = "base" if name == job.base else "parent"
            raise LedgerError(f"the model of {job.name} is not recorded: its {what} {name} is not, and would be lost")
        return uri

    def _imported(self, source: str) -> str | None:
        """Returns the node of a model from elsewhere; None if it cannot be recorded, see `lost`."""
        key = f"imported:{source}"
        known: str | None = self.journal.get(key)
        if known is not None:
            return known
        try:
            known = record_base(self.ledger, source, store=self.ledger.store)
        except (ValueError, OSError) as error:  # LedgerError and TensorStoreError are among them
            if isinstance(error, LedgerError) and error.may_pass:
                raise
            self.lost[source] = f"{source} is not in the lineage: {error}"
            return None
        self.journal.put(key, known)
        return known


def trained_at(root: str, models: Iterable[LineageNode]) -> list[LineageNode]:
    """Returns the models of which a folder or URL has the checkpoints."""
    place = _place(root)
    return [node for node in models if (own := node.record.origin.checkpoints) and _place(own) == place]


def _place(root: str) -> str:
    return root.rstrip("/") if is_url(root) else str(Path(root).resolve())


def _sources(job: Job) -> Iterator[str]:
    """Yields the folders or hub names from which a job reads weights without naming them as its base."""
    how = None if job.adaptation is None else job.adaptation.kind
    if (job.base is None or how == EXTRACTED) and job.model.from_pretrained is not None:
        yield job.model.from_pretrained
    if how == COMPOSED:
        for part in job.data.kwargs["jobs"]:
            yield from _sources(from_json(Job, part))
    if job.adapter is not None and job.adapter.from_pretrained is not None:
        yield job.adapter.from_pretrained
    for feature in job.features:
        if feature.teacher is not None and feature.teacher not in job.parents:
            yield feature.teacher
