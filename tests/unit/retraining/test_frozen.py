"""Frozen files of a retraining run: copied once, chosen by their dates, whatever arrives later."""

from pathlib import Path

import pytest

from ringmaster.tasks.retraining.runs import drop_others, freeze
from ringmaster.techniques import DataSpec


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("2026-11-18.jsonl", "2026-11-19.jsonl", "2026-11-20.jsonl", "2026-11-21.jsonl", "always.jsonl"):
        path = tmp_path / "data" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'{{"text": "{name}"}}\n')
    return tmp_path / "data"


def frozen(data, *, window_days=None, pattern="*.jsonl"):
    spec = DataSpec(path=str(data / pattern), seq_len=8)
    return freeze(spec, run_date="2026-11-20", window_days=window_days, folder=data.parent / "frozen")


def names(found):
    return sorted(path.name for path in Path(found.data.path).parent.glob(Path(found.data.path).name))


def test_all_files_are_copied_under_their_names(data):
    found = frozen(data)
    assert names(found) == sorted(path.name for path in data.iterdir())
    assert [name for name, _ in found.files] == names(found)


def test_what_comes_later_is_tomorrows(data):
    found = frozen(data)
    (data / "late.jsonl").write_text("{}")
    with (data / "always.jsonl").open("a") as file:
        file.write("more\n")
    assert "late.jsonl" not in names(found)
    assert "more" not in Path(found.data.path).with_name("always.jsonl").read_text()
    assert frozen(data).data.path != found.data.path


def test_equal_files_are_copied_once(data):
    first = frozen(data)
    marked = Path(first.data.path).parent / "marked"
    marked.touch()
    assert frozen(data) == first
    assert marked.exists()


def test_a_window_reads_the_last_days_and_what_has_no_date(data):
    assert names(frozen(data, window_days=2)) == ["2026-11-19.jsonl", "2026-11-20.jsonl", "always.jsonl"]
    assert names(frozen(data, window_days=1)) == ["2026-11-20.jsonl", "always.jsonl"]


def test_folders_may_have_the_dates(data):
    for day in ("20261119", "20261122", "20269999"):
        (data / day).mkdir()
        (data / day / "part.jsonl").write_text("{}")
    found = frozen(data, window_days=2, pattern="*/part.jsonl")
    assert [name for name, _ in found.files] == ["20261119/part.jsonl", "20269999/part.jsonl"]
    assert len(list(Path(found.data.path).parents[1].glob("*/part.jsonl"))) == 2


def test_a_single_file_keeps_its_name(data):
    found = frozen(data, pattern="always.jsonl")
    assert Path(found.data.path).name == "always.jsonl"
    assert Path(found.data.path).is_file()


def test_a_window_without_a_file_is_told(data):
    (data / "always.jsonl").unlink()
    spec = DataSpec(path=str(data / "*.jsonl"))
    told = (
        "has no file dated 2026-12-30 to 2027-01-01, only 2026-11-18 to 2026-11-21: window_days: 3 ends with the date"
    )
    with pytest.raises(ValueError, match=told):
        freeze(spec, run_date="2027-01-01", window_days=3, folder=data.parent / "frozen")
    with pytest.raises(ValueError, match=r"has no file dated 2027-01-01, only .* To fix: write a file of that date"):
        freeze(spec, run_date="2027-01-01", window_days=1, folder=data.parent / "frozen")


def test_data_that_is_no_files_stays_as_it_is(tmp_path):
    spec = DataSpec(source="digits")
    assert freeze(spec, run_date="2026-11-20", window_days=None, folder=tmp_path).data == spec


def test_copies_that_nobody_reads_any_more_are_dropped(data):
    old = frozen(data, window_days=1)
    new = frozen(data, window_days=2)
    drop_others(data.parent / "frozen", keep=[new.data.path, "/elsewhere/*.jsonl"])
    assert not Path(old.data.path).parent.exists()
    assert names(new)
    drop_others(data.parent / "none", keep=[])


def test_what_is_evaluated_on_is_copied_too_and_is_in_no_window(data):
    spec = DataSpec(path=str(data / "*.jsonl"), held_out_path=str(data / "2026-11-18.jsonl"))
    found = freeze(spec, run_date="2026-11-20", window_days=1, folder=data.parent / "frozen")
    assert Path(found.data.held_out_path).is_file()
    assert not Path(found.data.held_out_path).is_relative_to(data)
    assert [name for name, _ in found.files] == ["2026-11-20.jsonl", "always.jsonl"]


def test_what_a_url_names_is_copied_here(data):
    import fsspec

    system = fsspec.filesystem("memory")
    for day in (19, 20):
        system.pipe(f"/nights/2026-11-{day}.jsonl", b"{}")
    url = DataSpec(path="memory://nights/*.jsonl")
    every, last = (
        freeze(url, run_date="2026-11-20", window_days=days, folder=data.parent / "frozen") for days in (None, 1)
    )
    assert sorted(path.name for path in Path(every.data.path).parents[1].rglob("*.jsonl")) == [
        "2026-11-19.jsonl",
        "2026-11-20.jsonl",
    ]
    assert Path(last.data.path).read_bytes() == b"{}"
    assert Path(last.data.path).name == "2026-11-20.jsonl"


def test_copies_are_recorded_under_the_names_that_the_user_gave(data):
    from ringmaster.codec import to_json
    from ringmaster.tasks.recording.rows import dataset_inputs
    from ringmaster.techniques.data import prepare

    for file in data.iterdir():
        file.write_text("".join(f'{{"text": "row {n} of {file.name}, and more"}}\n' for n in range(20)))
    spec = DataSpec(path=str(data / "*.jsonl"), held_out_path=str(data / "2026-11-18.jsonl"), seq_len=4, vocab_size=300)
    copied = freeze(spec, run_date="2026-11-20", window_days=1, folder=data.parent / "frozen").data
    prepared = to_json(prepare(copied, cache_dir=data.parent / "cache"))
    inputs = dataset_inputs(copied, prepared)
    assert [each.name for each in inputs] == [spec.path, spec.held_out_path]
    assert [each.short_label.split()[0] for each in inputs] == ["data/*.jsonl", "2026-11-18.jsonl"]
    assert inputs[0].source == copied.path
