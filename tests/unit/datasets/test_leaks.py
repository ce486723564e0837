"""Rows that are trained on and evaluated on, and the hashes of text files, without the rows in memory."""

import hashlib

from ringmaster.tasks.batch.schema import DatasetSection
from ringmaster.tasks.datasets.catalogue import Entry
from ringmaster.tasks.datasets.checking import contents
from ringmaster.techniques.data.file_rows import LeakedRows, SplitRows
from ringmaster.techniques.data.row_files import CHARACTERS_PER_READ, FileText, content_hash
from ringmaster.techniques.data_source import Row


def rows_of(*, file, held_out, contents):
    return [
        Row(file=file, number=number, value=content, content=content, held_out=held_out)
        for number, content in enumerate(contents, start=1)
    ]


def split_rows(rows):
    return SplitRows(rows, identity=lambda row: row.content)


def test_the_first_row_on_both_sides_is_named_with_its_like():
    training = rows_of(file="a", held_out=False, contents=[{"n": 1}, {"n": 2}, {"n": 2}, {"n": 3}])
    held_out = rows_of(file="b", held_out=True, contents=[{"n": 9}, {"n": 2}, {"n": 3}, {"n": 2}])
    rows = split_rows([*training, *held_out])
    assert rows.leaks() == LeakedRows(3, ("b, line 2", "a, line 2"))
    assert rows.num_rows == {False: 4, True: 4}


def test_other_rows_are_on_one_side():
    training = rows_of(file="a", held_out=False, contents=["one", "two"])
    assert split_rows([*training, *rows_of(file="b", held_out=True, contents=["three"])]).leaks() is None
    assert split_rows(training).leaks() is None


def test_a_text_file_has_the_hash_of_its_text(tmp_path):
    text = "é long text\n" * CHARACTERS_PER_READ
    (tmp_path / "a.txt").write_text(text)
    assert content_hash(FileText(str(tmp_path / "a.txt"))) == content_hash(text)
    part = FileText(str(tmp_path / "a.txt"), start=5, stop=CHARACTERS_PER_READ + 7)
    assert content_hash(part) == content_hash(text[5 : CHARACTERS_PER_READ + 7])


def test_the_digest_of_text_files_does_not_depend_on_how_they_are_read(tmp_path):
    texts = ["one text\n" * 40_000, "another"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    entry = Entry(name="t", dataset=DatasetSection(path="*.txt"), folder=tmp_path)
    found = contents(entry, "1")[""]
    whole = "".join(sorted(map(content_hash, texts)))
    assert (found.num_files, found.num_rows) == (2, 2)
    assert found.digest == hashlib.sha256(whole.encode()).hexdigest()[:16]
