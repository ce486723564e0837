"""The commands that change what is kept: importing models, the tensor store, dropping what nothing reaches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringmaster.errors import InputError
from ringmaster.flows.lineage.home import LineageHome, Model, lineage_home
from ringmaster.flows.output import AsJson, error_console, output_console, print_json
from ringmaster.techniques.models.peft_format import is_adapter
from ringmaster.text import is_printable_name

if TYPE_CHECKING:
    from ringmaster.model_lineage.snapshot import Node


def import_(
    source: Annotated[str, typer.Argument(help="A folder with safetensors, or a name on Hugging Face's hub.")],
    name: Annotated[str, typer.Option(help="What it is called here: the registered model's name.")],
    as_json: AsJson = False,
) -> None:
    """Record a model from elsewhere; what its card names as base_model becomes its parent."""
    from ringmaster.model_lineage.importing import fetch_from_hub, import_model

    if not is_printable_name(name) or set(name) & set("/:@'\""):
        raise InputError([f"a model cannot be called {name!r}. To fix: use letters, digits, '-', '_' and '.'"])
    with lineage_home() as home:
        try:
            record = import_model(
                home.ledger, source, name=name, snapshot=home.snapshot, store=home.store, fetch=fetch_from_hub
            )
        except OSError as error:
            raise InputError([str(error)]) from error
        except ValueError as error:
            if type(error) is ValueError:
                raise InputError([str(error)]) from error
            raise
        came = f", from {len(record.parents)} recorded base model(s)" if record.parents else ""
        error_console().print(f"{record.registered_name}/{record.version} is recorded{came}")
        if as_json:
            print_json({"id": record.model_id, "uri": record.uri, "parents": list(record.parents)})


def store(
    model: Model,
    as_json: AsJson = False,
) -> None:
    """Put a model and its ancestors into the tensor store, each as a difference to its first parent."""
    with lineage_home() as home:
        node = home.find(model)
        line = [*reversed(home.snapshot.graph.ancestors(node.id)), node.id] if node.id in home.snapshot.graph else []
        if not line:
            raise InputError([f"{node.label} is a component: it is in the store with the models that have it"])
        kept = {}
        for each in [home.snapshot.nodes[id] for id in line if id in home.snapshot.nodes]:
            kept[each.label] = home.ledger.keep_tensors(each.record, home.model_dir(each), store=home.store).id
            error_console().print(f"in the store: {each.label}")
        print_json({"stored": kept, "size_bytes": home.store.size_bytes()}) if as_json else None


def restore(
    model: Model,
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")],
    as_json: AsJson = False,
) -> None:
    """Write a model's files from the tensor store to a folder, bit for bit as they were."""
    if folder.exists():
        raise InputError([f"{folder} is there already. To fix: name a new folder"])
    with lineage_home() as home:
        node = home.find(model)
        if node.record.tensors_id is None:
            raise InputError([f"{node.label} is not in the tensor store. To fix: ringmaster lineage store {node.id}"])
        started_s = time.perf_counter()
        home.store.restore(node.record.tensors_id, folder)
        seconds = time.perf_counter() - started_s
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        error_console().print(f"{node.label} is in {folder}: {num_bytes / 1e6:.1f} MB in {seconds:.2f} s")
        base = _base_of_adapter(home, node, folder)
        if base is not None:
            error_console().print(f"it is an adapter on {base.label}: ringmaster lineage restore {base.label} FOLDER")
        if as_json:
            said = {"folder": str(folder), "num_bytes": num_bytes, "seconds": seconds}
            print_json({**said, "base": None if base is None else base.label})


def gc(
    yes: Annotated[bool, typer.Option("--yes", help="Drop them; without it they are only listed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list them, as without --yes.")] = False,
    keep_days: Annotated[float, typer.Option(help="Younger models stay, and what they came from.", min=0)] = 7.0,
    as_json: AsJson = False,
) -> None:
    """Drop models that nothing reaches: without an alias, and with no descendant that has one."""
    from ringmaster.model_lineage.snapshot import collect, unreached

    if yes and dry_run:
        raise InputError(["--yes drops and --dry-run does not. To fix: give one of them"])
    with lineage_home(is_fresh=True) as home:
        now_ms = time.time_ns() // 1_000_000
        nodes = unreached(home.snapshot, now_ms=now_ms, least_age_days=keep_days)
        freed = collect(home.ledger, home.store, home.snapshot, nodes) if yes else 0
        if as_json:
            print_json({"dropped" if yes else "would_drop": [node.label for node in nodes], "freed_bytes": freed})
            return
        _tell(home, nodes, freed_bytes=freed if yes else None)


def fsck(as_json: AsJson = False) -> None:
    """Read every tensor and every record, and say what is damaged or missing; exit 1 where something is."""
    from ringmaster.model_lineage.snapshot import consistency_errors

    with lineage_home(is_fresh=True) as home:
        found = consistency_errors(home.snapshot, home.store)
        if as_json:
            print_json({"faults": found, "num_models": len(home.snapshot.models), "num_stored": len(home.store.ids())})
        else:
            for fault in found:
                output_console().print(fault)
            ending = f"{len(found)} faults" if found else "all is well"
            number = len(home.snapshot.models)
            error_console().print(f"{number} models, {len(home.store.ids())} in the tensor store: {ending}")
        if found:
            raise typer.Exit(1)


def _base_of_adapter(home: LineageHome, node: Node, folder: Path) -> Node | None:
    """The model that a restored adapter is on, which its own files do not hold."""
    if not is_adapter(folder) or not node.record.parents:
        return None
    return home.snapshot.nodes.get(node.record.parents[0])


def _tell(home: LineageHome, nodes: tuple[Node, ...], *, freed_bytes: int | None) -> None:
    console = output_console()
    for node in nodes:
        console.print(f"{node.label}  {node.record.kind}")
    stay = len(home.snapshot.nodes) - len(nodes)
    if freed_bytes is None:
        error_console().print(f"{len(nodes)} would be dropped, {stay} stay; --yes drops them")
    else:
        freed = f"{freed_bytes / 1e6:.1f} MB are free in the tensor store; `mlflow gc` frees MLflow's own files"
        error_console().print(f"{len(nodes)} dropped, {stay} stay; {freed}")
