"""Undo: models that have read a row, or came from a data set or a version, are trained again as if it had not been.

Every model that read the row goes back to its last checkpoint before the step that read it first, and trains on from
there on the data without the row; a model with no such checkpoint, and all models that came from a changed one, are
trained from their beginning. All of them are one batch, planned together, whose models become the next versions of
their names.

The order of samples without the row is that of the data without it: from the checkpoint on, step k has the samples that
it has in a training on that data (`data.samples.Sampler`). The tokenizer stays as it is.

A data set or version that is undone is taken out of the line: what came from the models that were trained on it starts
from what these came from.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ringmaster.codec import digest, to_json
from ringmaster.errors import InputError, PromotionRefused, input_errors, raise_faults
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.flows.lineage.recorded_training import RecordedTraining
from ringmaster.flows.lineage.row_readers import TracedRow, reads_of
from ringmaster.flows.retraining.examine import judge_versions
from ringmaster.model_lineage.records import CHAMPION
from ringmaster.model_lineage.snapshot import LineageNode
from ringmaster.tasks.alarms import Alarm
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.recording.ancestry import KINDS_OF_ADAPTERS, trained_at
from ringmaster.tasks.retraining import promotion
from ringmaster.tasks.retraining.policy import OF_POLICY, PLAIN_RULE, PromotionDecision, PromotionPolicy
from ringmaster.tasks.retraining.promotion import MoveLog
from ringmaster.techniques.checkpoints.storage import checkpoint_steps
from ringmaster.techniques.data import open_data, prepare, sampler_of
from ringmaster.techniques.data.arrow_files import Array, Table, open_split, values_of
from ringmaster.techniques.data.row_files import content_hash
from ringmaster.techniques.data.samples import Sampler
from ringmaster.techniques.data_source import PreparedData, data_source_of
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_features import FirstCheckpoint
from ringmaster.techniques.job_specs import DataSpec

PROBED_TOKENS = 256  # that must be equal after a gap


@dataclass(frozen=True, kw_only=True)
class UndoRequest:
    """What is to be undone: one of the three.

    row: the content hash of a row, its text, or FILE:LINE.
    dataset: NAME@VERSION, or a name, of a data set.
    base: a model's version.
    text_column: the column of a row's text.
    """

    row: str | None = None
    dataset: str | None = None
    base: str | None = None
    text_column: str = "text"

    @property
    def label(self) -> str:
        """A readable description of what is undone."""
        what, value = next((key, value) for key, value in self.given if value is not None)
        return f"{what} {value}"

    @property
    def given(self) -> tuple[tuple[str, str | None], ...]:
        """The ways to select what is undone."""
        return (("row", self.row), ("dataset", self.dataset), ("base", self.base))


@dataclass(frozen=True, kw_only=True)
class RetrainedModel:
    """A model that is trained again.

    job: the job that trains it. first_step: the step that it starts after. why: the reason, for users.
    """

    node: LineageNode
    job: Job
    first_step: int
    why: str


@dataclass(frozen=True, kw_only=True)
class UndoPlan:
    """What is trained again to undo something, parents first.

    removed: the models that are taken out of the line, which are not trained again.
    """

    label: str
    models: tuple[RetrainedModel, ...]
    removed: tuple[LineageNode, ...] = ()

    @property
    def num_steps(self) -> int:
        """The steps of all models together."""
        return sum(each.job.total_steps for each in self.models)

    @property
    def num_kept_steps(self) -> int:
        """The steps before the checkpoints that models go back to."""
        return sum(each.first_step for each in self.models)

    def sentences(self) -> Iterator[str]:
        """Yields what would be done, a line a model."""
        for node in self.removed:
            serving = node.carrying(CHAMPION)
            more = "" if serving is None else f"; {serving.label} serves until another version is promoted"
            yield f"{node.label}: taken out of the line{more}"
        for each in self.models:
            start = f"from step {each.first_step}" if each.first_step else "from its beginning"
            yield f"{each.node.label}: {start} of {each.job.total_steps}, as {each.why}"
        kept = self.num_kept_steps / self.num_steps if self.num_steps else 1.0
        yield f"{len(self.models)} models to train again; {kept:.0%} of their {self.num_steps:,} steps are kept"

    def batch(self, *, deadline_s: float | None) -> Batch:
        """Returns the batch that trains the models, each of them within `deadline_s` seconds where that is given."""
        jobs = tuple(each.job for each in self.models)
        return Batch(
            name=f"undo-{digest([self.label, to_json(jobs)], length=8)}",
            jobs=jobs,
            folder=Path.cwd(),
            text=json.dumps({"undo": self.label}),
            deadlines_s={} if deadline_s is None else {job.name: deadline_s for job in jobs},
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        models = [
            {"model": each.node.label, "job": each.job.name, "first_step": each.first_step, "why": each.why}
            | {"num_steps": each.job.total_steps}
            for each in self.models
        ]
        removed = [node.label for node in self.removed]
        return {"undo": self.label, "models": models, "removed": removed, "num_kept_steps": self.num_kept_steps}


def plan_undo(home: LineageHome, request: UndoRequest, *, folder: Path) -> UndoPlan:
    """Returns what undoes a request. folder: where data without a row is written.

    Raises InputError, with every reason, where nothing has read it, or models cannot be trained again without it.
    """
    if len([value for _, value in request.given if value is not None]) != 1:
        raise InputError(["one thing is undone at a time. To fix: give one of --row, --dataset and --base"])
    return _UndoPlanner(home, request, folder=folder).plan()


class _UndoPlanner:
    def __init__(self, home: LineageHome, request: UndoRequest, *, folder: Path) -> None:
        self._home, self._request, self._folder = home, request, folder
        self._snapshot = home.snapshot
        self._redone: dict[str, RetrainedModel] = {}  # by model id
        self._unchanged_steps: dict[str, int] = {}  # of each of them: those before anything is different
        self._faults: list[str] = []

    def plan(self) -> UndoPlan:
        readers, removed = (self._row_readers(), {}) if self._request.row is not None else ({}, self._removed())
        if not readers and not removed:
            raise InputError(
                [
                    f"no recorded model has read {self._request.label} in a data set with a name, and rows of other "
                    "data are not recorded. To fix: name what `ringmaster datasets trace` finds; give coming batches "
                    "data with a name"
                ]
            )
        affected = [*readers, *removed]
        wanted = {*affected, *self._snapshot.graph.descendants(*affected)} - set(removed)
        for id in (each for each in self._snapshot.graph.models if each in wanted):  # parents come first
            node = self._snapshot.nodes.get(id)
            if node is None:
                continue  # it was deleted
            try:
                self._redone[id] = self._retrained(node, hash_of_row=readers.get(id), removed=removed)
            except InputError as error:
                self._faults += error.faults
        raise_faults(self._faults)
        return UndoPlan(label=self._request.label, models=tuple(self._redone.values()), removed=tuple(removed.values()))

    def _row_readers(self) -> dict[str, str]:
        """Returns the content hash of the row by the ids of the models that were trained on it."""
        row = TracedRow.of(self._request.row or "")
        reads = reads_of(row, self._home, text_column=self._request.text_column)
        return {node.id: hash for node, dataset, hash in reads if dataset.context == "training"}

    def _removed(self) -> dict[str, LineageNode]:
        """Returns the models that are taken out: a version, or those that were trained on a data set."""
        if self._request.base is not None:
            node = self._home.find(self._request.base)
            return {node.id: node}
        name, _, version = (self._request.dataset or "").partition("@")
        nodes = [
            node
            for node in self._snapshot.trained_on(name)
            if not version or any(d.version == version and d.context == "training" for d in node.record.datasets)
        ]
        return {node.id: node for node in nodes}

    def _retrained(
        self, node: LineageNode, *, hash_of_row: str | None, removed: Mapping[str, LineageNode]
    ) -> RetrainedModel:
        training = RecordedTraining.of(self._home, node)
        job, parents = training.job, training.record.parents
        if job.adaptation is not None and (how := job.adaptation.composition) is not None:
            raise InputError(
                [
                    f"{node.label} is of the jobs {', '.join(how.jobs)}, which were trained as one with a common "
                    f"{how.component}, and are not trained again in part. To fix: change their data or bases in their "
                    "batch, and run it again"
                ]
            )
        changed = [self._home.find(uri) for uri in parents.values()]

        def parent_of(name: str) -> str:
            return self._parent(self._home.find(parents[name]), removed) if name in parents else name

        own, start = job.started_from, self._start(training, removed)
        is_new_below = any(parent.id in self._redone or parent.id in removed for parent in changed)
        is_new_below |= own is not None and start is None
        job = job.renamed(node.repeating_job, parent_of).with_start(None)
        sources = [name for name in parents if name not in training.job.parents]  # folders and names on the hub
        for source in (name for name in sources if self._home.find(parents[name]).id in removed):
            if job.base is not None or source != job.model.from_pretrained:
                raise InputError([f"{node.label} reads both {source} and its base, and cannot be made without it"])
            job = replace(job, base=parent_of(source))
        step = 0 if start is None else start.step  # earlier ones are those of the training that it continues from
        if hash_of_row is None:
            why = "it came from what is undone"
        else:
            read = training.job.data  # a store that a job has made, in the version that this one has read
            if (store := read.store or "") in parents:
                read = read.reading(store=str(self._home.model_dir(self._home.find(parents[store]))))
            prepared = prepare(read, cache_dir=self._home.folder / "cache")
            if training.chain is not None and prepared.digest != training.chain.data:
                raise InputError(
                    [f"{node.label}: its data has changed since, so that it is not known when it was read"]
                )
            data, without = self._data_without(read, hash_of_row, prepared)
            samples, _ = open_data(read, cache_dir=self._home.folder / "cache", prepared=prepared)
            step = _first_step_with(job, sampler_of(job, samples), prepared, without, first=step)
            start = start if is_new_below else _checkpoint_before(training, step) or start
            data = data.reading(store=job.data.store) if store in parents else data
            job = replace(job, data=data)
            why = f"step {step + 1} was the first to read it" if step < job.total_steps else "no step read it"
        self._unchanged_steps[node.id] = 0 if is_new_below else step
        first_step = 0 if start is None else start.step
        job = job if start is None else job.with_start(start)
        if is_new_below and hash_of_row is not None:
            why += ", and what it came from is trained again"
        elif first_step < step:
            why += f", and no checkpoint between step {first_step} and {min(step, job.total_steps - 1)} is kept"
        return RetrainedModel(node=node, job=job, first_step=first_step, why=why)

    def _parent(self, node: LineageNode, removed: Mapping[str, LineageNode]) -> str:
        """Returns what a job names for a parent: a job that trains it again, a version, or what it came from."""
        if node.id in self._redone:
            return self._redone[node.id].job.name
        if node.id not in removed:
            return f"models:/{node.label}"
        above, first = self._snapshot.existing(node.record.parents), node.record.weights_from
        nearer = [each for each in above if first in each.record.parents]  # the adapter that an adapter has continued
        is_adapter = node.record.kind in KINDS_OF_ADAPTERS.values()
        base = nearer[0] if nearer and is_adapter else self._snapshot.nodes.get(first or "")
        if base is None:
            raise InputError([f"{node.label} came from nothing, so that nothing is left to start from without it"])
        return self._parent(base, removed)

    def _start(self, training: RecordedTraining, removed: Mapping[str, LineageNode]) -> FirstCheckpoint | None:
        """Returns the checkpoint of another training from which a job continues now; None for its own beginning."""
        node, job, parents = training.node, training.job, training.record.parents
        start = job.started_from
        if start is None:
            return None
        if start.checkpoints in parents:  # a part of a training, of which each continues from another
            before = self._home.find(parents[start.checkpoints])
            if before.id in removed:
                return self._start(RecordedTraining.of(self._home, before), removed)
            place = self._redone[before.id].job.name if before.id in self._redone else before.record.origin.checkpoints
            return replace(start, checkpoints=place) if place else None
        known = {name: self._home.find(uri).id for name, uri in parents.items()}
        base = known.get(job.base or job.model.from_pretrained or "")
        sources = [*trained_at(start.checkpoints, self._snapshot.models), *self._snapshot.existing(node.record.parents)]
        above = {each.id for each in sources if each is not node} - {*known.values()}
        is_changed = base in self._redone or base in removed or not above.isdisjoint(removed)
        return (
            None if is_changed or any(self._unchanged_steps.get(id, start.step) < start.step for id in above) else start
        )

    def _data_without(self, data: DataSpec, hash_of_row: str, prepared: PreparedData) -> tuple[DataSpec, PreparedData]:
        """Returns data without a row, in files of its own, and what is prepared of it."""
        rows = data_source_of(data).rows(data)
        if rows is None:
            raise InputError([f"{prepared.name} has no rows of files that a row could be taken out of"])
        folder = self._folder / digest([to_json(data), hash_of_row])
        files = {False: folder / "training.jsonl", True: folder / "held_out.jsonl"}
        kept: dict[bool, list[Any]] = {False: [], True: []}
        for row in rows:
            if not isinstance(row.value, Mapping):
                raise InputError([f"{row.file} is one text, not rows. To fix: take the text out of the file yourself"])
            if content_hash(row.content) != hash_of_row:
                kept[row.held_out].append(row.value)
        folder.mkdir(parents=True, exist_ok=True)
        with input_errors(TypeError, about=f"{prepared.name} has values that JSON cannot hold: "):
            for held_out, file in files.items():
                file.write_text("".join(json.dumps(value) + "\n" for value in kept[held_out]), encoding="utf-8")
        tokenizer = data.tokenizer
        if tokenizer is None and prepared.tokenizer_dir is not None:
            tokenizer = str(shutil.copytree(prepared.tokenizer_dir, folder / "tokenizer", dirs_exist_ok=True))
        version = None if data.version is None else f"{data.version}-without-{hash_of_row[:8]}"
        path, held_out_path = str(files[False]), str(files[True]) if kept[True] else None
        original = data.original_path or data.path
        result = replace(
            replace(data, path=path, held_out_path=held_out_path, window=None, format=None),
            original_path=original,
            original_held_out_path=data.original_held_out_path or data.held_out_path or original,
            tokenizer=tokenizer,
            version=version,
        )
        with input_errors():
            return result, prepare(result, cache_dir=self._home.folder / "cache")


def _first_step_with(job: Job, sampler: Sampler, prepared: PreparedData, without: PreparedData, *, first: int) -> int:
    """Returns the first step (0-based), from step `first` on, of a job that read a sample which the row is in."""
    gone = samples_with_gaps(*(open_split(Path(each.folder), "training") for each in (prepared, without)))
    steps = (
        step for step in range(first, job.total_steps) if not gone.isdisjoint(sampler.at(job.samples(step)).tolist())
    )
    return next(steps, job.total_steps)


def samples_with_gaps(old: Table, new: Table) -> set[int]:
    """Returns the numbers of the samples with content that was removed from `new`.

    A text that is cut into samples of equal length is compared as one sequence of tokens, as everything after a gap has
    moved; other samples one by one.
    """
    tokens = [values_of(table["input_ids"]) for table in (old, new) if table.column_names == ["input_ids"]]
    if len(tokens) == 2 and all(lengths is None and values.ndim == 2 for values, lengths in tokens):
        size = tokens[0][0].shape[1]
        gaps = gaps_between(tokens[0][0].ravel(), tokens[1][0].ravel())
        return {sample for first, end in gaps for sample in range(first // size, (end - 1) // size + 1)}
    left, gone = Counter(map(repr, new.to_pylist())), set()
    for index, sample in enumerate(map(repr, old.to_pylist())):
        if left[sample] > 0:
            left[sample] -= 1
        else:
            gone.add(index)
    return gone


def gaps_between(old: Array, new: Array) -> list[tuple[int, int]]:
    """Returns the runs (first, end) of a sequence that were taken out of it to make `new`, and perhaps more.

    Where several runs would explain the difference, as their neighbors are equal, their union is returned. The
    end of `old` may be missing in `new`, as the last tokens that fill no sample are left out; so a run of which less
    than `PROBED_TOKENS` follow reaches to the end.
    """
    result: list[tuple[int, int]] = []
    i = j = 0
    while num := min(len(old) - i, len(new) - j):
        different = np.flatnonzero(old[i : i + num] != new[j : j + num])
        if not different.size:
            break
        i, j = i + int(different[0]), j + int(different[0])
        lengths = range(1, len(old) - i - PROBED_TOKENS)
        length = next((each for each in lengths if _is_continued(old[i + each :], new[j:])), None)
        if length is None:
            last = range(1, min(len(old) - i, PROBED_TOKENS) + 1)
            return [*result, (min(_widened(old, i, each)[0] for each in last), len(old))]
        result.append(_widened(old, i, length))
        i += length
    if not result and len(old) > len(new):
        result.append(_widened(old, len(new), len(old) - len(new)))
    return result


def _widened(old: Array, first: int, length: int) -> tuple[int, int]:
    """Returns a run (first, end) together with those before it that leave the same sequence when they are taken out."""
    end = first + length
    while first > 0 and old[first - 1] == old[first - 1 + length]:
        first -= 1
    return first, end


def _is_continued(old: Array, new: Array) -> bool:
    num = min(PROBED_TOKENS, len(new))
    return bool((old[:num] == new[:num]).all())


def _checkpoint_before(training: RecordedTraining, step: int) -> FirstCheckpoint | None:
    """Returns the newest checkpoint of a model's training before a step (0-based) took place; None if none is left."""
    root = training.node.record.origin.checkpoints
    kept = [each for each in checkpoint_steps(root) if 0 < each <= step and each < training.job.total_steps]
    return FirstCheckpoint(checkpoints=root, step=max(kept)) if root is not None and kept else None


