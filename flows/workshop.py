"""What a batch needs around it while it runs: its folder and journal, the fork server, the ledger, device leases."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.flows import settings, waiting
from ringmaster.flows.examples import located
from ringmaster.flows.faults import InputError
from ringmaster.flows.pool.own_node import own_node
from ringmaster.flows.run_folder import (
    alone_in,
    base_weights,
    begun,
    checkpoint_root_of,
    folder_to_resume,
    fresh_folder,
    note_start,
)
from ringmaster.flows.views import current_view
from ringmaster.model_lineage.ledger import Ledger
from ringmaster.model_lineage.tensors import TensorStore
from ringmaster.tasks.batch import Batch, load_batch, parse_batch
from ringmaster.tasks.batch.parents import with_teachers
from ringmaster.tasks.cluster import Cluster, Device, detect
from ringmaster.tasks.execution.journal import Journal
from ringmaster.tasks.execution.leases import Leases, leases_of
from ringmaster.tasks.execution.local import LocalRunner
from ringmaster.tasks.execution.workplace import Workplace
from ringmaster.tasks.profiling.lending import DevicesWanted, Lend
from ringmaster.tasks.profiling.stage import Known
from ringmaster.tasks.profiling.trials import Site
from ringmaster.tasks.recording import Recorder
from ringmaster.techniques.engine.processes import ForkServer
from ringmaster.techniques.values import digest

LEASE_RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What measuring a batch's jobs needs: this machine's devices, the fork server, and what was measured before.

    lend: lends idle devices, which neither other processes of this machine nor the executor of its pool use meanwhile.
    """

    batch: Batch
    cluster: Cluster
    ledger: Ledger
    server: ForkServer
    site: Site
    known: Known
    leases: Leases
    lend: Lend
    is_pool_node: bool

    @property
    def device_names(self) -> tuple[str, ...]:
        """All devices, as leases name them."""
        return tuple(self.cluster.lease_names().values())

    @property
    def holder(self) -> str:
        """Who holds the devices, for whoever else waits for them."""
        return f"batch {self.batch.name}"


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What running a batch needs beside its bench: the run's folder with its journal, and who records it."""

    bench: Bench
    journal: Journal
    recorder: Recorder
    runner: LocalRunner
    workplace: Workplace


BatchInput = str | dict[str, Any]
"""A path, a text, a mapping or a Batch's JSON form, in a file too: what a form in Prefect's UI, and a caller in Python,
can give."""


def as_batch(batch: BatchInput) -> Batch:
    """The batch that a path, a text, a mapping or a Batch's JSON form says. Raises BatchFileError with every fault."""
    if isinstance(batch, dict):
        if "text" in batch:
            return Batch.from_json(batch)
        return parse_batch(json.dumps(batch), folder=Path.cwd(), name="batch")
    if "\n" in batch:
        return parse_batch(batch, folder=Path.cwd(), name="batch")
    return _kept_batch(Path(batch)) or load_batch(located(batch))


def _kept_batch(file: Path) -> Batch | None:
    """The batch whose JSON form is in a file, None where something else is."""
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return Batch.from_json(data) if isinstance(data, dict) and "text" in data else None


# An open fork server of a flow that runs a batch within its own work; the batch uses it and leaves it open.
lent_server: ContextVar[ForkServer | None] = ContextVar("lent_server", default=None)

# Fork servers that were started ahead of the flow that will use them, by batch name.
_warm: dict[str, ForkServer] = {}


def warm_up(batch: Batch) -> None:
    """Starts importing torch in the batch's fork server now, beside whatever this process imports in the meantime."""
    server = _warm[batch.name] = ForkServer(preload=_preload(batch))

    def start() -> None:
        with suppress(RuntimeError):  # whoever uses it starts it again, and is told why it cannot
            server.start()

    threading.Thread(target=start, name="warm-up", daemon=True).start()


def cool_down() -> None:
    """Ends the fork servers that were started ahead of flows which never came to use them."""
    while _warm:
        _warm.popitem()[1].close()


