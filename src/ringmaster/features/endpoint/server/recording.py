"""The lineage of an endpoint: the adapter of each client that has ended, under its base, with the losses it asked for.

`python -m ringmaster.features.endpoint.server.recording ENDPOINT_FILE` records what is not recorded yet: in a process
of its own, as MLflow takes seconds, which clients would wait.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from ringmaster.errors import input_errors
from ringmaster.features.endpoint.server.endpoint_file import load_endpoint_file
from ringmaster.features.endpoint.server.endpoint_server import endpoint_folder, open_store
from ringmaster.features.endpoint.server.endpoint_service import FINAL
from ringmaster.features.endpoint.server.messages import CheckpointUri
from ringmaster.features.endpoint.server.store import ClientCheckpoint, EndpointStore, TrainingClient
from ringmaster.flows import settings
from ringmaster.flows.file_permissions import set_umask
from ringmaster.flows.lineage.home import LineageHome, lineage_home
from ringmaster.flows.output import notice
from ringmaster.model_lineage.records import Origin

MAX_NAME = 100


def model_name(endpoint: str, client: TrainingClient) -> str:
    """Returns the name under which a client's adapter is registered: ENDPOINT.NAME."""
    name = re.sub(r"[^\w.-]+", "-", client.name).strip("-.")[:MAX_NAME]
    return f"{endpoint}.{name or 'client'}"


def record_clients(home: LineageHome, store: EndpointStore, *, endpoint: str, bases: Mapping[str, str]) -> list[str]:
    """Records the clients that have ended since; returns the addresses of their models, such as `models:/x/1`."""
    uris = []
    for client in store.clients(where="is_ended AND NOT is_recorded"):
        if client.base not in bases:
            continue  # recorded once its base is served again
        uri = CheckpointUri(model=client.id, kind="weights", name=FINAL)
        checkpoint = store.checkpoint(str(uri), owner=client.owner)
        if checkpoint is not None and checkpoint.folder.is_dir():
            uris.append(_record(home, client, checkpoint, endpoint=endpoint, base=bases[client.base]))
        store.note_recorded(client.id)
    return uris


def _record(
    home: LineageHome, client: TrainingClient, checkpoint: ClientCheckpoint, *, endpoint: str, base: str
) -> str:  # fmt: skip
    from ringmaster.model_lineage.base_models import record_base

    parent = record_base(home.ledger, base, store=home.store)
    facts = {
        "base": client.base,
        "client": client.name,
        "client_id": client.id,
        "losses": ", ".join(client.losses),
        **{key: value for key, value in client.spec.items() if value is not None},
        "num_steps": client.step,
        "num_tokens": client.num_tokens,
    }
    name = model_name(endpoint, client)
    run = home.ledger.start_batch(f"endpoint {name}", params=facts, batch=endpoint, key=f"endpoint {client.id}")
    losses = ", ".join(client.losses) or "no loss"
    record = home.ledger.record_model(
        name,
        run_id=run,
        folder=checkpoint.folder,
        kind="lora",
        parents=[parent],
        params=facts,
        description=f"Trained by the client {client.name} of the endpoint {endpoint} with {losses}.",
        origin=Origin(
            job=client.name,
            num_steps=client.step,
            seed=client.spec.get("seed"),
            checkpoints=str(checkpoint.folder),
            technique="endpoint",
        ),
    )
    home.ledger.keep_tensors(record, checkpoint.folder, store=home.store)
    home.ledger.finish_run(run)
    return record.uri


def main() -> None:
    """Records the ended clients of the endpoint in the file that is named."""
    set_umask()
    entry = load_endpoint_file(Path(sys.argv[1]))
    folder = endpoint_folder(settings.home(), entry.name)
    bases = {base.name: base.from_pretrained for base in entry.serve.bases}
    with (
        closing(open_store(folder)) as store,
        lineage_home(writes=True) as home,
        input_errors(OSError),
    ):
        for uri in record_clients(home, store, endpoint=entry.name, bases=bases):
            notice(f"recorded: {uri}")


if __name__ == "__main__":
    main()