@dataclass(frozen=True, kw_only=True)
class ReplacingVersion:
    """A new version of the name under which the version that it replaces serves, or is registered."""

    label: str
    model: RetrainedModel
    replaced: LineageNode

    def sentence(self, decision: PromotionDecision) -> str:
        """Returns what became of it."""
        served = "serves" if decision.promote else "is not promoted"
        return f"{self.label}, made in place of {self.replaced.label}, {served}: {decision.why}"


def register(home: LineageHome, plan: UndoPlan, uris: Mapping[str, str]) -> list[ReplacingVersion]:
    """Registers the models of a finished batch as the next versions of those that they replace.

    uris: of the models, by job.
    """
    result = []
    for node in plan.removed:
        home.ledger.mark_undone(node.record, plan.label)
    for each in plan.models:
        if (uri := uris.get(each.job.name)) is None:
            continue
        replaced = each.node.carrying(CHAMPION) or each.node
        text = f"Trained again without {plan.label}, in place of version {replaced.record.version}."
        record = home.ledger.resolve_model(uri)
        added = home.ledger.add_version(record, replaced.record.registered_name, text=text)
        home.ledger.mark_undone(each.node.record, plan.label)
        label = f"{added.registered_name}/{added.version}"
        result.append(ReplacingVersion(label=label, model=each, replaced=replaced))
    return result


