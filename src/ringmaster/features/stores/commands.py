"""The commands of knowledge stores: `ringmaster store`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from ringmaster.errors import InputError, input_errors
from ringmaster.files import text_of
from ringmaster.flows import output
from ringmaster.flows.lineage.home import LineageHome, Model, lineage_home
from ringmaster.model_lineage.records import INDEXED, DatasetInput

if TYPE_CHECKING:
    from ringmaster.features.stores.knowledge_store import KnowledgeStore
    from ringmaster.model_lineage.snapshot import LineageNode

app = typer.Typer(no_args_is_help=True, help="Knowledge stores: change their passages, and search them.")


@app.command()
def update(
    store: Model,
    data: Annotated[
        str | None, typer.Option(help="Files of passages to add; those whose ids are there replace them.")
    ] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Id to remove; or @FILE, with an id a line.")] = None,
    as_json: output.AsJson = False,
) -> None:
    """Record a new version of a store with other passages; only new ones are encoded, and no model changes."""
    from ringmaster.features.stores.knowledge_store import Passage
    from ringmaster.features.stores.passages import read_passages

    with lineage_home(is_fresh=True, writes=True) as home, TemporaryDirectory(dir=home.folder) as aside:
        with input_errors(), output.working("encoding the new passages"):
            node, old = _open(home, store)
            names = [name for each in remove or [] for name in _ids(each)]
            added = [Passage(*each) for each in (read_passages(data, old.manifest.settings) if data else [])]
            gone = old.ids_of(names) | old.ids_of([each.id for each in added], may_lack=True)
            new = old.update(removed=gone, added=added, folder=Path(aside, "store"))
        run_id = home.ledger.start_batch(
            f"update of {node.label}", params={"store": new.digest}, key=f"store {node.id} {new.digest}"
        )
        record = home.ledger.record_model(
            node.record.registered_name,
            run_id=run_id,
            folder=new.folder,
            kind=INDEXED,
            parents=[node.record.uri],
            datasets=[DatasetInput(name=data, digest=new.manifest.chain[-1], source=data, num_rows=len(added))]
            if data
            else [],
            params={"num_removed": len(gone), "num_added": len(added), "store": new.digest},
            metrics={"index_recall": new.manifest.recall, "num_passages": len(new.passages)},
        )
        home.ledger.keep_tensors(record, new.folder, store=home.store)
        home.ledger.finish_run(run_id)
    label = f"{record.registered_name}/{record.version}"
    facts = {"num_removed": len(gone), "num_added": len(added), "num_passages": len(new.passages)}
    sentence = f"{label} is recorded: {len(gone)} passages removed, {len(added)} added"
    output.print_outcome({"store": label, "digest": new.digest, **facts}, [sentence], as_json=as_json)


@app.command()
def search(
    store: Annotated[str, typer.Argument(help="Store, named as a model is, or its folder.")],
    question: Annotated[str, typer.Argument(help="Text to compare with the passages.")],
    num_passages: Annotated[int, typer.Option("-k", help="Number of passages.", min=1)] = 8,
    as_json: output.AsJson = False,
) -> None:
    """List the passages of a store that are most similar to a text."""
    from ringmaster.features.stores.knowledge_store import KnowledgeStore

    with lineage_home() as home, input_errors():
        folder = Path(store)
        opened = KnowledgeStore.open(folder) if folder.is_dir() else _open(home, store)[1]
        (passages,) = opened.search_texts(texts=[question], num_passages=num_passages)
    rows = [asdict(each) for each in passages]
    output.print_json({"passages": rows}) if as_json else output.print_rows(output.output_console(), rows)


def _open(home: LineageHome, name: str) -> tuple[LineageNode, KnowledgeStore]:
    from ringmaster.features.stores.knowledge_store import KnowledgeStore

    node = home.find(name)
    if node.record.kind != INDEXED:
        raise InputError([f"{node.label} is not a knowledge store. To fix: name one, made by a job of kind store"])
    return node, KnowledgeStore.open(home.model_dir(node))


def _ids(text: str) -> list[str]:
    if not text.startswith("@"):
        return [text]
    with input_errors(
        OSError, ValueError, about=f"{text[1:]} cannot be read: ", remedy="name a text file, one id a line"
    ):
        return text_of(Path(text[1:])).split()


COMMAND_GROUPS = ((app, "store", "Data"),)
