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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.codec import digest, from_json, to_json
from ringmaster.errors import CheckpointError, InputError, LedgerError, input_errors
from ringmaster.features.reproduction.reproduction_report import RepeatedLink, ReproductionReport
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.flows.lineage.recorded_training import RecordedTraining
from ringmaster.flows.pool.own_node import own_devices
from ringmaster.flows.services.first_processes import fork_server_for
from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.ledger.runs import flat_params
from ringmaster.model_lineage.snapshot import LineageNode
from ringmaster.model_lineage.tensors.comparison import SAME, tensor_changes, tensors_of_folder
from ringmaster.tasks.cluster import detect
from ringmaster.tasks.profiling.preflight_runs import GangEnvironment, gang_shape, preflight_jobs, slots_of
from ringmaster.tasks.profiling.trials import DevicesWanted
from ringmaster.tasks.recording.rows import ROWS, code_version, manifest_of
from ringmaster.techniques import Job, registry
from ringmaster.techniques.checkpoints.chain import StateLink, read_chain, tensor_digests
from ringmaster.techniques.checkpoints.checkpoint import copy_checkpoint
from ringmaster.techniques.checkpoints.environment import TrainingEnvironment, cpu_name, versions
from ringmaster.techniques.checkpoints.storage import checkpoint_steps
from ringmaster.techniques.data.encoded_rows import RowManifest
from ringmaster.techniques.preflight_result import Preflight
from ringmaster.techniques.processes.gang import Gang
from ringmaster.techniques.processes.gang_events import Event, OutcomeStatus, Steps
from ringmaster.techniques.processes.order import TRAIN, GangOrder, Slot
from ringmaster.text import Notice, enumerated