def promote(
    home: LineageHome,
    version: ReplacingVersion,
    *,
    policy: PromotionPolicy | None,
    log: MoveLog,
    notice: Callable[[str], None],
    emit_alarm: Callable[[Alarm], None],
) -> PromotionDecision:
    """Promotes a version if the one that it replaces serves and the policy agrees; returns the decision.

    home: one that knows the new version.
    policy: None for the plain rule of retraining. What a policy has promoted is then left to that policy.
    """
    replaced, ledger = version.replaced, home.ledger
    made = promotion.read_decisions(ledger, replaced.record)
    if CHAMPION not in replaced.aliases:
        return PromotionDecision(promote=False, why=f"{replaced.label} does not serve")
    if policy is None and made and made[-1].who.startswith(OF_POLICY):
        return PromotionDecision(promote=False, why=f"the {made[-1].who} decides. To fix: name its file by --policy")
    rule, who = policy or PLAIN_RULE, PLAIN_RULE.name if policy is None else OF_POLICY + policy.name
    job, champion = version.model.job, replaced.record.version
    rule = replace(rule, metric=rule.metric or job.evaluation.metrics[0])
    try:
        node = home.find(version.label)
        with closing(
            judge_versions(home, [node], rule, data=job.data, against=replaced.label, notice=notice)
        ) as decisions:
            decision = next(decisions)
        if decision.promote and rule.approval_s is not None:
            decision = replace(decision, promote=False, why=f"it waits for approval: {decision.why}")
            promotion.leave_waiting(ledger, node.record, decision.why, who=who)
        else:
            promotion.apply(ledger, node.record, decision, log=log, champion=champion, who=who, emit_alarm=emit_alarm)
    except (InputError, PromotionRefused) as error:
        return PromotionDecision(promote=False, why=str(error))
    return decision
