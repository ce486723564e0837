"""Copies of the files in a retraining run's data window, so that files that arrive later belong to the next run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path

from ringmaster.codec import digest
from ringmaster.techniques import DataSpec
from ringmaster.techniques.checkpoints.checkpoint import publish
from ringmaster.techniques.checkpoints.storage import is_url
from ringmaster.techniques.data.file_patterns import matching, opened

DATED = re.compile(r"(?<!\d)(\d{4})-?(\d{2})-?(\d{2})(?!\d)")


@dataclass(frozen=True, kw_only=True)
class FrozenData:
    """Data that no longer changes. files: (name, a text that changes with the content) of each training file."""

    data: DataSpec
    files: tuple[tuple[str, str], ...] = ()


def freeze(spec: DataSpec, *, run_date: str, window_days: int | None, folder: Path) -> FrozenData:
    """Copies the current files of `spec` below `folder` and returns data that refers to the copies.

    Data without files is returned unchanged. window_days: of the files with a date in their name, such as 2026-11-20,
    only those of the last `window_days` days up to the run's own are copied; later ones belong to the next run. Files
    without a date are always copied. The folder of a copy is named after the digest of its files, so that runs share
    equal copies. Raises ValueError if no file is left.
    """
    if spec.path is None:
        return FrozenData(data=spec)
    path, files = _copied(spec.path, folder=folder, run_date=run_date, window_days=window_days)
    held_out = None if spec.held_out_path is None else _copied(spec.held_out_path, folder=folder, run_date=run_date)[0]
    return FrozenData(data=replace(spec, path=path, held_out_path=held_out), files=files)


def _copied(
    pattern: str, *, folder: Path, run_date: str, window_days: int | None = None
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Copies the files of a pattern or URL; returns a pattern for the copies, and the files' names and states."""
    found = matching(pattern)
    if window_days is not None:
        names = _within(found.names, run_date=date.fromisoformat(run_date), window_days=window_days)
        if not names:
            raise ValueError(
                f"path {pattern!r} has no file of the {window_days} days up to {run_date}. To fix: widen window_days"
            )
        found = found.only(names)
    files = tuple((str(name), " ".join(map(str, said))) for name, *said in found.state())
    target = folder / digest([pattern, files])
    if not target.is_dir():
        with publish(target) as aside:
            for name in found.names:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                with opened(found.path(name)) as source, (aside / name).open("wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
    if is_url(pattern):
        return str(target / (found.names[0] if len(found.names) == 1 else "**/*")), files
    return str(target / Path(pattern).relative_to(found.root)), files


def drop_others(folder: Path, *, keep: Iterable[str]) -> None:
    """Removes the copies below `folder`, except those that contain a path of `keep`."""
    kept = {Path(path).relative_to(folder).parts[0] for path in keep if Path(path).is_relative_to(folder)}
    for copy in folder.iterdir() if folder.is_dir() else ():
        if copy.name not in kept:
            shutil.rmtree(copy, ignore_errors=True)


def _within(names: Sequence[str], *, run_date: date, window_days: int) -> list[str]:
    first = run_date - timedelta(days=window_days - 1)
    return [name for name in names if (day := _date_in(name)) is None or first <= day <= run_date]


def _date_in(name: str) -> date | None:
    """Returns the last date in a name; digits that form no date, such as 2026-13-45, are skipped."""
    for year, month, day in reversed(DATED.findall(name)):
        try:
            return date(int(year), int(month), int(day))
        except ValueError:
            continue
    return None
