"""A model registry in memory that may die after a number of alias moves."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ringmaster.errors import LedgerError
from ringmaster.model_lineage import DatasetInput, ModelRecord, Origin


class Died(Exception):
    """Stands for the sudden death of the process."""


def version(number: int, *, digest: str = "d0", name: str = "shop.prices") -> ModelRecord:
    """Version `number`, trained on data of `digest`."""
    return ModelRecord(
        model_id=f"m-{name}-{number}",
        registered_name=name,
        version=number,
        uri=f"models:/{name}/{number}",
        origin=Origin(retraining="shop"),
        datasets=(
            DatasetInput(name="data", digest=f"held out of {digest}", source="x", context="evaluation"),
            DatasetInput(name="data", digest=digest, source="x"),
        ),
    )


class FakeLedger:
    """The methods of a ledger that promotion needs. moves_left: alias moves before it dies."""

    def __init__(self, models: Sequence[ModelRecord], *, moves_left: int = 1000, **aliases: int) -> None:
        self.records = list(models)
        self.aliases = dict(aliases)
        self.moves_left = moves_left
        self.tags: dict[int, dict[str, str]] = {}
        self.tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.redrawn: list[int | None] = []

    def check_use(self, record: ModelRecord, use: str) -> None:
        """No policy asks for signatures."""

    def models(self) -> list[ModelRecord]:
        return self.records

    def get_version(self, name: str, number: int) -> ModelRecord | None:
        return next((r for r in self.records if (r.registered_name, r.version) == (name, number)), None)

    def get_alias(self, name: str, alias: str) -> ModelRecord | None:
        of_name = {model.version: model for model in self.records if model.registered_name == name}
        return of_name.get(self.aliases[alias]) if alias in self.aliases else None

    def set_alias(self, name: str, alias: str, number: int) -> None:
        if self.moves_left == 0:
            raise Died
        self.moves_left -= 1
        self.aliases[alias] = number

    def delete_registered_model_alias(self, name: str, alias: str) -> None:
        if self.moves_left == 0:
            raise Died
        self.moves_left -= 1
        del self.aliases[alias]

    def set_model_version_tag(self, name: str, number: str, key: str, value: str) -> None:
        self.tags.setdefault(int(number), {})[key] = value

    def get_model_version(self, name: str, number: str) -> Any:
        return SimpleNamespace(tags=self.tags.get(int(number), {}))

    def resolve_model(self, uri: str) -> ModelRecord:
        if (known := next((model for model in self.records if model.uri == uri), None)) is None:
            raise LedgerError(f"there is no model {uri}", code="RESOURCE_DOES_NOT_EXIST")
        return known

    def write_table(self, run_id: str, path: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.tables[run_id, path] = [dict(row) for row in rows]

    def read_table(self, run_id: str, path: str) -> list[dict[str, Any]]:
        if (run_id, path) not in self.tables:
            raise LedgerError(f"run {run_id} has no {path}")
        return self.tables[run_id, path]

    def read_text(self, run_id: str, path: str) -> str:
        if (run_id, path) not in self.tables:
            raise LedgerError(f"run {run_id} has no {path}")
        return str(self.tables[run_id, path])

    def redraw(self, *records: ModelRecord) -> None:
        self.redrawn = [record.version for record in records]

    @property
    def client(self) -> "FakeLedger":
        return self
