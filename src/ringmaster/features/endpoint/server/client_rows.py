"""The clients of endpoints as rows of `ringmaster status`."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringmaster.files import folders_in
from ringmaster.flows import settings

if TYPE_CHECKING:
    from ringmaster.flows.reports.watch import StatusRun

IDLE_AFTER_S = 2.0
SQL = """
SELECT clients.*, (SELECT COUNT(*) FROM requests WHERE stream = clients.id AND state = 'waiting') AS num_waiting
FROM clients WHERE NOT is_ended ORDER BY created_s
"""


def endpoint_runs() -> Iterator[StatusRun]:
    """Yields the clients of each endpoint of this home."""
    from ringmaster.features.endpoint.server.endpoint_server import FOLDER, SERVER_FILE, STORE_FILE
    from ringmaster.flows.reports.watch import StatusRun

    for folder in sorted(folders_in(settings.home() / FOLDER)):
        file = folder / STORE_FILE
        try:
            rows = client_rows(file, endpoint=folder.name, is_served=(folder / SERVER_FILE).exists())
        except sqlite3.Error as error:
            yield StatusRun(batch=folder.name, folder=folder, rows=[], fault=f"{file} cannot be read: {error}")
        else:
            yield StatusRun(batch=folder.name, folder=folder, rows=rows)


def client_rows(file: Path, *, endpoint: str, is_served: bool) -> list[dict[str, Any]]:
    """Returns a row for each live client.

    Beside the keys of all rows: `base`, `rank`, `tokens_per_s` while it computes, `share` of the device time of all
    clients, and `idle_s` since its last answer.
    """
    if not file.exists():
        return []
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=5.0)) as connection:
        connection.row_factory = sqlite3.Row
        clients = connection.execute(SQL).fetchall()
    total_s = sum(client["device_s"] for client in clients)
    now_s = time.time()
    return [_row(client, endpoint, total_s=total_s, now_s=now_s, is_served=is_served) for client in clients]


def _row(client: sqlite3.Row, endpoint: str, *, total_s: float, now_s: float, is_served: bool) -> dict[str, Any]:
    rank = json.loads(client["spec"])["rank"]
    share = client["device_s"] / total_s if total_s else 0.0
    tokens_per_s = client["num_tokens"] / client["device_s"] if client["device_s"] else 0.0
    idle_s = 0.0 if client["num_waiting"] else max(0.0, now_s - client["active_s"])
    status = "stopped" if not is_served else "idle" if idle_s > IDLE_AFTER_S else "running"
    idle = f", idle for {idle_s:.0f} s" if status == "idle" else ""
    speed = f", {tokens_per_s:.0f} tokens/s" if tokens_per_s else ""
    return {
        "batch": endpoint,
        "run": "endpoint",
        "job": client["name"],
        "status": status,
        "step": client["step"],
        "message": f"{client['base']}, rank {rank}{speed}, share {share:.0%}{idle}",
        "leader": None,
        "option": "",
        "num_steps": None,
        "figures": {},
        "ends_in": None,
        "client": client["id"],
        "owner": client["owner"],
        "base": client["base"],
        "rank": rank,
        "tokens_per_s": tokens_per_s,
        "share": share,
        "idle_s": idle_s,
    }
