"""The folders in which an endpoint keeps its clients: their adapters, what is stored of their state, and checkpoints.

FOLDER/clients/CLIENT/client.json            the adapter's spec
                      state.safetensors      its weights, moments and gradients, as of a record of the journal
       checkpoints/CLIENT/NAME/              an adapter in peft's format, and optimizer.safetensors
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from ringmaster.features.endpoint.compute.client_adapter import ClientAdapter
from ringmaster.features.endpoint.compute.requests import AdapterSpec
from ringmaster.files import folders_in, read_value, write_atomically, write_value
from ringmaster.techniques.checkpoints.storage import sync_path
from ringmaster.techniques.checkpoints.tensor_files import blocks_of

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")
SPEC, STATE = "client.json", "state.safetensors"


@dataclass(frozen=True, kw_only=True)
class StoredClient:
    """What is known of a client without its tensors. number: of the first journal record that may concern it."""

    spec: AdapterSpec
    number: int


def check_name(name: str, *, what: str) -> None:
    """Raises ValueError where a name of a client or checkpoint cannot be a file's."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{what}: {name!r} is not a name. To fix: use up to 128 letters, digits, and any of _.:-")


class ClientFolders:
    """The clients of an endpoint on disk."""

    def __init__(self, folder: Path) -> None:
        self._clients, self._checkpoints = folder / "clients", folder / "checkpoints"

    def stored(self) -> Iterator[tuple[str, StoredClient]]:
        """Yields the clients."""
        for folder in sorted(folders_in(self._clients)):
            if (client := read_value(StoredClient, folder / SPEC)) is not None:
                yield folder.name, client

    def add(self, client: str, stored: StoredClient) -> None:
        """Stores a new client."""
        self.remove(client)
        write_value(stored, self._clients / client / SPEC)
        sync_path(self._clients / client)
        sync_path(self._clients)

    def remove(self, client: str) -> None:
        """Removes a client, but not its checkpoints."""
        shutil.rmtree(self._clients / client, ignore_errors=True)

    def write(self, client: str, adapter: ClientAdapter, *, number: int) -> None:
        """Stores the state of a client as it is before journal record `number`."""
        tensors = {name: value.detach().cpu() for name, value in adapter.state().items()}
        metadata = {"step": str(adapter.step), "number": str(number), "grad_norm": json.dumps(adapter.grad_norm)}
        write_atomically(self._clients / client / STATE, *blocks_of(tensors, metadata=metadata), mode=0o600)
        sync_path(self._clients / client)

    def restore(self, client: str, adapter: ClientAdapter) -> int | None:
        """Restores a client's stored state; returns the record that follows it, None where there is no state."""
        path = self._clients / client / STATE
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            adapter.restore(
                {name: file.get_tensor(name) for name in file.keys()},  # noqa: SIM118
                step=int(metadata["step"]),
                grad_norm=json.loads(metadata.get("grad_norm", "null")),
            )
        return int(metadata["number"])

    def checkpoint(self, client: str, name: str) -> Path:
        """Returns the folder of a checkpoint. Raises ValueError where the name cannot be a folder's."""
        for part in name.split("/"):
            check_name(part, what="checkpoint")
        return self._checkpoints / client / name
