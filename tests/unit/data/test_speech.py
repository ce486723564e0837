"""Recordings become what the library's own feature extractor makes of them, or their rows are refused."""

import io
import json

import numpy as np
import pytest
import torch

from ringmaster.features.speech.audio import read_audio, resampled
from ringmaster.features.speech.data import num_frames
from ringmaster.techniques.data import fetch, open_data, prepare, width_of
from tests.recordings import (
    LETTERS,
    RATE,
    ctc_processor,
    soundfile,
    spec_of,
    texts,
    tones,
    write_recordings,
    write_table,
)
from tests.speech_models import CTC

FRAMES = [*zip(CTC["conv_kernel"], CTC["conv_stride"], strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    result = tmp_path_factory.mktemp("speech")
    write_recordings(result / "recordings", number=7)
    for name, has_mask in (("processor", True), ("without mask", False)):
        ctc_processor(result / name, has_mask=has_mask)
    return result


def opened(spec, cache_dir):
    prepared = prepare(spec, cache_dir=cache_dir)
    return prepared, open_data(spec, cache_dir=cache_dir, prepared=prepared)[0]


def written(samples, rate=RATE, **settings):
    """The bytes of a file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **{"format": "WAV", **settings})
    return file.getvalue()


@pytest.mark.parametrize("name", ["processor", "without mask"])
def test_a_batch_is_what_the_processor_pads(folder, tmp_path, name):
    from transformers import Wav2Vec2Processor

    table = folder / "recordings" / "rows.jsonl"
    prepared, training = opened(spec_of(table, folder / name), tmp_path)
    theirs = Wav2Vec2Processor.from_pretrained(folder / name)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    audio = [soundfile.read(table.parent / row["audio"], dtype="float32")[0] for row in rows]
    each = [{"input_values": theirs(sample, sampling_rate=RATE).input_values[0]} for sample in audio]
    wanted = theirs.feature_extractor.pad(each, padding=True, return_tensors="pt")
    width = width_of(training, range(len(rows)), multiple_of=1)
    batch = fetch(training, range(len(rows)), width=width)
    assert batch.keys() == {*wanted, "labels"}
    for key, values in wanted.items():
        assert torch.equal(batch[key], values.to(batch[key].dtype))
    for row, labels in zip(rows, batch["labels"], strict=True):
        assert labels[labels != -100].tolist() == theirs(text=row["text"]).input_ids
    shapes = {each.name: each.shape for each in prepared.tensors}
    assert shapes["input_values"] == (max(map(len, audio)),)
    assert shapes["labels"] == (max(len(row["text"]) for row in rows),)
    assert (prepared.processor_dir / "preprocessor_config.json").is_file()
    assert (prepared.tokenizer_dir / "vocab.json").is_file()


def test_parquet_holds_recordings_as_hugging_face_stores_them(folder, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    chosen = texts(3)
    rows = [{"audio": {"bytes": written(tones(text)), "path": "a.wav"}, "sentence": text} for text in chosen]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    _, from_parquet = opened(spec_of(tmp_path / "rows.parquet", folder / "processor"), tmp_path)
    for place, text in enumerate(chosen):
        (tmp_path / f"{place}.wav").write_bytes(written(tones(text)))
    table = write_table(
        tmp_path / "rows.jsonl", [{"file": f"{place}.wav", "text": text} for place, text in enumerate(chosen)]
    )
    _, from_files = opened(spec_of(table, folder / "processor"), tmp_path)
    for one, other in zip(from_parquet, from_files, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_data_set_of_hugging_face_is_read_without_its_decoder(folder, tmp_path):
    import datasets

    chosen = texts(3)
    rows = {"audio": [{"bytes": written(tones(text)), "path": None} for text in chosen], "text": chosen}
    datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio()).save_to_disk(tmp_path / "saved")
    spec = spec_of("", folder / "processor", path=None, dataset=str(tmp_path / "saved"))
    _, training = opened(spec, tmp_path)
    (first,) = fetch(training, [0])["input_values"]
    own = read_audio(written(tones(chosen[0])), rate=RATE)
    assert np.allclose(first[: len(own)], (own - own.mean()) / np.sqrt(own.var() + 1e-7), atol=1e-6)


def test_another_rate_is_resampled_and_channels_are_averaged():
    samples = tones("abcd", rate=44_100)
    read = read_audio(written(np.stack([samples, 0 * samples], axis=1), 44_100, subtype="FLOAT"), rate=RATE)
    assert len(read) == -(-len(samples) * RATE // 44_100)
    assert np.allclose(read, resampled(samples / 2, 44_100, RATE), atol=1e-6)
    # The tones of the letters are the same ones, away from where they change.
    wanted, letter = tones("abcd") / 2, len(read) // 4
    middle = slice(letter // 4, letter // 2)
    assert np.abs(read[middle] - wanted[middle]).max() < 0.05


def test_a_changed_recording_is_prepared_anew(folder, tmp_path):
    table = write_recordings(tmp_path / "own", number=3)
    before = prepare(spec_of(table, folder / "processor"), cache_dir=tmp_path)
    soundfile.write(tmp_path / "own" / "1.flac", tones("abcabcabc"), RATE)
    assert prepare(spec_of(table, folder / "processor"), cache_dir=tmp_path).digest != before.digest


NAN = np.array([0.1, np.nan, 0.2, np.inf] * 200, np.float32)
FAULTS = {
    "cut.wav": (written(tones("abc"))[:-1000], r"is cut off: 1,000 bytes of its samples are missing"),
    "cut.flac": (written(tones("abc" * 9), format="FLAC")[:-9000], r"cannot be read|is cut off"),
    "noise.wav": (b"\7" * 900, "cannot be read"),
    "nothing.wav": (b"", "the audio file is empty"),
    "silent.wav": (written(np.zeros(0, np.float32)), "the audio is empty"),
    "nan.wav": (written(NAN, subtype="FLOAT"), "400 samples that are not finite"),
    "long.wav": (written(tones("abc" * 20)), r"has 2\.4 s, and at most 2 s are read"),
    "other.ogg": (written(tones("abc"), format="OGG"), "is OGG, and WAV and FLAC are read"),
}


@pytest.mark.parametrize("name", ["missing.wav", *FAULTS])
def test_a_row_with_a_wrong_recording_is_refused(folder, tmp_path, name):
    content, says = FAULTS.get(name, (None, "missing.wav cannot be read"))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "good.wav").write_bytes(written(tones("abc")))
    table = write_table(tmp_path / "rows.jsonl", [{"audio": each, "text": "abc"} for each in ("good.wav", name)])
    with pytest.raises(ValueError, match=rf"rows.jsonl, row 2: .*{says}.* To fix: "):
        prepare(spec_of(table, folder / "processor", kwargs={"max_seconds": 2}), cache_dir=tmp_path)


def test_all_wrong_rows_are_named_at_once(folder, tmp_path):
    (tmp_path / "good.wav").write_bytes(written(tones("abcd")))
    rows = [
        {"audio": "good.wav", "text": "abcd"},
        {"audio": "none.wav", "text": "ab"},
        {"audio": "good.wav", "text": "abé"},
        {"audio": "good.wav", "text": "ABC"},
        {"audio": "good.wav", "text": " "},
        {"audio": "good.wav", "text": "ab" * 70},
    ]
    table = write_table(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match="row 2") as fault:
        prepare(spec_of(table, folder / "processor", kwargs={"frames": FRAMES}), cache_dir=tmp_path)
    message = str(fault.value)
    assert [place for place in range(1, 7) if f"row {place}:" in message] == [2, 3, 4, 5, 6]
    for says in (
        r"the text has '\xe9', which the tokenizer does not know",
        "write texts in lower case",
        "no visible character",
        "has 127 frames, and its text needs 140: one for each of 140 tokens",
    ):
        assert says in message


def test_equal_neighbours_need_a_frame_between_them(folder, tmp_path):
    num_samples = 5 * 4 * 10 + 4
    assert num_frames(num_samples, FRAMES) == 9
    (tmp_path / "a.wav").write_bytes(written(tones("abcd")[:num_samples]))
    for text, is_read in (("abcdabcda", True), ("aabcdabcd", False)):
        table = write_table(tmp_path / f"{text}.jsonl", [{"audio": "a.wav", "text": text}])
        spec = spec_of(table, folder / "processor", kwargs={"frames": FRAMES})
        if is_read:
            prepare(spec, cache_dir=tmp_path)
        else:
            with pytest.raises(ValueError, match="has 9 frames, and its text needs 10"):
                prepare(spec, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer": None}, "has no processor, which says how audio is read"),
        ({"kwargs": {"max_seconds": -1}}, "max_seconds -1 is no number of seconds"),
        ({"kwargs": {"language": "en"}}, "marks no language. To fix: remove language"),
        ({"kwargs": {"processor": "no/such/folder"}}, "no/such/folder.*To fix"),
    ],
)
def test_wrong_options_are_refused(folder, tmp_path, changes, says):
    table = folder / "recordings" / "rows.jsonl"
    with pytest.raises(ValueError, match=says):
        prepare(spec_of(table, folder / "processor", **changes), cache_dir=tmp_path)


def test_a_folder_of_another_processor_is_refused(folder, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor"}')
    spec = spec_of(
        folder / "recordings" / "rows.jsonl", folder / "processor", kwargs={"processor": str(tmp_path / "images")}
    )
    with pytest.raises(ValueError, match=r"cannot be loaded.* To fix: set data.tokenizer, or data.processor"):
        prepare(spec, cache_dir=tmp_path)


def test_letters_of_the_tests_are_those_of_the_tokenizer(folder):
    assert {*"".join(texts(20))} == {*LETTERS, " "}
