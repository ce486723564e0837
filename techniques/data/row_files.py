"""Reads the rows of text, JSONL, CSV and Parquet files one after another, each with its number.

The memory that a file or a row may take is limited for all formats: a file of 100 kB may decompress to gigabytes, and a
line may be as long as its file. The number of rows is not limited.
"""

import codecs
import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import pyarrow.parquet  # type: ignore[import-untyped]

from ringmaster.techniques.data.class_labels import with_class_names
from ringmaster.techniques.data.file_patterns import FileRange, opened

MAX_ROW_BYTES = 64 * 2**20
"""The largest row: a line of JSONL, a row of Parquet, or an image."""
MAX_EXPANSION, MIN_EXPANDED_BYTES = 200, 2**28
"""A compressed file's rows have at most so many times its bytes, where they have more than `MIN_EXPANDED_BYTES`."""
MAX_TOKENIZER_BYTES = 2**28
"""The largest `tokenizer.json`; those of a quarter of a million tokens have 35 MB."""


def row_too_large(place: str) -> ValueError:
    """Returns what is to be raised for a row of more than `MAX_ROW_BYTES`."""
    return ValueError(
        f"{place} has more than {MAX_ROW_BYTES / 2**20:.0f} MiB, which is the most that a row may have. To fix: divide "
        "it into several rows; for a text of many lines, give a .txt file, which is read in pieces"
    )


TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model", "sentencepiece*")
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", *TOKENIZER_FILES[1:])


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a model's folder holds the files of a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def has_vocabulary(folder: Path) -> bool:
    """Returns whether a model's folder holds the tokens of a tokenizer; an adapter may have its settings alone."""
    return any(any(folder.glob(pattern)) for pattern in VOCABULARY_FILES)


def check_tokenizer(folder: Path) -> None:
    """Raises ValueError where the tokenizer in a folder is larger than `MAX_TOKENIZER_BYTES`."""
    for file in folder.glob("*.json"):
        if file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ValueError(
                f"{file} has {file.stat().st_size / 2**20:,.0f} MiB, and the files of a tokenizer have at most "
                f"{MAX_TOKENIZER_BYTES / 2**20:.0f}. To fix: check the file"
            )


def check_expansion(path: str, num_bytes: int, *, num_stored_bytes: int) -> None:
    """Raises ValueError where a compressed file of `num_stored_bytes` becomes too many bytes."""
    if num_bytes > max(MIN_EXPANDED_BYTES, MAX_EXPANSION * num_stored_bytes):
        raise ValueError(
            f"{path} has {num_stored_bytes:,} bytes and decompresses to {num_bytes / 2**20:,.0f} MiB "
            f"or more; {MIN_EXPANDED_BYTES / 2**20:.0f} MiB, or {MAX_EXPANSION} times the file, are allowed. To "
            "fix: check what wrote it; store values that are not repeated so often, or give JSONL"
        )


