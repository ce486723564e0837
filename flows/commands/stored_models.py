"""The commands that change and check what the home stores of models: copies, proofs, and what nothing reaches.

They need no torch.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from ringmaster.errors import InputError, SignatureError
from ringmaster.files import check_new
from ringmaster.flows.lineage.home import Model, lineage_home
from ringmaster.flows.output import (
    AsJson,
    error_console,
    message,
    notice,
    print_outcome,
    print_result,
)
from ringmaster.model_lineage.records import IMPORTED
from ringmaster.techniques.models.peft_format import is_adapter

DAY_S = 86_400.0


def store(
    model: Model,
    as_json: AsJson = False,
) -> None:
    """Put a model and its ancestors into the tensor store, each as a difference to its first parent."""
    with lineage_home(writes=True) as home:
        node = home.find(model)
        if node.id not in home.snapshot.graph:
            raise InputError([f"{node.label} is a component: it is in the store with the models that have it"])
        kept = {}
        for each in (*reversed(home.snapshot.existing(home.snapshot.ancestors(node.id))), node):
            kept[each.label] = home.ledger.keep_tensors(each.record, home.model_dir(each), store=home.store).id
            error_console().print(f"in the store: {each.label}")
        print_outcome({"stored": kept, "size_bytes": home.store.size_bytes()}, as_json=as_json)


def restore(
    model: Annotated[
        str, typer.Argument(help="Model, as `show` takes it; or a folder with references, alone, to fill again.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to write; it must not exist yet.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a model's files from the tensor store, or from MLflow, to a folder, bit for bit as they were."""
    if folder is None:
        _restore_references(Path(model), as_json=as_json)
        return
    check_new(folder)
    with lineage_home() as home:
        node, started_s = home.find(model), time.perf_counter()
        if node.record.tensors_id is not None:
            home.store.restore(node.record.tensors_id, folder)
        elif node.record.kind == IMPORTED:
            raise InputError([f"{node.label} is not in the tensor store. To fix: ringmaster lineage store {node.id}"])
        else:  # as a pool's server has stored it
            folder.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=folder.parent, prefix=".restored-") as aside:
                home.ledger.download_model(node.id, Path(aside)).rename(folder)
        try:
            home.ledger.check_use(node.record, "restore", folder=folder)
        except SignatureError as error:
            shutil.rmtree(folder)
            raise InputError([str(error)]) from error
        seconds = time.perf_counter() - started_s
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        lines = [f"{node.label} is in {folder}: {num_bytes / 1e6:.1f} MB in {seconds:.2f} s"]
        # The model that an adapter is on, which its own files do not hold.
        base = home.snapshot.nodes.get(node.record.weights_from or "") if is_adapter(folder) else None
        if base is not None:
            lines.append(f"it is an adapter on {base.label}: ringmaster lineage restore {base.label} FOLDER")
        result = {"folder": str(folder), "num_bytes": num_bytes, "seconds": seconds, "base": base and base.label}
        print_outcome(result, lines, as_json=as_json)


def _restore_references(folder: Path, *, as_json: bool) -> None:
    """Writes plain weights into a folder in which they are references to the tensor store."""
    if not folder.is_dir():
        raise InputError(
            [f"{folder} is not a folder with references. To fix: name a FOLDER to write the model {folder} to"]
        )
    with lineage_home() as home:
        num_bytes = home.store.unshare(folder)
        text = f"{num_bytes / 1e6:.1f} MB of weights are written" if num_bytes else "there are no references"
        print_outcome({"folder": str(folder), "num_bytes": num_bytes}, [f"{folder}: {text}"], as_json=as_json)


