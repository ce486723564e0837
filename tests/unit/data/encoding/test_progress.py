"""A long preparation says every few seconds how far it is."""

from ringmaster.techniques.data import prepare
from ringmaster.techniques.data import stored_source as progress_module
from ringmaster.techniques.data.stored_source import INTERVAL_S, TextProgress, progress_to
from ringmaster.techniques.job_specs import DataSpec


def test_a_line_says_texts_megabytes_and_speed_and_comes_once_an_interval():
    now_s, said = [0.0], []
    with progress_to(said.append):
        progress = TextProgress("encoding", clock=lambda: now_s[0])
    for _ in range(6):
        progress.add(1_000_000, num_texts=0)
        progress.add(2_000_000, num_texts=1)
        now_s[0] += INTERVAL_S / 2
    assert said == [
        "encoding: 2 texts, 7 MB, 1.4 MB/s",
        "encoding: 4 texts, 13 MB, 1.3 MB/s",
    ]


def test_training_a_tokenizer_and_encoding_report(jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "INTERVAL_S", 0.0)
    said = []
    with progress_to(said.append):
        prepare(DataSpec(path=str(jsonl("a.jsonl", 30)), seq_len=16, vocab_size=300), cache_dir=tmp_path / "c")
    assert said[0].startswith("training a tokenizer: 1 texts")
    assert said[-1].startswith("encoding: 30 texts")
