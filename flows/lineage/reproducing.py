"""Reproduction of a recorded model: its training is repeated, and every state and tensor compared with the record.

A model is trained again from its lineage: its job, its rows, its parents and the layouts that trained it, along the
chain of its states (`checkpoints.chain`). The bits are the same where the same libraries run on the same kind of device
with the same number of threads. Where they are not, the first link that differs, its tensors, the first step whose loss
differs, and what is different about the repeated training are named.

An audit repeats only some links, drawn at random, each from the checkpoint at which the link before it was made.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.errors import InputError, LedgerError
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.flows.pool.own_node import lent, lent_here, own_node
from ringmaster.flows.services.first_processes import fork_server_for
from ringmaster.model_lineage.snapshot import LineageNode
from ringmaster.model_lineage.tensors.comparison import SAME, tensor_changes, tensors_of_folder
from ringmaster.tasks.cluster import Device, detect
from ringmaster.tasks.datasets.recording import ROWS, manifest_of
from ringmaster.tasks.execution.engine import leases_of
from ringmaster.tasks.profiling.preflight import TrialEnvironment, gang_shape, preflight_jobs, slots_of
from ringmaster.tasks.profiling.trials import DevicesWanted
from ringmaster.tasks.recording.mlflow_writer import CHAIN, TRAINING, TrainingInputs
from ringmaster.tasks.recording.rows import code_version
from ringmaster.techniques import Job, registry
from ringmaster.techniques.checkpoints.chain import (
    StateChain,
    StateLink,
    TrainingEnvironment,
    cpu_name,
    read_chain,
    tensor_digests,
    versions,
)
from ringmaster.techniques.checkpoints.checkpoint import copy_checkpoint, folder_of
from ringmaster.techniques.checkpoints.storage import place_of
from ringmaster.techniques.data.manifest import RowManifest
from ringmaster.techniques.preflight import Preflight
from ringmaster.techniques.processes.events import Event, OutcomeStatus, Steps
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.order import TRAIN, GangOrder, Slot

CERTIFICATE = "training/reproduced.json"
"""The artifact of a model's run with the report of its newest whole reproduction that was equal."""
MOST_NAMED = 8  # rows, fields or tensors in one sentence
Notice = Callable[[str], None]
"""Receives a line of progress for a person."""


@dataclass(frozen=True, kw_only=True)
class RecordedTraining:
    """What the lineage knows of how a model was trained.

    chain: the chain of its states; None for a model that was made without steps.
    """

    node: LineageNode
    record: TrainingInputs
    chain: StateChain | None

    @classmethod
    def of(cls, home: LineageHome, node: LineageNode) -> RecordedTraining:
        """Returns the record of a model. Raises InputError where it cannot be made again from it."""
        run_id, label = node.record.run_id, node.label
        if run_id is None:
            raise InputError([f"{label} was not trained here. To fix: name a model that a batch has made"])
        try:
            record = from_json(TrainingInputs, json.loads(home.ledger.read_text(run_id, TRAINING)))
        except LedgerError as error:
            raise InputError([f"{label} was recorded without its job, by an earlier release: {error}"]) from error
        if record.job.model.command is not None:
            raise InputError([f"{label} was trained by a command of its own, which alone knows what its steps do"])
        if not record.job.trains:
            return cls(node=node, record=record, chain=None)
        try:
            chain = StateChain.parse(home.ledger.read_text(run_id, CHAIN))
        except LedgerError as error:
            raise InputError([f"{label} was recorded without the chain of its states: {error}"]) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(
                [f"the chain of the states of {label} was changed after it was recorded: {error}"]
            ) from error
        return cls(node=node, record=record, chain=chain)

    @property
    def job(self) -> Job:
        """The job as its states were trained, whatever its record says now."""
        return self.record.job if self.chain is None else from_json(Job, self.chain.job)

    @property
    def links(self) -> tuple[StateLink, ...]:
        """The links of its chain."""
        return () if self.chain is None else self.chain.links


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
                f"first difference: {where}, in {_listed(self.first.tensors)} of the state after step {link.step}"
            )
        if self.files:
            result.append(f"different in the model's files: {_listed(self.files)}")
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