def lines_of(text: io.TextIOWrapper, path: str, *, first_line: int = 1) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text with their numbers. Raises ValueError on one of more than `MAX_ROW_BYTES` characters.

    A longer line is not read to its end.
    """
    number = first_line
    while line := text.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            raise row_too_large(f"{path}, line {number}")
        yield number, line
        number += 1


SUFFIXES = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
ARRAY_REMEDY = "make a line of each object of an array: jq -c '.[]' FILE > rows.jsonl"
TABLE_REMEDY = "save it as CSV, with values separated by commas"
COMPRESSIONS = {
    ".gz": (b"\x1f\x8b", "gzip -dc"),
    ".zip": (b"PK\x03\x04", "unzip -p"),
    ".bz2": (b"BZh", "bzip2 -dc"),
    ".xz": (b"\xfd7zXZ", "xz -dc"),
    ".zst": (b"\x28\xb5\x2f\xfd", "zstd -dc"),
}
"""The endings of compressed files, the bytes that these begin with, and the commands that decompress them."""
OTHER_SUFFIXES = {
    ".json": f"set format to jsonl if each line is an object; or {ARRAY_REMEDY}",
    **{ending: f"decompress it: {command} FILE > OTHER" for ending, (_, command) in COMPRESSIONS.items()},
    **dict.fromkeys((".tsv", ".tab"), f"{TABLE_REMEDY}: pandas.read_csv('FILE', sep='\\t').to_csv(OTHER, index=False)"),
    **dict.fromkeys((".xls", ".xlsx", ".ods"), TABLE_REMEDY),
}
"""Endings of files that are not read, and what makes them files that are."""
FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))
CHARACTERS_PER_READ = 1 << 16
ROWS_PER_BATCH, BYTES_PER_READ = 1024, 1 << 20
BYTES_PER_BATCH, REPEATED_ROWS_PER_BATCH = 16 << 20, 64
# The most faults that are reported at once, and how many rows after the first fault are searched for others.
MAX_FAULTS, ROWS_AFTER_A_FAULT = 5, 100_000
# The values of a column of classes, by which rows inside a value in quotes are told from text of several lines.
MAX_CLASSES, MAX_CLASS_CHARACTERS, MAX_SUSPECTS = 100, 64, 1000

BYTE_ORDER_MARK = "\ufeff"
BYTE_ORDER_MARKS = (
    ((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-32"),  # first, as that of UTF-16 is a part of it
    ((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16"),
)
QUOTE_REMEDY = 'close the quote where the value ends, and double each quote inside a value, as in "5"" long"'
SPACE_REMEDY = (
    "remove spaces before quotes, e.g. with pandas: read_csv('FILE', skipinitialspace=True).to_csv(OTHER, index=False)"
)
NUL_REMEDY = "write it as UTF-8, e.g. from UTF-16: iconv -f UTF-16LE -t UTF-8 FILE > OTHER"

# Once, as making one takes as long as a short row.
_PLAIN = json.JSONEncoder(default=str)
_TEXT = json.encoder.encode_basestring_ascii
_VERBATIM = json.JSONEncoder(ensure_ascii=False, default=str)
_SORTED = json.JSONEncoder(sort_keys=True, default=str)


@dataclass(frozen=True)
class RowError:
    """What is wrong with a row, and how to mend it."""

    place: str
    what: str
    remedy: str


class RowErrors(ValueError):
    """Some rows of a file are wrong; the message has the first few of them, each with its line."""

    def __init__(self, faults: Sequence[RowError]) -> None:
        self.faults = tuple(faults)
        problems = "; ".join(f"{fault.place} {fault.what}" for fault in faults)
        remedies = "; ".join(dict.fromkeys(fault.remedy for fault in faults))
        super().__init__(f"{problems}. To fix: {remedies}")


def format_of(path: str, given: str | None = None) -> str:
    """Returns the format of a file: `given`, or that of its suffix. Raises ValueError on others."""
    suffix = PurePosixPath(path).suffix.lower()
    result = given or SUFFIXES.get(suffix)
    if result is None:
        remedy = OTHER_SUFFIXES.get(
            suffix, f"name files that end in {', '.join(SUFFIXES)}, or give their format: {', '.join(FORMATS)}"
        )
        raise ValueError(f"{path} ends in {suffix or 'nothing'}. To fix: {_naming(path, remedy)}")
    return result


def _naming(path: str, remedy: str) -> str:
    """A remedy for the file at a path."""
    return remedy.replace("FILE", PurePosixPath(path).name)


def read_rows(
    path: str, *, format: str | None = None, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file, local or at a URL, with their numbers from 1.

    A row is a mapping, or the whole text of a text file. columns: the columns that are needed; where the format allows
    it, others are not read. Raises ValueError, with the file and the lines, where rows cannot be read.
    """
    if format_of(path, format) == "text":
        yield 1, "".join(read_text(path))
        return
    yield from checked(rows_and_errors(path, format=format, columns=columns))


