"""Python imports this at its start in a command that is adopted: hooks into libraries when the script imports them."""

import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

HOOKS = {
    "transformers.trainer": "ringmaster.features.external_trainers.adoption.hugging_face",
    "accelerate.accelerator": "ringmaster.features.external_trainers.adoption.accelerated",
}
"""Modules, and for each of them our module whose `patch` changes it after its import."""


class HookFinder(MetaPathFinder):
    """Finds the modules of `HOOKS` where Python does, and has them patched."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the spec of a module to patch, None for all others."""
        spec = PathFinder.find_spec(fullname, path) if fullname in HOOKS else None  # type: ignore[arg-type]
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            import_module(HOOKS[fullname]).patch(module)

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def import_shadowed() -> None:
    """Imports the module `sitecustomize` of the machine or the user, which this one hides."""
    folder = Path(__file__).parent
    sys.path = [path for path in sys.path if Path(path) != folder]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


if "RINGMASTER_ORDER" in os.environ:
    sys.meta_path.insert(0, HookFinder())
    import_shadowed()
