"""Adapters whose base folder no longer exists, rewritten to name another base folder. Imports no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ringmaster.techniques.models.adapters.peft_format import CONFIG, is_adapter, read_config
from ringmaster.techniques.runtime.checkpoints.publish import publish

NAMED = "base_model_name_or_path"


def has_lost_base(folder: Path) -> bool:
    """Returns whether a folder holds an adapter on a base in a folder that no longer exists."""
    if not is_adapter(folder):
        return False
    named = read_config(folder).get(NAMED)
    return isinstance(named, str) and Path(named).is_absolute() and not Path(named).is_dir()


def on_base(folder: Path, base: Path, *, copy: Path) -> Path:
    """Returns a copy of an adapter that names `base`, a folder; an existing copy whose base exists is reused."""
    if copy.is_dir() and not has_lost_base(copy):
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    with publish(copy) as aside:
        shutil.copytree(folder, aside, dirs_exist_ok=True)
        said = {**read_config(folder), NAMED: str(base.absolute())}
        (aside / CONFIG).unlink()  # the copied file may be read-only
        (aside / CONFIG).write_text(json.dumps(said, indent=2, sort_keys=True))
    return copy