def rows_and_errors(
    path: str, *, format: str | None = None, columns: Sequence[str] | None = None, lines: FileRange | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields the rows of a file that is not text, with their numbers, and a `RowError` for each wrong one.

    lines: the lines that are read, for JSONL alone; None for all.
    """
    kind = format_of(path, format)
    with opened(path, lines) as stream:
        try:
            if kind == "parquet":
                yield from _parquet(stream, path, columns)
            elif kind == "csv":
                yield from _csv(stream, path)
            else:
                yield from _jsonl(stream, path, columns, first_line=1 if lines is None else lines.first_line)
        except UnicodeDecodeError as error:
            broken = ValueError(f"{path} cannot be read: {error}. To fix: check the file")
            raise (broken if kind == "parquet" else not_utf8(path)) from error


def checked(results: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Yields numbered results up to the first `RowError`; raises it with those that follow it soon."""
    for number, result in results:
        if isinstance(result, RowError):
            others = (other for _, other in islice(results, ROWS_AFTER_A_FAULT) if isinstance(other, RowError))
            raise RowErrors([result, *islice(others, MAX_FAULTS - 1)])
        yield number, result


def read_text(path: str) -> Iterator[str]:
    r"""Yields the text of a file in pieces, with `\n` at the end of each line."""
    with opened(path) as stream:
        try:
            with io.TextIOWrapper(stream, encoding="utf-8-sig") as text:
                while piece := text.read(CHARACTERS_PER_READ):
                    if piece.count("\0") > len(piece) // 4:
                        raise ValueError(
                            f"{path} is not text but bytes of which many are NUL. To fix: {_naming(path, NUL_REMEDY)}"
                        )
                    yield piece
        except UnicodeDecodeError as error:
            raise not_utf8(path) from error


def not_utf8(path: str) -> ValueError:
    """Returns what is to be raised for a text file with other bytes than UTF-8, with the first of them."""
    with opened(path) as stream:
        begin = stream.read(6)
    if ending := next((ending for ending, (mark, _) in COMPRESSIONS.items() if begin.startswith(mark)), None):
        return ValueError(
            f"{path} is compressed, as {ending} files are. To fix: {_naming(path, OTHER_SUFFIXES[ending])}"
        )
    result: list[str] = []
    offset = 0
    with opened(path) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                result.append(f"line {number} at byte {offset + error.start} of the file (0x{line[error.start]:02x})")
            offset += len(line)
            if len(result) == MAX_FAULTS:
                break
    encoding = next((name for marks, name in BYTE_ORDER_MARKS if begin.startswith(marks)), None)
    where = f"in {', '.join(result)}" if encoding is None else f"but {encoding}, by its byte order mark"
    remedy = f"convert it{', e.g. from Latin-1' if encoding is None else ''}"
    return ValueError(
        f"{path} cannot be read: it is not UTF-8 {where}. To fix: {remedy}: iconv -f {encoding or 'ISO-8859-1'} "
        f"-t UTF-8 {PurePosixPath(path).name} > converted"
    )


@dataclass(frozen=True)
class FileText:
    """The characters of a text file from `start` up to `stop`, which is left out; None for its end.

    They are read when they are needed, a piece at a time.
    """

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


def content_hash(content: Any) -> str:
    """Returns a hash of a row's content, which depends neither on its position nor on the order of its keys."""
    return hash_bytes(content).hex()


def hash_bytes(content: Any) -> bytes:
    """Returns the 8 bytes of `content_hash`; a `FileText` has the hash of its text."""
    if isinstance(content, FileText):
        sha = hashlib.sha256()
        for piece in content.pieces():
            sha.update(piece.encode())
        return sha.digest()[:8]
    text = content if isinstance(content, str) else to_json_text(content, is_sorted=True)
    return hashlib.sha256(text.encode()).digest()[:8]


def hash_and_position(content: Any) -> tuple[bytes, bytes]:
    """Returns the hash of a row's content, and the one by which a share of rows is held out: 8 bytes each.

    They differ for JSON values, whose keys are sorted for the former alone.
    """
    result = hash_bytes(content)
    if not isinstance(content, (dict, list)):
        return result, result
    return result, hashlib.sha256(to_json_text(content).encode()).digest()[:8]


def to_json_text(content: Any, *, is_sorted: bool = False) -> str:
    """Returns what `json.dumps` returns for a row's content, its keys in their order or sorted."""
    if not isinstance(content, dict) or not all(type(value) is str for value in content.values()):
        return (_SORTED if is_sorted else _PLAIN).encode(content)
    # Texts alone, as most rows are: an encoder takes longer to begin than to encode them.
    items = sorted(content.items()) if is_sorted else content.items()
    return "{" + ", ".join([f"{_TEXT(name)}: {_TEXT(value)}" for name, value in items]) + "}"


def _jsonl(stream: BinaryIO, path: str, columns: Sequence[str] | None, *, first_line: int) -> Iterator[tuple[int, Any]]:
    is_first = first_line == 1
    with io.TextIOWrapper(stream, encoding="utf-8") as lines:
        for number, line in lines_of(lines, path, first_line=first_line):
            line = line.lstrip(BYTE_ORDER_MARK)  # also of files that were joined
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            begins_array, is_first = is_first and line.lstrip().startswith("["), False
            try:
                row = _DECODER.decode(line)
            except (ValueError, RecursionError) as error:
                what, remedy = _json_fault(error)
                yield number, RowError(place, what, _naming(path, ARRAY_REMEDY) if begins_array else remedy)
                if begins_array:  # whose other lines are not rows either
                    return
                continue
            if not isinstance(row, dict):
                kind = "null" if row is None else f"a {type(row).__name__}"
                is_array = isinstance(row, list) and any(isinstance(each, dict) for each in row)
                remedy = _naming(path, ARRAY_REMEDY) if is_array else 'write rows as {"text": ...}'
                yield number, RowError(place, f"is not a JSON object but {kind}", remedy)
            elif _SURROGATE.search(line) and (half := _half_character(row, columns)):
                what = f"has half of a surrogate pair, {half!r}, which is not a character"
                yield number, RowError(place, what, "write its text as UTF-8")
            else:
                yield number, row


def _json_fault(error: Exception) -> tuple[str, str]:
    """What is wrong with a line, and how to mend it."""
    if isinstance(error, RecursionError):
        return "is nested too deeply", "write rows of texts, numbers and lists"
    if isinstance(error, _RepeatedKey):
        return f"has the key {error.args[0]!r} twice", "rename one of the keys, or remove it"
    return f"is not valid JSON: {error}", "one object a line"


def _half_character(row: Mapping[str, Any], columns: Sequence[str] | None) -> str | None:
    """The first half of a surrogate pair in the columns of a row that are read, which cannot be encoded."""
    try:
        _VERBATIM.encode({name: row[name] for name in columns or row if name in row}).encode()
    except UnicodeEncodeError as error:
        return str(error.object)[error.start]
    return None


class _RepeatedKey(ValueError):
    """An object has a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys must differ: else the last value would silently be the one."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKey(next(name for name in names if names.count(name) > 1))
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _csv(stream: BinaryIO, path: str) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(MAX_ROW_BYTES)  # longer than the default of 128 KiB
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines:
        spaced = [0]
        reader = csv.reader(_csv_lines(lines_of(lines, path), path, spaced), strict=True)
        first = 1
        try:
            names = next(filter(None, reader), [])
            _check_names([name.strip() for name in names if name.strip()], f"{path}, line 1")
            if spaced[-1] and any(map(_is_quoted_after_space, names)):
                raise ValueError(f"{path}, line 1 has a space before a quote. To fix: {_naming(path, SPACE_REMEDY)}")
            suspects = _RowsInValues(names)
            first = reader.line_num + 1
            for values in reader:
                is_spaced = spaced[-1] >= first
                if values[-1:] == names[-1:] and [values[0].lstrip(BYTE_ORDER_MARK), *values[1:]] == names:
                    what = "repeats the header, as where files were joined"
                    yield reader.line_num, RowError(f"{path}, line {reader.line_num}", what, "remove the line")
                elif is_spaced and len(values) == len(names) and any(map(_is_quoted_after_space, values)):
                    place = f"{path}, line {reader.line_num}"
                    yield reader.line_num, RowError(place, "has a space before a quote", _naming(path, SPACE_REMEDY))
                elif len(values) == len(names):
                    suspects.add(values, line=first, num_lines=reader.line_num + 1 - first)
                    yield reader.line_num, dict(zip(names, values, strict=True))
                elif values:
                    what = f"has another number of values than the header: {len(values)} and not {len(names)}"
                    remedy = _naming(path, SPACE_REMEDY) if is_spaced else "put quotes around values with commas"
                    yield reader.line_num, RowError(f"{path}, line {reader.line_num}", what, remedy)
                first = reader.line_num + 1
        except csv.Error as error:
            yield first, _csv_fault(path, first, error, reader.line_num)
            return
        for line, num_rows, column in suspects.mismatches():
            what = f"has a value in quotes that holds {num_rows} rows, by their {column!r}"
            yield (
                line,
                RowError(f"{path}, line {line}", what, f"{QUOTE_REMEDY}; or give JSONL if the value is meant so"),
            )


def _csv_lines(lines: Iterable[tuple[int, str]], path: str, spaced: list[int]) -> Iterator[str]:
    """Yields lines, and appends to `spaced` the numbers of those in which a quote may begin a value after a space."""
    is_header = True
    for number, line in lines:
        if "\0" in line:
            raise csv.Error("line contains NUL")
        if is_header:
            line = line.lstrip(BYTE_ORDER_MARK)  # of which joined files may have several
            is_header = not line.strip()
            _check_separator(line.strip(), path)
        # A search of every line would take as long as all else.
        if (', "' in line or '  "' in line or line[0] == " ") and _QUOTE_AFTER_SPACE.search(line):
            spaced.append(number)
        yield line


def _is_quoted_after_space(value: str) -> bool:
    """Whether a value is in quotes behind a space, or a part of such a value up to a line end in it."""
    return value[:1] == " " and value.lstrip()[:1] == '"' and (value.rstrip()[-1] == '"' or value.count('"') % 2 == 1)


def _csv_fault(path: str, line: int, error: csv.Error, last_line: int) -> RowError:
    place = f"{path}, line {line}"
    match str(error):
        case "unexpected end of data":
            return RowError(place, "begins a value in quotes that is never closed", QUOTE_REMEDY)
        case "line contains NUL":
            return RowError(place, "has NUL bytes, so the file is not UTF-8 text", _naming(path, NUL_REMEDY))
    what = f"has a value in quotes with a quote inside it, up to line {last_line}: {error}"
    return RowError(place, what, QUOTE_REMEDY)


def _check_separator(header: str, path: str) -> None:
    """Raises ValueError where the first line of a CSV file seems to be separated by other signs than commas."""
    separators = {"\t": "tabs", ";": "semicolons", "|": "vertical bars"}
    if "," not in header and (result := next((sign for sign in separators if sign in header), None)):
        raise ValueError(
            f"{path} has one column, {header!r}, which seems to be separated by {separators[result]}. To fix: "
            f"separate values by commas, e.g. with pandas: read_csv({PurePosixPath(path).name!r}, sep={result!r})"
            ".to_csv(OTHER, index=False)"
        )


def _check_names(names: Sequence[str], where: str) -> None:
    if twice := list(dict.fromkeys(name for name in names if names.count(name) > 1)):
        repeated = " and ".join(f"two columns {name!r}" for name in twice)
        raise ValueError(f"{where} has {repeated}. To fix: rename all but one of them, or remove them")


class _RowsInValues:
    """Finds values in quotes that hold whole rows, as where a quote is closed some rows too late.

    Text of several lines is not a fault, whatever commas it has. What looks like rows is told from it by a column of
    few values, such as the class: those of all rows inside the value are among those of other rows.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._known: dict[int, set[str]] = {column: set() for column in range(len(names)) if len(names) > 1}
        self._suspects: list[tuple[int, list[list[str]]]] = []

    def add(self, values: Sequence[str], *, line: int, num_lines: int) -> None:
        """Adds a row of some lines. line: the first of them."""
        if num_lines == 1:
            for column, known in [*self._known.items()]:
                known.add(values[column][: MAX_CLASS_CHARACTERS + 1])
                if len(known) > MAX_CLASSES:
                    del self._known[column]
            return
        broken = next(place for place, value in enumerate(values) if "\n" in value or "\r" in value)
        lines = _LINE_END.split(values[broken])
        # Lines that were rows have as many commas as these. Most text of several lines has not, and is left soon.
        if values[broken].count(",") != (len(values) - 1) * (len(lines) - 1) or len(self._suspects) == MAX_SUSPECTS:
            return
        begin, *between, end = (part.split(",") for part in lines)
        rows = [[*values[:broken], *begin], *between, [*end, *values[broken + 1 :]]]
        if all(len(row) == len(values) for row in rows):
            short = [[value[: MAX_CLASS_CHARACTERS + 1] for value in row] for row in rows]
            self._suspects.append((line, short))

    def mismatches(self) -> Iterator[tuple[int, int, str]]:
        """Yields the line of each row with a value that holds rows, their number, and the column that shows it."""
        for line, rows in self._suspects:
            for column, known in self._known.items():
                if all(_is_class(row[column]) and row[column] in known for row in rows):
                    yield line, len(rows), self._names[column]
                    break


_LINE_END = re.compile(r"\r\n|\r|\n")
_QUOTE_AFTER_SPACE = re.compile(r'(?:^|,) +"(?![",\r\n]|$)')


def _is_class(value: str) -> bool:
    return bool(value.strip()) and len(value) <= MAX_CLASS_CHARACTERS


def _parquet(stream: BinaryIO, path: str, columns: Sequence[str] | None) -> Iterator[tuple[int, Any]]:
    try:
        # A buffer makes it read column chunks in parts; by default it reads them whole.
        table = pyarrow.parquet.ParquetFile(stream, buffer_size=BYTES_PER_READ)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a valid Parquet file: {error}. To fix: check the file") from error
    _check_names(table.schema_arrow.names, path)
    check = partial(check_expansion, path, num_stored_bytes=stream.seek(0, io.SEEK_END))
    classes = _declared_classes(table.schema_arrow)
    there = [name for name in columns or () if name in table.schema_arrow.names]
    number = num_bytes = 0
    for group in range(table.num_row_groups):
        num_rows = _rows_per_batch(table.metadata.row_group(group), there, check)
        for batch in table.iter_batches(batch_size=num_rows, row_groups=[group], columns=there or None):
            num_bytes += batch.nbytes
            check(num_bytes)
            may_be_large = batch.nbytes > MAX_ROW_BYTES
            for values in zip(*map(_values_of, batch.columns), strict=True):
                number += 1
                if may_be_large and sum(len(each) for each in values if isinstance(each, (str, bytes))) > MAX_ROW_BYTES:
                    raise row_too_large(f"{path}, row {number}")
                row = dict(zip(batch.schema.names, values, strict=True))
                yield number, with_class_names(row, classes) if classes else row


def class_names_in(path: str) -> dict[str, tuple[str, ...]]:
    """Returns the names of the classes whose numbers a Parquet file has, by column; {} where it cannot be read."""
    with opened(path) as stream:
        try:
            return _declared_classes(pyarrow.parquet.read_schema(stream))
        except pyarrow.ArrowInvalid:  # which reading its rows says
            return {}


def _declared_classes(schema: Any) -> dict[str, tuple[str, ...]]:
    """The names of classes, by column, that `datasets` writes into the metadata of a file: of a label, or of lists."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    result = {column: _class_names(feature) for column, feature in features.items() if column in schema.names}
    return {column: names for column, names in result.items() if names}


def _class_names(feature: Any) -> tuple[str, ...]:
    """The names of the classes that a feature of `datasets` declares, or that of a list's elements."""
    if isinstance(feature, list):
        return _class_names(feature[0]) if feature else ()
    if feature.get("_type") == "ClassLabel":
        return tuple(feature.get("names") or ())
    return _class_names(feature["feature"]) if "_type" in feature and "feature" in feature else ()


def _values_of(column: Any) -> list[Any]:
    """The values of a column of Parquet. Texts become Python's all at once."""
    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
        return list(column.to_numpy(zero_copy_only=False))
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError) as error:  # a time that Python does not have
        raise OSError(f"a value of type {column.type}: {error}") from error


def _rows_per_batch(group: Any, columns: Sequence[str], check: Callable[[int], None]) -> int:
    """Returns the number of rows of a row group of a Parquet file that are read at a time.

    A text that is stored once for many rows (`dictionary`) may be as long as all of the group is said to be. Raises
    ValueError where a column is compressed so much that reading it takes too much memory.
    """
    chunks = [group.column(i) for i in range(group.num_columns)]
    read_chunks = [chunk for chunk in chunks if not columns or chunk.path_in_schema.partition(".")[0] in columns]
    for chunk in read_chunks:  # whose pages, of any size, are decompressed as a whole
        check(chunk.total_uncompressed_size)
    num_bytes = sum(chunk.total_uncompressed_size for chunk in read_chunks)
    num_rows: int = group.num_rows * BYTES_PER_BATCH // max(num_bytes, 1)
    if any("." in chunk.path_in_schema or chunk.has_dictionary_page for chunk in read_chunks):
        longest = max(chunk.total_uncompressed_size for chunk in read_chunks)
        num_rows = min(num_rows, max(BYTES_PER_BATCH // max(longest, 1), REPEATED_ROWS_PER_BATCH))
    return max(1, min(ROWS_PER_BATCH, int(num_rows)))
