"""Base models that jobs start from, as nodes of kind "imported", with the base models on their cards.

`record_base` gives an external model one node. Of an untrusted folder, weights and descriptions are recorded, and
nothing that is code (`is_model_file`).
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from ringmaster.errors import LedgerError, TensorStoreError, UnknownModel
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.model_pages import CARD, CardMetadata, card_text, read_card
from ringmaster.model_lineage.records import ModelRecord, Origin
from ringmaster.model_lineage.snapshot import LineageNode, Snapshot
from ringmaster.model_lineage.tensors import StoredModel, TensorStore
from ringmaster.model_lineage.tensors.model_files import files_of

WEIGHTS = ".safetensors"
MODEL_FILES = (f"*{WEIGHTS}", "*.json", "*.txt", "*.model", "*.jinja", CARD)
LONGEST_NAME = 200


ModelFiles = Mapping[str, Path]
"""The files of a model's folder that are imported: by relative name, the paths of the bytes."""


def model_files(folder: Path) -> ModelFiles:
    """Returns the files of a model's folder that may be imported, without looking into them.

    Raises ValueError where one lies outside of the folder.
    """
    return {name: path for name, path in files_of(folder) if is_model_file(name)}


def is_model_file(name: str) -> bool:
    """Whether a file of that relative name holds weights or a description of a model, and no code."""
    return any(fnmatch(name, each) for each in MODEL_FILES)


