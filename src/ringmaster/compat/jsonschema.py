"""Undocumented imports of jsonschema. Importing this imports no jsonschema."""

import importlib
import sys

GRAMMAR = "rfc3987_syntax"


def import_without_iris() -> None:
    """Imports jsonschema without the package that checks its formats `iri` and `iri-reference`.

    Where that package is installed, jsonschema imports it and so makes a parser, which no setting prevents. Prefect
    imports jsonschema. Without this the import of Prefect takes twice as long, in a run and in its server.
    """
    if GRAMMAR in sys.modules or "jsonschema" in sys.modules:
        return
    sys.modules[GRAMMAR] = None  # type: ignore[assignment] # an import of it raises ImportError, which jsonschema expects
    try:
        importlib.import_module("jsonschema")
    finally:
        del sys.modules[GRAMMAR]