def verify(model: Model, as_json: AsJson = False) -> None:
    """Prove by its signature that a model's files and records are what was trained. Exit 1: they are not."""
    with lineage_home() as home:
        node = home.find(model)
        try:
            proof = home.ledger.verify(node.record)
        except SignatureError as error:
            fault = {"model": node.label, "is_proved": False, "fault": str(error)}
            print_outcome(fault, [message(str(error))], as_json=as_json)
            raise typer.Exit(1) from error
    made_from = [{"name": each["name"], "digest": each["digest"]} for each in proof.materials()]
    facts = {"key": proof.key, "num_files": proof.num_files, "digest": proof.digest, "materials": made_from}
    lines = [f"{node.label} is signed by the key {proof.key}: {proof.num_files} files, sha256 {proof.digest}"]
    for each in made_from:
        digest = ", ".join(f"{kind} {value}" for kind, value in each["digest"].items()) or "no digest is known"
        lines.append(f"made from {each['name']}: {digest}")
    print_result({"model": node.label, "is_proved": True, **facts}, map(message, lines), as_json=as_json)


def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Drop them; without it they are only listed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list them, as without --yes.")] = False,
    keep_days: Annotated[
        float, typer.Option(help="Age in days below which models stay, and what they came from.", min=0)
    ] = 7.0,
    as_json: AsJson = False,
) -> None:
    """Drop models that nothing reaches; refer to the store for weights, in folders of old runs, that it has too."""
    from ringmaster.flows.batch.run_folder import plain_models, shared_text
    from ringmaster.model_lineage.snapshot import collect, unreached

    if yes and dry_run:
        raise InputError(["--yes drops and --dry-run does not. To fix: give one of them"])
    with lineage_home(is_fresh=True, writes=yes) as home:
        now_ms = time.time_ns() // 1_000_000
        nodes = unreached(home.snapshot, now_ms=now_ms, least_age_days=keep_days)
        freed = collect(home.ledger, home.store, home.snapshot, nodes) if yes else 0
        before_s = now_ms / 1000 - keep_days * DAY_S
        batches = sorted((home.folder / "batches").glob("*/"))
        models = list(plain_models(batches, home=home.folder, before_s=before_s))
        if yes:
            sizes = {model: home.store.share(model) for model in models}
            models = [model for model, num_bytes in sizes.items() if num_bytes]  # the store lacks the others
            freed += sum(sizes.values())
            freed += home.clear_copies(before_s=min(before_s, now_ms / 1000 - DAY_S))  # a run may use a new one
        labels, folders = [node.label for node in nodes], [str(model) for model in models]
        keys = ("dropped", "shared") if yes else ("would_drop", "would_share")
        lines = [
            *(f"{node.label}  {node.record.kind}" for node in nodes),
            *(f"{each}  plain weights" for each in folders),
        ]
        print_result({keys[0]: labels, keys[1]: folders, "freed_bytes": freed}, lines, as_json=as_json)
        num_kept = len(home.snapshot.nodes) - len(nodes)
        hint, what = (f"{freed / 1e6:.1f} MB are free", "dropped") if yes else ("--yes drops them", "would be dropped")
        notice(f"{len(nodes)} {what}, {num_kept} stay; {hint}")
        for fault in home.store.reference_faults():
            notice(fault)
        if yes and models:
            notice(shared_text(models))
        elif models:
            notice(f"weights in {len(models)} folder(s) of runs would become references, where the store has them")


def fsck(as_json: AsJson = False) -> None:
    """Read every tensor and every record, and report what is damaged or missing; exit 1 if something is."""
    from ringmaster.model_lineage.snapshot import consistency_errors

    with lineage_home(is_fresh=True) as home:
        result = consistency_errors(home.snapshot, home.store)
        num_models, num_stored = len(home.snapshot.models), len(home.store.ids())
        print_result({"faults": result, "num_models": num_models, "num_stored": num_stored}, result, as_json=as_json)
        if not as_json:
            ending = f"{len(result)} faults" if result else "all is well"
            notice(f"{num_models} models, {num_stored} in the tensor store: {ending}")
        if result:
            raise typer.Exit(1)