@contextmanager
def open_bench(batch: Batch, *, home: Path) -> Iterator[Bench]:
    """Opens what profiling needs, the slow things at the same time; ends every worker when it is left.

    Where this machine is a node of a pool, its devices are those that the pool has of it. Raises InputError where the
    devices are not there.
    """
    cache = home / "cache"
    leases = leases_of(home)
    with ExitStack() as stack:
        node = stack.enter_context(own_node())
        if node is None:
            cluster = _cluster(batch)
            lend: Lend = partial(_lent, leases, cluster, f"batch {batch.name}")
        else:
            cluster, lend = node.cluster, partial(node.lent, batch.name)
        server = lent_server.get()
        if server is None:
            server = _warm.pop(batch.name, None) or ForkServer(preload=_preload(batch))
            stack.callback(server.close)
        uri = settings.tracking_uri(home)
        ledger = Ledger(uri, artifact_root=home / "mlartifacts", waiting=waiting.for_mlflow())
        _together(server.start, ledger.warm_up)
        paths = (str(batch.folder),)
        yield Bench(
            batch=batch,
            cluster=cluster,
            ledger=ledger,
            server=server,
            site=Site(server=server, devices=cluster.nodes[0].devices, cache_dir=cache, import_paths=paths),
            known=_known(ledger),
            leases=leases,
            lend=lend,
            is_pool_node=node is not None,
        )


@contextmanager
def open_workshop(
    batch: Batch, *, resume: bool, checkpoint_every_s: float | None = None, home: Path | None = None
) -> Iterator[Workshop]:
    """Opens what running a batch needs; closes all of it, whatever happens inside.

    Raises InputError where devices, base models or a batch to resume are not there.
    """
    home = home or settings.home()
    resumed = folder_to_resume(batch, home) if resume else None
    if resume and resumed is None:
        current_view.get().notice(f"no run of {batch.name} has begun that could be resumed: it is started")
    resume = resumed is not None
    note_start(batch, home)
    with open_bench(batch, home=home) as bench, ExitStack() as stack:
        folder = resumed or fresh_folder(batch, home)
        stack.enter_context(alone_in(folder))
        journal = Journal.of_file(folder / "journal.db")
        stack.callback(journal.close)
        weights = base_weights(batch, bench.ledger, journal, home)
        bench = replace(bench, batch=replace(batch, jobs=with_teachers(batch.jobs, weights)))
        checkpoint_root = checkpoint_root_of(journal, resume=resume)
        journal.put_all({"batch": batch.to_json(), "digest": digest(batch.to_json())})
        begun(batch, home)
        yield Workshop(
            bench=bench,
            journal=journal,
            recorder=Recorder(
                bench.ledger,
                journal,
                batch=batch,
                notice=current_view.get().notice,
                tensors=TensorStore(settings.tensors(home)),
            ),
            runner=LocalRunner(bench.server),
            workplace=Workplace(
                folder=folder,
                cache_dir=bench.site.cache_dir,
                import_paths=bench.site.import_paths,
                weights=weights,
                checkpoint_every_s=checkpoint_every_s,
                checkpoint_root=checkpoint_root,
            ),
        )


@contextmanager
def _lent(leases: Leases, cluster: Cluster, holder: str, wanted: DevicesWanted) -> Iterator[tuple[Device, ...]]:
    """Leases idle devices of this machine; waits for its other processes to give enough of them back."""
    names = {name: cluster.device(*place) for place, name in cluster.lease_names().items()}
    told = False
    while True:
        held = {name: who for name, who in leases.held().items() if name in names}
        lent = wanted.of([name for name in names if name not in held], are_others_at_work=bool(held))
        if lent and leases.take(lent, holder=holder):
            break
        if not told:
            current_view.get().notice("waiting for devices held by " + ", ".join(sorted(set(held.values()))))
            told = True
        threading.Event().wait(LEASE_RETRY_S)
    try:
        yield tuple(names[name] for name in lent)
    finally:
        leases.give_back(lent)


def _cluster(batch: Batch) -> Cluster:
    try:
        return detect(batch.devices)
    except ValueError as error:
        raise InputError([str(error)]) from error


def _preload(batch: Batch) -> tuple[str, ...]:
    """The modules of the batch's architectures, so that no worker needs to import them."""
    return tuple(f"transformers:{job.model.architecture}" for job in batch.jobs if job.model.architecture)


def _together(*actions: Callable[[], Any]) -> None:
    """Runs slow, independent things at the same time; raises what the first of them raised."""
    errors: list[Exception] = []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
        except (OSError, ValueError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=attempt, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _known(ledger: Ledger) -> Known:
    def find(fingerprints: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        return ledger.find_profiles(fingerprints)

    def keep(fingerprint: str, profile: Mapping[str, Any]) -> None:
        ledger.record_profile(fingerprint, json.loads(json.dumps(profile)))

    return Known(find=find, keep=keep)
