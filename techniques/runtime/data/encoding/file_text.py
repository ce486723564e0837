"""A part of a text file that is read when it is needed, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringmaster.techniques.runtime.data.rows import TextInPieces, read_text


@dataclass(frozen=True)
class FileText(TextInPieces):
    """The characters of a file from `start` up to `stop`, which is left out; None for its end."""

    path: str
    start: int = 0
    stop: int | None = None

    def pieces(self) -> Iterator[str]:
        """Yields the text in pieces. Raises ValueError where the file cannot be read."""
        place = 0
        for piece in read_text(self.path):
            wanted = piece[max(self.start - place, 0) : None if self.stop is None else max(self.stop - place, 0)]
            place += len(piece)
            if wanted:
                yield wanted
            if self.stop is not None and place >= self.stop:
                return


def split_text(text: FileText, *, share: float) -> tuple[FileText, FileText | None]:
    """Returns the training part of a whole file and its held-out `share`, which begins with a line; None if empty."""
    if not share:
        return text, None
    length = sum(map(len, text.pieces()))
    end = round(length * (1 - share))
    line = place = 0
    for piece in replace(text, stop=end).pieces():
        line = place + found + 1 if (found := piece.rfind("\n")) >= 0 else line
        place += len(piece)
    cut = line or end
    return replace(text, stop=cut), replace(text, start=cut) if cut < length else None