class Reproduction:
    """The repeated training of one model, in a folder of its own.

    training: the record.
    folder: where everything is written: the data, checkpoints, models.
    technique: the technique to train under, on one device; None for the layouts that trained the model.
    """

    def __init__(
        self, home: LineageHome, training: RecordedTraining, *, folder: Path, technique: str | None, notice: Notice
    ) -> None:
        self.home, self.training, self._folder, self._notice = home, training, folder, notice
        self._technique, self._job = technique, training.job
        self._devices: tuple[Device, ...] = ()
        self._environment: TrialEnvironment | None = None
        self._losses: dict[int, float] = {}
        self._preflight: Preflight | None = None
        self._weights: dict[str, Path] = {}

    # -- before anything trains ----------------------------------------------------------------------------------------

    def missing_parents(self) -> list[LineageNode]:
        """Returns the parents whose files are nowhere to be found, which must be made again first."""
        result = []
        for name, uri in self.training.record.parents.items():
            if name in self._weights or not self._is_parent(name):
                continue
            node = self.home.find(uri)
            try:
                self._weights[name] = self.home.model_dir(node)
            except ValueError:  # InputError, TensorStoreError
                result.append(node)
        return result

    def take_parent(self, node: LineageNode, folder: Path) -> None:
        """Takes a parent's files from the folder where it was made again."""
        for name, uri in self.training.record.parents.items():
            if self.home.find(uri).id == node.id:
                self._weights[name] = folder

    def inspect(self) -> list[str]:
        """Prepares the data; returns what differs between the recorded training and one that starts here now.

        Raises InputError, with every reason, where the model cannot be made again.
        """
        job, training = self._job, self.training
        assert self._environment is not None
        cluster = replace(detect(), nodes=(replace(detect().nodes[0], devices=self._devices),))
        shapes = [replace(gang_shape(self._devices), num_devices=1)]
        own = job if self._technique is None else replace(job, techniques=(self._technique,), num_devices=None)
        preflights, faults = preflight_jobs(
            [own], environment=self._environment, cluster=cluster, notice=self._notice, shapes=shapes
        )
        if job.name in faults:
            raise InputError([f"{training.node.label} cannot be made again: {faults[job.name]}"])
        self._preflight = preflights[job.name]
        return [*self._changes_of_code(), *self._changes_of_data(), *self._changes_of_environment()]

    def contradictions(self) -> list[str]:
        """Returns where the record contradicts the chain of the model's states."""
        trained, recorded = to_json(self._job), to_json(self.training.record.job)
        fields = sorted(_differing(trained, recorded))
        values = ", ".join(f"{name} is {_at(recorded, name)!r} and was {_at(trained, name)!r}" for name in fields)
        return [f"the recorded job was changed after the training: {values}"] if fields else []

    def _changes_of_code(self) -> Iterator[str]:
        then, now = self.training.record.code_version, code_version(Path(self.training.record.folder))
        if then != now:
            yield f"the code was {then} and is {now}"

    def _changes_of_data(self) -> Iterator[str]:
        chain, prepared = self.training.chain, self._prepared()
        if chain is None or chain.data == prepared["digest"]:
            return
        now, run_id = manifest_of(prepared), self.training.node.record.run_id
        assert run_id is not None
        try:
            then = RowManifest.from_json(json.loads(self.home.ledger.read_text(run_id, ROWS)))
        except LedgerError:
            then = None
        rows = "" if now is None or then is None else _changed_rows(then, now)
        yield f"the data has changed: its samples were {chain.data} and are {prepared['digest']}{rows}"

    def _changes_of_environment(self) -> Iterator[str]:
        """Yields what differs between the libraries, devices and threads of then and now."""
        now = versions()
        for environment in _distinct(link.environment for link in self.training.links):
            for name in sorted({*environment.versions, *now}):
                then = environment.versions.get(name, "not installed")
                if then != (here := now.get(name, "not installed")):
                    yield f"{name} was {then} and is {here}"
            if environment.device != (here := self.device_name()):
                yield f"the device was {environment.device} and is {here}: another kind of device rounds differently"
            cores = {core for each in detect().devices for core in each.cores}
            if self._devices[0].kind == "cpu" and environment.num_threads > len(cores):
                yield f"each rank had {environment.num_threads} threads, and this machine has {len(cores)} cores"

    def device_name(self) -> str:
        """Returns the kind of device that trains here, as links of chains name it."""
        device = self._devices[0]
        return cpu_name() if device.kind == "cpu" else device.name

    def intention(self, links: Sequence[StateLink]) -> str:
        """Returns what would be trained again, as a sentence."""
        steps = sum(link.step - link.first_step for link in links)
        layouts = [f"{each.technique.rpartition(':')[2]} on {each.num_devices}" for each in self._layouts()]
        states = f"{len(links)} of its {len(self.training.links)} recorded states can be compared"
        how = ", then ".join(layouts) or "no steps"
        return f"{self.training.node.label}: {steps:,} steps would be trained again ({how}), and {states}"

    # -- training ------------------------------------------------------------------------------------------------------

    @contextmanager
    def devices(self) -> Iterator[None]:
        """Within the context, the devices that are needed are leased."""
        needed = self._num_devices
        with ExitStack() as stack:
            node = stack.enter_context(own_node())
            cluster = detect() if node is None else node.cluster
            there = len(cluster.nodes[0].devices)
            if needed > there and cluster.nodes[0].devices[0].kind != "cpu":
                raise InputError([f"{self.training.node.label} was trained on {needed} devices, and here are {there}"])
            wanted = DevicesWanted(least=min(needed, there), most=needed, presses=True)
            here = lent_here(leases_of(self.home.folder, cluster), cluster, "reproduction", self._notice, wanted)
            self._devices = stack.enter_context(
                here if node is None else lent(node.requests, node.record, whose="reproduction", wanted=wanted)
            )
            record = self.training.record
            self._environment = TrialEnvironment(
                server=stack.enter_context(fork_server_for([self._job])),
                devices=self._devices,
                cache_dir=self._folder / "cache",
                import_paths=(record.folder,),
                weights=self._parents_by_key(),
            )
            yield

    def repeat(self) -> list[RepeatedLink]:
        """Trains the job again from its beginning, and compares the state at each link with the record."""
        root, result = self._folder / "checkpoints", []
        for link in self.training.links:
            result.append(self._repeated(link, root))
            if result[-1].tensors:
                break
        if not self.training.links:
            self._train(self._layout_here(), last_step=0, root=root)
        return result

    def audit(self, links: Sequence[StateLink]) -> list[RepeatedLink]:
        """Trains the steps of some links again, each from the checkpoint before it, and compares their states."""
        checkpoints, result = self.training.node.record.origin.checkpoints, []
        known = {link.step: link for link in self.training.links}
        for link in links:
            root = self._folder / f"audit-{link.first_step}"
            if (before := known.get(link.first_step)) is not None:
                assert checkpoints is not None
                copy_checkpoint(checkpoints, before.step, to=root)
                if changed := _changed(before.tensors, tensor_digests(root, before.step)):
                    result.append(RepeatedLink(link=before, tensors=changed))
                    continue
            result.append(self._repeated(link, root))
        return result

    def auditable(self) -> tuple[StateLink, ...]:
        """Returns the links that can be repeated alone: those whose checkpoint before them is still there."""
        root = self.training.node.record.origin.checkpoints
        names = set() if root is None else set(place_of(root).names())
        return tuple(link for link in self.training.links if not link.first_step or folder_of(link.first_step) in names)

    def first_different_loss(self) -> int | None:
        """Returns the first step whose loss differs from the recorded one; None where none does."""
        run_id = self.training.node.record.run_id
        assert run_id is not None
        known = self.home.ledger.metric_history(run_id, "train/loss")
        return next(
            (step for step in sorted(self._losses) if known.get(step, self._losses[step]) != self._losses[step]), None
        )

    @property
    def model_folder(self) -> Path:
        """The folder of the model that the repeated training makes."""
        return self._folder / "model"

    def changed_files(self) -> list[str]:
        """Returns the tensors of the recorded model's files that differ from those of the repeated training.

        Files that are lost are not compared, with a notice.
        """
        node = self.training.node
        try:
            recorded = tensors_of_folder(self.home.model_dir(node))
        except ValueError as error:  # InputError, LedgerError and TensorStoreError are among them
            if isinstance(error, LedgerError) and error.may_pass:
                raise
            self._notice(f"the files of {node.label} are not compared: {error}")
            return []
        return [
            each.name for each in tensor_changes(recorded, tensors_of_folder(self.model_folder)) if each.what != SAME
        ]

    def _repeated(self, link: StateLink, root: Path) -> RepeatedLink:
        self._notice(f"{self.training.node.label}: steps {link.first_step + 1} to {link.step}")
        layout = link.environment if self._technique is None else self._layout_here()
        self._train(layout, last_step=link.step, root=root)
        chain = read_chain(root)
        assert chain is not None and chain.links[-1].step == link.step
        return RepeatedLink(link=link, tensors=_changed(link.tensors, chain.links[-1].tensors))

    def _train(self, layout: TrainingEnvironment, *, last_step: int, root: Path) -> None:
        """Runs one gang up to `last_step`. Raises InputError where it fails."""
        assert self._environment is not None
        shape = replace(gang_shape(self._devices), num_devices=layout.num_devices)
        num_ranks = registry.load(layout.technique).num_ranks(shape)
        parents = {name: str(path) for name, path in self._weights.items()}
        job = self._job
        base = None if job.base is None else parents.get(job.base)
        order = GangOrder(
            purpose=TRAIN,
            job=job,
            technique=layout.technique,
            config=layout.config,
            slots=self._slots(layout, num_ranks=num_ranks),
            folder=str(self._folder / "gangs" / f"{last_step:08d}"),
            cache_dir=str(self._environment.cache_dir),
            data=self._prepared(),
            checkpoint_dir=str(root),
            model_dir=str(self.model_folder),
            weights_from=base,
            parents=parents if job.adaptation is not None else {},
            last_step=last_step,
            import_paths=self._environment.import_paths,
            ordered_at_s=time.monotonic(),
        )
        outcome = Gang(self._environment.server, order, num_ranks=num_ranks).wait(self._hear)
        if outcome.status not in (OutcomeStatus.DONE, OutcomeStatus.PREEMPTED):
            raise InputError([f"{self.training.node.label} could not be trained again: {outcome.message}"])

    def _hear(self, event: Event) -> None:
        if isinstance(event, Steps):
            self._losses |= dict(enumerate(event.losses, start=event.first_step + 1))

    @property
    def _num_devices(self) -> int:
        """The number of devices that are needed."""
        if self._technique is not None:
            return 1
        return max((link.environment.num_devices for link in self.training.links), default=1)

    def _is_parent(self, name: str) -> bool:
        return name in self._job.parents

    def _parents_by_key(self) -> dict[str, Path]:
        """Returns the folders of the parents by the keys of `TrialEnvironment.weights`."""
        base = self._job.base
        return {self._job.name if name == base else name: folder for name, folder in self._weights.items()}

    def _prepared(self) -> Mapping[str, Any]:
        assert self._preflight is not None
        return self._preflight.data

    def _layouts(self) -> list[TrainingEnvironment]:
        """Returns the layouts under which the model is trained again, in order."""
        if self._technique is not None or not self.training.links:
            return [self._layout_here()]
        return _distinct(link.environment for link in self.training.links)

    def _layout_here(self) -> TrainingEnvironment:
        """Returns the first layout that the preflight found for one device."""
        assert self._preflight is not None
        if not self._preflight.candidates:
            reasons = [each.reason for each in self._preflight.refusals]
            raise InputError([f"{self.training.node.label} cannot be trained here: {(reasons or ['no option'])[0]}"])
        first = self._preflight.candidates[0]
        return TrainingEnvironment(
            technique=registry.dotted_path(first.technique),
            config=first.config,
            num_devices=first.num_devices,
            device=self.device_name(),
            num_threads=len(self._devices[0].cores) or 1,
            versions=versions(),
        )

    def _slots(self, layout: TrainingEnvironment, *, num_ranks: int) -> tuple[Slot, ...]:
        """Returns the slots of a layout: on CPUs, with as many cores in all as its ranks had threads."""
        slots = slots_of(self._devices)
        if slots[0].kind != "cpu":
            return slots[: layout.num_devices]
        cores = sorted({core for slot in slots for core in slot.cores})
        size = -(-layout.num_threads * num_ranks // layout.num_devices)  # of each slot
        shares = [range(first, first + size) for first in range(0, size * layout.num_devices, size)]
        return tuple(
            replace(slots[0], index=index, cores=tuple(cores[k % len(cores)] for k in share))
            for index, share in enumerate(shares)
        )


@dataclass(frozen=True, kw_only=True)
class ReproductionOptions:
    """What a person asks for.

    folder: where the model is made again.
    technique: to train under on one device; None for the layouts that trained the model.
    share: the share of the links to repeat, drawn at random; 1 for all.
    seed: of the draw.
    is_dry_run: whether only to say what would be done, and what is known to differ.
    """

    folder: Path
    technique: str | None = None
    share: float = 1.0
    seed: int = 0
    is_dry_run: bool = False


def reproduce(
    home: LineageHome, node: LineageNode, options: ReproductionOptions, *, notice: Notice
) -> ReproductionReport | None:
    """Makes a model again, after those of its ancestors whose files are lost; returns the comparison.

    Returns None for a dry run. Raises InputError, with every reason, where it cannot be made again.
    """
    training = RecordedTraining.of(home, node)
    if options.technique is not None and not training.job.is_exact:
        raise InputError(
            [
                f"{node.label} was not trained with exact: true, so that other layouts than its own give other bits. "
                "To fix: leave out --as"
            ]
        )
    own = options.folder / node.id
    shutil.rmtree(own, ignore_errors=True)  # checkpoints of an earlier try would be continued
    work = Reproduction(home, training, folder=own, technique=options.technique, notice=notice)
    for parent in work.missing_parents():
        notice(f"{parent.label}, from which it came, is nowhere to be found, and is made again first")
        made = reproduce(home, parent, replace(options, share=1.0), notice=notice)
        if made is not None and made.folder is not None:
            if not made.is_equal:
                raise InputError(made.sentences())
            work.take_parent(parent, made.folder)
    with work.devices():
        causes = [*work.contradictions(), *work.inspect()]
        for cause in causes:
            notice(cause)
        links = work.auditable() if options.share < 1 else training.links
        if options.is_dry_run:
            notice(work.intention(links))
            return None
        if options.share < 1:
            return _audited(work, links, options, causes)
        return _repeated(work, causes)


def _repeated(work: Reproduction, causes: Sequence[str]) -> ReproductionReport:
    training, repeated = work.training, work.repeat()
    is_whole = not (repeated and repeated[-1].tensors)
    files = work.changed_files() if is_whole else []
    causes = list(causes)
    if files and training.links and is_whole:
        causes.append("the model's files were changed after its training: all of its states are equal")
    report = _report(work, repeated, files=files, causes=causes, folder=work.model_folder if is_whole else None)
    if report.is_equal:
        _certify(work, report)
    return report


def _certify(work: Reproduction, report: ReproductionReport) -> None:
    """Stores the report of a whole and equal reproduction as the model's certificate."""
    training, chain = work.training, work.training.chain
    at = datetime.now(UTC).isoformat(timespec="seconds")
    certificate = {
        **report.to_json(),
        "folder": None,
        "chain": None if chain is None else chain.head,
        "at": at,
        "device": work.device_name(),
        "versions": dict(versions()),
    }
    work.home.ledger.certify(training.node.record, certificate, path=CERTIFICATE, day=at.partition("T")[0])


def _audited(
    work: Reproduction, links: Sequence[StateLink], options: ReproductionOptions, causes: Sequence[str]
) -> ReproductionReport:
    if not links:
        raise InputError(
            [f"{work.training.node.label} has no checkpoints left to start from. To fix: leave out --share"]
        )
    number = max(1, round(options.share * len(links)))
    drawn = random.Random(options.seed).sample(list(links), min(number, len(links)))
    repeated = work.audit(sorted(drawn, key=lambda link: link.step))
    return _report(work, repeated, files=(), causes=causes, folder=None)


def _report(
    work: Reproduction,
    repeated: Sequence[RepeatedLink],
    *,
    files: Sequence[str],
    causes: Sequence[str],
    folder: Path | None,
) -> ReproductionReport:
    training = work.training
    is_equal = not (files or work.contradictions() or any(each.tensors for each in repeated))
    causes = list(causes)
    if not is_equal and not causes:
        causes.append(
            "data, job, libraries, devices and threads are those of the record: the steps above were not trained as "
            "recorded (a step was left out, or memory, a checkpoint or the record was changed)"
        )
    return ReproductionReport(
        model=training.node.label,
        is_equal=is_equal,
        links=tuple(repeated),
        num_links=len(training.links),
        steps=sum(each.link.step - each.link.first_step for each in repeated),
        num_steps=training.job.total_steps,
        first_step=None if is_equal else work.first_different_loss(),
        files=tuple(files),
        causes=() if is_equal else tuple(causes),
        folder=folder,
    )


def _changed(recorded: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the tensors whose digests differ."""
    return tuple(sorted(name for name in {*recorded, *now} if recorded.get(name) != now.get(name)))


def _distinct(environments: Iterable[TrainingEnvironment]) -> list[TrainingEnvironment]:
    result: list[TrainingEnvironment] = []
    for environment in environments:
        if environment not in result:
            result.append(environment)
    return result


def _changed_rows(then: RowManifest, now: RowManifest) -> str:
    """Returns which rows were removed and which are new, by their content hashes."""
    parts = []
    for split in then.rows:
        gone = sorted(set(then.rows[split]) - set(now.rows.get(split, ())))
        new = sorted(set(now.rows.get(split, ())) - set(then.rows[split]))
        for what, hashes in (("gone", gone), ("new", new)):
            if hashes:
                parts.append(f"{len(hashes)} rows of {split} {what} ({_listed([each[:12] for each in hashes])})")
    return f"; {'; '.join(parts)}" if parts else ""


def _differing(one: Any, other: Any, prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of the fields in which two JSON values differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {*one, *other}:
            yield from _differing(one.get(key), other.get(key), f"{prefix}.{key}" if prefix else key)
    elif one != other:
        yield prefix


def _at(value: Any, name: str) -> Any:
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
