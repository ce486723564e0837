"""The files of a night: those of its data window, copied when it begins, so that what comes later is tomorrow's."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path

from ringmaster.techniques import DataSpec
from ringmaster.techniques.engine.data.files import is_url, matching, opened
from ringmaster.techniques.engine.publish import publish
from ringmaster.techniques.values import digest

DATED = re.compile(r"(?<!\d)(\d{4})-?(\d{2})-?(\d{2})(?!\d)")


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """Data that does not change any more. files: that it is trained on: their names, and what changes as they do."""

    data: DataSpec
    files: tuple[tuple[str, str], ...] = ()


def freeze(spec: DataSpec, *, night: str, window_days: int | None, folder: Path) -> Frozen:
    """The data with its files as they are now, copied below `folder`; data that is no files stays as it is.

    window_days: files with a date in their name, such as 2026-11-20, are read where they are of the last so many days,
    the night's own included; those of later days are the next night's. Files without a date are always read. Equal
    files are copied once, whatever night it is: their folder is named after what is in it. Raises ValueError where no
    file is left.
    """
    if spec.path is None:
        return Frozen(data=spec)
    path, files = _copied(spec.path, folder=folder, night=night, window_days=window_days)
    held_out = None if spec.held_out_path is None else _copied(spec.held_out_path, folder=folder, night=night)[0]
    return Frozen(data=replace(spec, path=path, held_out_path=held_out), files=files)


def _copied(
    pattern: str, *, folder: Path, night: str, window_days: int | None = None
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """A pattern of copies of the files that a pattern or a URL names, and which they are."""
    found = matching(pattern)
    if window_days is not None:
        names = _within(found.names, night=date.fromisoformat(night), window_days=window_days)
        if not names:
            raise ValueError(
                f"path {pattern!r} has no file of the {window_days} days up to {night}. To fix: widen window_days"
            )
        found = replace(found, names=tuple(names))
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
    """Removes the copies below `folder` but for those that a path of `keep` lies in."""
    kept = {Path(path).relative_to(folder).parts[0] for path in keep if Path(path).is_relative_to(folder)}
    for copy in folder.iterdir() if folder.is_dir() else ():
        if copy.name not in kept:
            shutil.rmtree(copy, ignore_errors=True)


def _within(names: Sequence[str], *, night: date, window_days: int) -> list[str]:
    first = night - timedelta(days=window_days - 1)
    return [name for name in names if (day := _date_in(name)) is None or first <= day <= night]


def _date_in(name: str) -> date | None:
    """The last date that a name has; digits that are none, such as 2026-13-45, are passed over."""
    for year, month, day in reversed(DATED.findall(name)):
        try:
            return date(int(year), int(month), int(day))
        except ValueError:
            continue
    return None