CERTIFICATE = "training/reproduced.json"
"""The artifact of a model's run with the report of its newest whole reproduction that was equal."""
PAGE_LINE = "- made again, bit by bit: "
"""The beginning of the line on a model's page that names this artifact."""


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
        self._losses: dict[int, float] = {}
        self._weights: dict[str, Path] = {}  # of the parents, by the names that the job gives them

    # -- before anything trains ----------------------------------------------------------------------------------------

    def find_parents(self, make: Callable[[LineageNode], Path | None]) -> None:
        """Finds the files of the parents. make: makes a parent again whose files are nowhere to be found.

        The job then reads a folder that is lost (`from_pretrained`) where the lineage has it now.
        """
        for name, uri in self.training.record.parents.items():
            is_lost = Path(name).is_absolute() and not Path(name).is_dir()
            if name not in self._job.parents and not is_lost:
                continue
            node = self.home.find(uri)
            try:
                folder: Path | None = self.home.model_dir(node)
            except ValueError:  # InputError, TensorStoreError
                self._notice(f"{node.label}, from which it came, is nowhere to be found, and is made again first")
                folder = make(node)
            if folder is not None and name in self._job.parents:
                self._weights[name] = folder
            elif folder is not None:
                text = json.dumps(to_json(self._job)).replace(json.dumps(name), json.dumps(str(folder)))
                self._job = from_json(Job, json.loads(text))

    def inspect(self) -> list[str]:
        """Prepares the data; returns what differs between the recorded training and one that starts here now.

        Raises InputError, with every reason, where the model cannot be made again.
        """
        job, training, devices = self._job, self.training, self._environment.devices
        cluster = replace(detect(), nodes=(replace(detect().nodes[0], devices=devices),))
        shapes = [replace(gang_shape(devices), num_devices=1)]
        own = job if self._technique is None else replace(job, techniques=(self._technique,), num_devices=None)
        preflights, faults = preflight_jobs(
            [own], environment=self._environment, cluster=cluster, notice=self._notice, shapes=shapes
        )
        if job.name in faults:
            raise InputError([f"{training.node.label} cannot be made again: {faults[job.name]}"])
        self._preflight: Preflight = preflights[job.name]
        then, now = training.record.code_version, code_version(Path(training.record.folder))
        code = [f"the code was {then} and is {now}"] if then != now else []
        return [*code, *self._changes_of_data(), *self._changes_of_environment()]

    def contradictions(self) -> list[str]:
        """Returns where the record contradicts the chain of the model's states."""
        trained, recorded = flat_params(to_json(self.training.job)), flat_params(to_json(self.training.record.job))
        fields = sorted(name for name in {*trained, *recorded} if trained.get(name) != recorded.get(name))
        values = ", ".join(f"{name} is {recorded.get(name)!r} and was {trained.get(name)!r}" for name in fields)
        return [f"the recorded job was changed after the training: {values}"] if fields else []

    def _changes_of_data(self) -> Iterator[str]:
        chain, prepared = self.training.chain, self._preflight.data
        if chain is None or chain.data == prepared["digest"]:
            return
        now, rows = manifest_of(prepared), ""
        with suppress(LedgerError):
            text = self.home.ledger.read_text(str(self.training.node.record.run_id), ROWS)
            rows = "" if now is None else _changed_rows(RowManifest.from_json(json.loads(text)), now)
        yield f"the data has changed: its samples were {chain.data} and are {prepared['digest']}{rows}"

    def _changes_of_environment(self) -> Iterator[str]:
        """Yields what differs between the libraries, devices and threads of then and now."""
        now = versions()
        for environment in _distinct(link.environment for link in self.training.links):
            # Those of a job's own environment follow from its digest, which is part of the job.
            names = ["ringmaster"] if self._job.runs_elsewhere else sorted({*environment.versions, *now})
            for name in names:
                then = environment.versions.get(name, "not installed")
                if then != (here := now.get(name, "not installed")):
                    yield f"{name} was {then} and is {here}"
            if environment.device != (here := self.device_name()):
                yield f"the device was {environment.device} and is {here}: another kind of device rounds differently"
            cores = {core for each in detect().devices for core in each.cores}
            if self._job.is_exact and environment.num_threads > 1:
                yield f"each rank had {environment.num_threads} threads, and exact jobs now have one on a CPU"
            elif self._environment.devices[0].kind == "cpu" and environment.num_threads > len(cores):
                yield f"each rank had {environment.num_threads} threads, and this machine has {len(cores)} cores"

    def device_name(self) -> str:
        """Returns the kind of device that trains here, as links of chains name it."""
        device = self._environment.devices[0]
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
        links = self.training.links if self._technique is None else ()
        needed = max((link.environment.num_devices for link in links), default=1)
        base = self._job.base
        with (
            own_devices(self.home.folder, whose="reproduction", notice=self._notice) as (cluster, lend),
            fork_server_for([self._job]) as server,
        ):
            there = len(cluster.nodes[0].devices)
            if needed > there and cluster.nodes[0].devices[0].kind != "cpu":
                raise InputError([f"{self.training.node.label} was trained on {needed} devices, and here are {there}"])
            with lend(DevicesWanted(least=min(needed, there), most=needed, presses=True)) as devices:
                self._environment = GangEnvironment(
                    server=server,
                    devices=devices,
                    cache_dir=self._folder / "cache",
                    import_paths=(self.training.record.folder,),
                    weights={self._job.name if name == base else name: path for name, path in self._weights.items()},
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
        steps = checkpoint_steps(self.training.node.record.origin.checkpoints)
        return tuple(link for link in self.training.links if not link.first_step or link.first_step in steps)

    def first_different_loss(self) -> int | None:
        """Returns the first step whose loss differs from the recorded one; None where none does."""
        known = self.home.ledger.metric_history(str(self.training.node.record.run_id), "train/loss")
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

    def report_of_whole(self, repeated: Sequence[RepeatedLink], causes: Sequence[str]) -> ReproductionReport:
        """Returns the report of what `repeat` returned; stores it as the model's certificate where all is equal."""
        if repeated and repeated[-1].tensors:
            return self.report(repeated, causes)
        files = self.changed_files()
        if files and self.training.links:
            causes = [*causes, "the model's files were changed after its training: all of its states are equal"]
        report = self.report(repeated, causes, files=files, folder=self.model_folder)
        if report.is_equal:
            chain, at = self.training.chain, datetime.now(UTC).isoformat(timespec="seconds")
            made_by = {"at": at, "device": self.device_name(), "versions": dict(versions())}
            certificate = {**report.to_json(), "folder": None, "chain": chain and chain.head, **made_by}
            self._certify(certificate, day=at.partition("T")[0])
        return report

    def _certify(self, certificate: Mapping[str, Any], *, day: str) -> None:
        """Stores a certificate in the model's run, and names it on the model's page, in place of an earlier one."""
        record, ledger = self.training.node.record, self.home.ledger
        run_id = str(record.run_id)
        ledger.write_json(run_id, CERTIFICATE, certificate)
        path = model_pages.artifact_path(str(record.experiment_id), run_id, CERTIFICATE)
        ledger.rewrite_page(
            record,
            partial(model_pages.with_line, start=PAGE_LINE, text=model_pages.link(f"certificate of {day}", path)),
        )

    def report(
        self,
        repeated: Sequence[RepeatedLink],
        causes: Sequence[str],
        *,
        files: Sequence[str] = (),
        folder: Path | None = None,
    ) -> ReproductionReport:
        """Returns the report of links that were trained again, and of files that differ."""
        is_equal = not (files or self.contradictions() or any(each.tensors for each in repeated))
        unknown = (
            "data, job, libraries, devices and threads are those of the record: the steps above were not trained as "
            "recorded (a step was left out, or memory, a checkpoint or the record was changed)"
        )
        return ReproductionReport(
            model=self.training.node.label,
            is_equal=is_equal,
            links=tuple(repeated),
            num_links=len(self.training.links),
            steps=sum(each.link.step - each.link.first_step for each in repeated),
            num_steps=self._job.total_steps,
            first_step=None if is_equal else self.first_different_loss(),
            files=tuple(files),
            causes=() if is_equal else tuple(causes or [unknown]),
            folder=folder,
        )

    def _repeated(self, link: StateLink, root: Path) -> RepeatedLink:
        self._notice(f"{self.training.node.label}: steps {link.first_step + 1} to {link.step}")
        layout = link.environment if self._technique is None else self._layout_here()
        own, before = self.training.node.record.origin.checkpoints, link.first_step
        if self._was_changed and before and own is not None and before not in checkpoint_steps(str(root)):
            with input_errors(CheckpointError, about=f"its steps were set after step {before}, where it continues: "):
                copy_checkpoint(own, before, to=root)
        self._train(layout, last_step=link.step, root=root)
        chain = read_chain(root)
        assert chain is not None and chain.links[-1].step == link.step
        return RepeatedLink(link=link, tensors=_changed(link.tensors, chain.links[-1].tensors))

    def _train(self, layout: TrainingEnvironment, *, last_step: int, root: Path) -> None:
        """Runs one gang up to `last_step`. Raises InputError where it fails."""
        shape = replace(gang_shape(self._environment.devices), num_devices=layout.num_devices)
        num_ranks = registry.load(layout.technique).num_ranks(shape)
        parents = {name: str(path) for name, path in self._weights.items()}
        known = self.training.record.parents
        before = next((known[start] for start in self._job.checkpoint_roots if start in known), None)
        job = self._job.with_start(None, own=str(root)) if self._was_changed else self._job
        order = GangOrder(
            purpose=TRAIN,
            job=job,
            technique=layout.technique,
            config=layout.config,
            slots=self._slots(layout, num_ranks=num_ranks),
            folder=str(self._folder / "gangs" / f"{last_step:08d}"),
            cache_dir=str(self._environment.cache_dir),
            data=self._preflight.data,
            checkpoint_dir=str(root),
            model_dir=str(self.model_folder),
            weights_from=parents.get(self._job.base or ""),
            starts_from=None if before is None else self.home.find(before).record.origin.checkpoints,
            parents=parents if self._job.adaptation is not None or self._job.data.store is not None else {},
            last_step=last_step,
            import_paths=self._environment.import_paths,
            ordered_at_s=time.monotonic(),
        )
        outcome = Gang(self._environment.server, order, num_ranks=num_ranks).wait(self._keep_losses)
        if outcome.status not in (OutcomeStatus.DONE, OutcomeStatus.PREEMPTED):
            raise InputError([f"{self.training.node.label} could not be trained again: {outcome.message}"])

    @property
    def _was_changed(self) -> bool:
        """Whether the job's steps were set while it ran: it went on from its own checkpoint, where its chain begins."""
        roots, start = self._job.checkpoint_roots, self._job.started_from
        return bool(roots) and (start is None or start.checkpoints not in roots)

    def _keep_losses(self, event: Event) -> None:
        if isinstance(event, Steps):
            self._losses |= dict(enumerate(event.losses, start=event.first_step + 1))

    def _layouts(self) -> list[TrainingEnvironment]:
        """Returns the layouts under which the model is trained again, in order."""
        if self._technique is not None or not self.training.links:
            return [self._layout_here()]
        return _distinct(link.environment for link in self.training.links)

    def _layout_here(self) -> TrainingEnvironment:
        """Returns the first layout that the preflight found for one device."""
        if not self._preflight.candidates:
            reasons = [each.reason for each in self._preflight.refusals]
            raise InputError([f"{self.training.node.label} cannot be trained here: {(reasons or ['no option'])[0]}"])
        first = self._preflight.candidates[0]
        return TrainingEnvironment(
            technique=registry.dotted_path(first.technique),
            config=first.config,
            num_devices=first.num_devices,
            device=self.device_name(),
            num_threads=len(self._environment.devices[0].cores) or 1,
            versions=versions(),
        )

    def _slots(self, layout: TrainingEnvironment, *, num_ranks: int) -> tuple[Slot, ...]:
        """Returns the slots of a layout: on CPUs, with as many cores in all as its ranks had threads."""
        slots = slots_of(self._environment.devices)
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
    """What the user requests.

    folder: where the model is made again.
    technique: to train under on one device; None for the layouts that trained the model.
    share: the share of the links to repeat, drawn at random; 1 for all.
    seed: of the draw.
    is_dry_run: whether only to print what would be done, and what is known to differ.
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

    def make(parent: LineageNode) -> Path | None:
        report = reproduce(home, parent, replace(options, share=1.0), notice=notice)
        if report is not None and not report.is_equal:
            raise InputError(report.sentences())
        return None if report is None else report.folder

    work.find_parents(make)
    with work.devices():
        causes = [*work.contradictions(), *work.inspect()]
        for cause in causes:
            notice(cause)
        links = work.auditable() if options.share < 1 else training.links
        if options.is_dry_run:
            notice(work.intention(links))
            return None
        if options.share < 1:
            if not links:
                raise InputError([f"{node.label} has no checkpoints left to start from. To fix: leave out --share"])
            number = min(max(1, round(options.share * len(links))), len(links))
            drawn = random.Random(options.seed).sample(list(links), number)
            return work.report(work.audit(sorted(drawn, key=lambda link: link.step)), causes)
        return work.report_of_whole(work.repeat(), causes)


def _changed(recorded: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the tensors whose digests differ."""
    return tuple(sorted(name for name in {*recorded, *now} if recorded.get(name) != now.get(name)))


def _distinct(environments: Iterable[TrainingEnvironment]) -> list[TrainingEnvironment]:
    return list({digest(each): each for each in environments}.values())


def _changed_rows(then: RowManifest, now: RowManifest) -> str:
    """Returns which rows were removed and which are new, by their content hashes."""
    parts = []
    for split in then.rows:
        before, after = set(then.rows[split]), set(now.rows.get(split, ()))
        for what, hashes in (("gone", sorted(before - after)), ("new", sorted(after - before))):
            if hashes:
                parts.append(f"{len(hashes)} rows of {split} {what} ({enumerated([each[:12] for each in hashes])})")
    return f"; {'; '.join(parts)}" if parts else ""