def base_fault(base: str) -> str:
    """Returns why a text names no base model, neither a folder nor a name on the hub; "" if it may."""
    if len(base) > LONGEST_NAME:
        return f"has more than {LONGEST_NAME} characters"
    if Path(base).is_absolute():
        return "leads out of its folder" if ".." in PurePosixPath(base).parts else ""
    parts = base.strip("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "is not a name"
    return "" if all(re.fullmatch(r"[\w.@:~ -]+", part) for part in parts) else "has characters that no name has"


Fetch = Callable[[str, tuple[str, ...]], Path]
"""Downloads the files of a hub name that match the patterns and returns their folder. Raises OSError on failure."""


MAX_GENERATIONS = 8  # the most levels of base models whose cards are followed
MAX_BASES = 32  # the most base models on one card
MAX_NAME = 200  # the most characters of a name that is made of a path
MAX_STUBS = 100  # the most nodes without weights, known from cards only, that one import creates


@dataclass(frozen=True, kw_only=True)
class Stub:
    """A base model that is not in the lineage yet, with the text of its card. It is recorded later."""

    name: str
    text: str
    relation: str | None = None
    bases: tuple[str | Stub, ...] = ()


_WORD = r"(models?|checkpoints?|ckpts?|weights?|final|best|last|latest|saved?|export(ed)?|out(puts?)?|results?|hf"
_WORD += r"|pytorch|runs?|steps?|epochs?|snapshots?|artifacts?|v?\d[\d._:T-]*|[0-9a-f]{12,64})"
GENERIC = re.compile(rf"{_WORD}([-_.]?{_WORD})*", re.IGNORECASE)
"""The names of folders that do not describe the model in them, such as `model`, `checkpoint-500`, dates and hashes."""


def registered_name(source: str, *, taken: Callable[[str], bool] = lambda _: False) -> str:
    """Returns the registry name of an imported model, by which users recognize it.

    A hub name is written with "--" for its slash, also where the folder lies in the hub's cache. A folder has its own
    name, from the last descriptive part of the path: /runs/mood/model is "mood", and /runs/mood/checkpoint-500
    is "mood-checkpoint-500".

    taken: whether a name is that of another model. Then more of the path is added, and at last a digest of it.
    """
    parts = [part for part in Path(source).parts if part != Path(source).anchor]
    if not Path(source).is_absolute():
        parts = [source.strip("/").replace("/", "--")]
    elif cached := [part.removeprefix("models--") for part in parts if part.startswith("models--")]:
        parts = cached[-1:]  # in a cache of the hub
    telling = [k for k, part in enumerate(parts) if not GENERIC.fullmatch(part)]
    first = telling[-1] if telling else max(len(parts) - 1, 0)
    reported = [part for part in parts[first + 1 :] if re.search(r"\d", part)]
    names = [_joined(parts[first : first + 1] + reported), *(_joined(parts[k:]) for k in range(first, -1, -1))]
    mark = hashlib.sha256(source.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return next((name for name in names if not taken(name)), f"{names[0]}-{mark}")


def _joined(parts: Sequence[str]) -> str:
    return "-".join(re.sub(r"[^\w.-]", "-", part) for part in parts).strip(".-")[:MAX_NAME] or "imported"


def fetch_from_hub(name: str, patterns: tuple[str, ...], *, is_cached: bool = False) -> Path:
    """Downloads files of a model from Hugging Face's hub into the hub's cache. Raises OSError with a remedy.

    is_cached: whether the files are in the cache already, and nothing is to be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=is_cached))
    except HFValidationError as error:
        raise OSError(f"{name!r} is neither a folder nor a hub name: {error}") from error
    except (OSError, ValueError) as error:  # the hub's client raises one of these two for every fault
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "see that the hub can be reached, or name a folder"
        raise OSError(f"{name} could not be fetched: {first.removesuffix('.')}. To fix: {remedy}") from error


def planned_bases(card: CardMetadata, snapshot: Snapshot, fetch: Fetch, *, source: str) -> tuple[str | Stub, ...]:
    """Returns the base models on the card of `source`: ids of known models, and Stubs for all others.

    Raises ValueError if cards name each other in a cycle, or if there are too many of them.
    """
    # A model that an earlier import recorded only in part is skipped: it is recorded again, which completes it.
    models = [node for node in snapshot.models if node.is_ready]
    known = {node.record.origin.source: node.id for node in models if node.record.origin.source is not None}
    num_stubs = 0

    def bases_of(card: CardMetadata, path: tuple[str, ...]) -> tuple[str | Stub, ...]:
        if len(names := dict.fromkeys(card.base_models)) > MAX_BASES:
            fault = f"the card of {path[-1]} names {len(names)} base models, and {MAX_BASES} are the most"
            raise ValueError(f"{fault}. To fix: mend the card")
        return tuple(known.get(base) or _by_name(snapshot, base) or stub(base, path) for base in names)

    def stub(base: str, path: tuple[str, ...]) -> Stub:
        nonlocal num_stubs
        num_stubs += 1
        if base in path:
            raise ValueError(f"the cards name each other as bases: {' -> '.join([*path, base])}. To fix: mend one")
        if num_stubs > MAX_STUBS:
            raise ValueError(f"the cards below {source} name more than {MAX_STUBS} models. To fix: mend its card")
        card, text = CardMetadata(), f"# {base}\n\nIts weights are not here.\n"
        if len(path) < MAX_GENERATIONS:
            with suppress(OSError, ValueError):  # without a readable card the base is a root
                fetched = fetch(base, (CARD,))
                card, text = read_card(fetched), card_text(fetched)
                card = replace(card, base_models=tuple(name for name in card.base_models if not base_fault(name)))
        return Stub(name=base, text=text, relation=card.relation, bases=bases_of(card, (*path, base)))

    return bases_of(card, (source,))


def _by_name(snapshot: Snapshot, base: str) -> str | None:
    try:
        node = snapshot.find(base)
    except UnknownModel:
        return None
    return node.id if node.is_ready else None


class ImportAttempt:
    """The records of one import. owner: the import's name in the tensor store until the models own their tensors."""

    def __init__(self, ledger: Ledger) -> None:
        self.owner = ledger.owner(f"importing-{uuid.uuid4().hex}")
        self.runs: list[str] = []  # runs that this import created
        self._ledger = ledger

    def record(
        self,
        name: str,
        *,
        key: str,
        source: str,
        folder: Path,
        relation: str | None,
        bases: Sequence[str | Stub],
        keep: Callable[[ModelRecord], object] | None = None,
    ) -> ModelRecord:
        """Records a model in its own run, after its base models. keep: called with the record before the run ends."""
        parents = [base if isinstance(base, str) else self._stub(base) for base in bases]
        is_new = self._ledger.batch_run(key) is None
        run_id = self._ledger.start_batch(f"import {name}", params={"source": source}, key=key)
        self.runs += [run_id] if is_new else []
        record = self._ledger.record_model(
            name,
            run_id=run_id,
            folder=folder,
            kind="imported",
            parents=parents,
            origin=Origin(source=source, relation=relation),
        )
        if keep is not None:
            keep(record)
        self._ledger.finish_run(run_id)
        return record

    def _stub(self, base: Stub) -> str:
        """Records a node for a base model whose weights are stored elsewhere."""
        name = registered_name(base.name)
        with tempfile.TemporaryDirectory() as aside:
            (Path(aside) / CARD).write_text(base.text, encoding="utf-8")
            record = self.record(
                name,
                key=f"import {name} without weights",
                source=base.name,
                folder=Path(aside),
                relation=base.relation,
                bases=base.bases,
            )
        return record.model_id


@contextmanager
def whole_or_nothing(ledger: Ledger, store: TensorStore | None) -> Iterator[ImportAttempt]:
    """Context manager that removes an import's records if it fails, as far as ledger and store are reachable."""
    attempt = ImportAttempt(ledger)
    try:
        yield attempt
    except BaseException:
        with suppress(LedgerError):
            for run_id in reversed(attempt.runs):
                ledger.take_back(run_id)
        if store is not None:
            with suppress(TensorStoreError, OSError):
                store.gc(drop=[attempt.owner, *ledger.gone(store.owners(), but=())], waits=False)
        raise
    if store is not None:
        store.disown(attempt.owner)


MAX_SAID_BYTES = 50_000_000  # for one file: anything larger than a large vocabulary is not a description

Cached = Callable[[str], Path | None]
"""Returns the folder of a hub name's files that are already on this machine, or None."""


def record_base(
    ledger: Ledger, source: str, *, store: TensorStore | None, fetch: Fetch | None = None, cached: Cached | None = None
) -> str:
    """Returns the node id of a base model, given as a folder or a hub name.

    An existing node is reused if it has exactly the same files or the same source; a node known only from a card then
    gets its weights. Otherwise the model is recorded, with its card's base models as its parents. The weights are not
    copied into MLflow; they are added to the tensor store, if there is one and safetensors are on this machine. Files
    that may be code are left out.

    Raises ValueError (LedgerError, TensorStoreError) where a file or a card is damaged, and OSError.
    """
    fetch, cached = fetch or fetch_from_hub, cached or cached_from_hub
    place = Path(source).expanduser()
    folder: Path | None = place if place.is_dir() else cached(source)
    source = str(place.resolve()) if place.is_dir() else source
    with ExitStack() as exits:
        aside = exits.enter_context(tempfile.TemporaryDirectory())
        snapshot = Snapshot.of(ledger, cache=Path(aside) / "rows")
        files = {} if folder is None else model_files(folder)  # validated before any file is read
        has_weights = any(name.endswith(WEIGHTS) for name in files)
        attempt = exits.enter_context(whole_or_nothing(ledger, store))

        def add(owner: str) -> StoredModel | None:
            if folder is None or store is None or not has_weights:
                return None
            return store.add(folder, owner=owner, only=is_model_file)

        def keep(record: ModelRecord) -> None:
            if folder is not None and store is not None and has_weights:
                ledger.keep_tensors(record, folder, store=store, only=is_model_file)

        stored = add(attempt.owner)
        if (node := _known(ledger, snapshot, source, stored=stored, store=store)) is not None:
            if node.record.tensors_id is None:
                keep(node.record)
            elif stored is not None and node.record.tensors_id != stored.id:
                add(ledger.owner(node.id))  # a model in the store that nobody owns is never deleted
            return node.id
        value = _descriptive_files(source, files, fetch, Path(aside) / "said")
        card = read_card(value)
        return attempt.record(
            registered_name(source, taken=lambda name: _is_taken(snapshot, name, source)),
            key=f"import {source} {stored.id if stored else 'without weights'}",
            source=source,
            folder=value,
            relation=card.relation,
            bases=planned_bases(card, snapshot, fetch, source=source),
            keep=keep,
        ).model_id


def _known(
    ledger: Ledger, snapshot: Snapshot, source: str, *, stored: StoredModel | None, store: TensorStore | None
) -> LineageNode | None:
    """Returns the newest node with these files, or else of this source if either side's tensors are unknown."""
    newest = list(reversed(snapshot.models))
    of_place = [node for node in newest if node.record.origin.source == source]
    if stored is None or store is None:
        return next(iter(of_place), None)
    if same := [node for node in newest if _has_files(node, stored, store)]:
        return same[0]
    # A node without tensors may be recorded only in part; the status of its run shows whether it is.
    lines = ((node, node.record.run_id) for node in of_place if node.record.tensors_id is None)
    return next((node for node, run in lines if run is not None and ledger.is_finished(run)), None)


def _has_files(node: LineageNode, stored: StoredModel, store: TensorStore) -> bool:
    """Whether a node has the files of a stored model; a model that a job has written may have other files too."""
    id = node.record.tensors_id
    if id is None or id == stored.id:
        return id is not None
    with suppress(TensorStoreError):  # the store belongs to another home folder, or was cleared
        return tuple(file for file in store.model(id).files if is_model_file(file.path)) == stored.files
    return False


def _is_taken(snapshot: Snapshot, name: str, source: str) -> bool:
    """Whether a name is that of another model than the one of this source, whose versions share it."""
    return any(
        node.record.origin.source != source and name in (each.record.registered_name for each in node.versions)
        for node in snapshot.models
    )


def _descriptive_files(source: str, files: ModelFiles, fetch: Fetch, aside: Path) -> Path:
    """Returns a folder with a model's descriptive files, without its weights, but at least with a minimal card."""
    aside.mkdir()
    for name, path in files.items():
        if "/" not in name and not name.endswith(WEIGHTS) and path.stat().st_size <= MAX_SAID_BYTES:
            shutil.copyfile(path, aside / name)
    if not Path(source).is_dir() and not (aside / CARD).exists():
        with suppress(OSError, ValueError):  # without a reachable hub or a card, the model is a root
            shutil.copyfile(fetch(source, (CARD,)) / CARD, aside / CARD)
    if not any(aside.iterdir()):
        (aside / CARD).write_text(f"# {source}\n\nIts weights are not here.\n", encoding="utf-8")
    return aside


def cached_from_hub(name: str) -> Path | None:
    """Returns the folder of a hub model in this machine's cache, or None if it is not there."""
    try:
        folder = fetch_from_hub(name, MODEL_FILES, is_cached=True)
    except OSError:
        return None
    return folder if any(folder.rglob("*.safetensors")) else None
