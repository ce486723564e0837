"""What a batch needs around it while it runs: its folder and journal, the fork server, the ledger, device leases."""

from __future__ import annotations

import datetime
import fcntl
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows import settings
from flows.faults import InputError
from flows.views import current_view
from model_lineage import LedgerError
from model_lineage.ledger import Ledger
from tasks.batch import Batch, load_batch, parse_batch
from tasks.cluster import Cluster, detect
from tasks.execution.journal import Journal
from tasks.execution.leases import Leases
from tasks.execution.local import LocalRunner
from tasks.execution.workplace import Workplace
from tasks.profiling.stage import Known
from tasks.profiling.trials import Site
from tasks.recording import Recorder
from techniques.engine.places import place_of
from techniques.engine.processes import ForkServer
from techniques.values import digest

LEASE_RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What measuring a batch's jobs needs: this machine's devices, the fork server, and what was measured before."""

    batch: Batch
    cluster: Cluster
    ledger: Ledger
    server: ForkServer
    site: Site
    known: Known
    leases: Leases

    @property
    def device_names(self) -> tuple[str, ...]:
        """All devices, as leases name them."""
        return tuple(self.cluster.lease_names().values())

    @property
    def holder(self) -> str:
        """Who holds the devices, for whoever else waits for them."""
        return f"batch {self.batch.name}"

    @contextmanager
    def all_devices(self, notice: Callable[[str], None]) -> Iterator[None]:
        """Holds every device, for trials; waits for other processes of this machine to give them back."""
        names = self.device_names
        told = False
        while not self.leases.take(names, holder=self.holder):
            if not told:
                notice("waiting for devices held by " + ", ".join(sorted(set(self.leases.held().values()))))
                told = True
            threading.Event().wait(LEASE_RETRY_S)
        try:
            yield
        finally:
            self.leases.give_back(names)


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What running a batch needs beside its bench: the run's folder with its journal, and who records it."""

    bench: Bench
    journal: Journal
    recorder: Recorder
    runner: LocalRunner
    workplace: Workplace


BatchInput = str | dict[str, Any]
"""A path, a text, a mapping or a Batch's JSON form: what a form in Prefect's UI, and a caller in Python, can give."""


def as_batch(batch: BatchInput) -> Batch:
    """The batch that a path, a text, a mapping or a Batch's JSON form says. Raises BatchFileError with every fault."""
    if isinstance(batch, dict):
        if "text" in batch:
            return Batch.from_json(batch)
        return parse_batch(json.dumps(batch), folder=Path.cwd(), name="batch")
    if "\n" in batch:
        return parse_batch(batch, folder=Path.cwd(), name="batch")
    return load_batch(Path(batch))


# An open fork server of a flow that runs a batch within its own work; the batch uses it and leaves it open.
lent_server: ContextVar[ForkServer | None] = ContextVar("lent_server", default=None)

# Fork servers that were started ahead of the flow that will use them, by batch name.
_warm: dict[str, ForkServer] = {}


def warm_up(batch: Batch) -> None:
    """Starts importing torch in the batch's fork server now, beside whatever this process imports in the meantime."""
    server = _warm[batch.name] = ForkServer(preload=_preload(batch))
    threading.Thread(target=server.start, name="warm-up", daemon=True).start()


@contextmanager
def open_bench(batch: Batch, *, home: Path) -> Iterator[Bench]:
    """Opens what profiling needs, the slow things at the same time; ends every worker when it is left.

    Raises InputError where the devices are not there.
    """
    cluster = _cluster(batch)
    cache = home / "cache"
    with ExitStack() as stack:
        server = lent_server.get()
        if server is None:
            server = _warm.pop(batch.name, None) or ForkServer(preload=_preload(batch))
            stack.callback(server.close)
        ledger = Ledger(settings.tracking_uri(home), artifact_root=home / "mlartifacts")
        _together(server.start, ledger.warm_up)
        paths = (str(batch.folder),)
        yield Bench(
            batch=batch,
            cluster=cluster,
            ledger=ledger,
            server=server,
            site=Site(server=server, devices=cluster.nodes[0].devices, cache_dir=cache, import_paths=paths),
            known=_known(ledger),
            leases=Leases(home / "leases.db"),
        )


@contextmanager
def open_workshop(
    batch: Batch, *, resume: bool, checkpoint_every_s: float | None = None, home: Path | None = None
) -> Iterator[Workshop]:
    """Opens what running a batch needs; closes all of it, whatever happens inside.

    Raises InputError where devices, base models or a batch to resume are not there.
    """
    home = home or settings.home()
    resumed = _resumed(batch, home) if resume else None
    with open_bench(batch, home=home) as bench, ExitStack() as stack:
        folder = resumed or _fresh(batch, home)
        stack.enter_context(_alone(folder))
        journal = Journal.of_file(folder / "journal.db")
        stack.callback(journal.close)
        weights = _weights(batch, bench.ledger, journal, home)
        checkpoint_root = _checkpoint_root(journal, resume=resume)
        journal.put("batch", batch.to_json())
        journal.put("digest", digest(batch.to_json()))
        yield Workshop(
            bench=bench,
            journal=journal,
            recorder=Recorder(bench.ledger, journal, batch=batch, notice=current_view.get().notice),
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


def _checkpoint_root(journal: Journal, *, resume: bool) -> str | None:
    """Where the run's checkpoints go: for good, so that a run that is resumed finds them.

    Raises InputError where the library for its protocol is not installed.
    """
    root: str | None = journal.get("checkpoint_root") if resume else settings.checkpoint_root()
    try:
        place_of(root or "")
    except ValueError as error:
        raise InputError([f"RINGMASTER_CHECKPOINTS: {error}"]) from error
    journal.put("checkpoint_root", root)
    return root


def _cluster(batch: Batch) -> Cluster:
    try:
        return detect(batch.devices)
    except ValueError as error:
        raise InputError([str(error)]) from error


def _fresh(batch: Batch, home: Path) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = home / "batches" / batch.name / stamp
    number = 1
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            folder.mkdir()
        except FileExistsError:  # started in the same second
            number += 1
            folder = folder.with_name(f"{stamp}-{number}")
        else:
            return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps a second process out of a run. Raises InputError where one is in it."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                [f"the run in {folder} is going on in another process. To fix: wait for its end"]
            ) from None
        yield


def _resumed(batch: Batch, home: Path) -> Path:
    """The folder of the newest run of the batch, which must not have ended and must be of the same file."""
    folders = sorted(path.parent for path in (home / "batches" / batch.name).glob("*/journal.db"))
    if not folders:
        raise InputError(
            [f"there is no run of batch {batch.name!r} to resume under {home}. To fix: leave out --resume"]
        )
    journal = Journal.of_file(folders[-1] / "journal.db")
    try:
        then = journal.get("digest")
        is_done = journal.get("status") == "done" and all("model_uri" in r.details for r in journal.jobs().values())
    finally:
        journal.close()
    if then != digest(batch.to_json()):
        raise InputError(
            [
                f"the batch file has changed since the run in {folders[-1]}, so it cannot be resumed. "
                "To fix: undo the change, or leave out --resume to start afresh"
            ]
        )
    if is_done:
        raise InputError([f"the last run of batch {batch.name!r} is done. To fix: leave out --resume to run it again"])
    return folders[-1]


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


def _weights(batch: Batch, ledger: Ledger, journal: Journal, home: Path) -> dict[str, Path]:
    """Folders of the base models that are not jobs of the batch, fetched from the registry.

    An alias is followed once a run: the version is kept in the journal, and taken again where the run is resumed.
    """
    names = {job.name for job in batch.jobs}
    folders: dict[str, Path] = {}
    faults = []
    for job in batch.jobs:
        if job.base is None or job.base in names:
            continue
        try:
            uri = journal.get(f"base:{job.name}") or ledger.resolve_model(job.base).uri
            folders[job.name] = ledger.download_model(uri, home / "cache" / "models")
            journal.put(f"base:{job.name}", uri)
        except LedgerError as error:
            faults.append(f"job {job.name}: base {job.base}: {error}")
    if faults:
        raise InputError(faults)
    return folders


def _known(ledger: Ledger) -> Known:
    def find(fingerprints: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        return ledger.find_profiles(fingerprints)

    def keep(fingerprint: str, profile: Mapping[str, Any]) -> None:
        ledger.record_profile(fingerprint, json.loads(json.dumps(profile)))

    return Known(find=find, keep=keep)
