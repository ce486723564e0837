"""What a batch adds to the data of models of speech."""

import json
from dataclasses import replace

import pytest

from ringmaster.features.speech.batch import with_limits_of
from ringmaster.tasks.batch.batch import Batch
from ringmaster.techniques import DataSpec, Job, ModelSpec
from ringmaster.techniques.data.inference import infer_kind
from tests.speech_models import CTC, HUBERT, WHISPER

DATA = DataSpec(kind="speech-text", path="rows.jsonl", tokenizer="processor")
FRAMES = [[10, 5], [4, 4]]


@pytest.mark.parametrize("name", ["Wav2Vec2ForCTC", "HubertForCTC"])
def test_rows_have_the_frames_of_the_model(name):
    assert with_limits_of(DATA, ModelSpec(architecture=name, config=CTC)).kwargs == {"frames": FRAMES}
    default = with_limits_of(DATA, ModelSpec(architecture=name)).kwargs["frames"]
    assert default == [[10, 5], *[[3, 2]] * 4, *[[2, 2]] * 2]


def test_a_pretrained_model_says_its_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["HubertForCTC"], **CTC}))
    assert with_limits_of(DATA, ModelSpec(from_pretrained=str(tmp_path))).kwargs == {"frames": FRAMES}


def test_texts_have_the_positions_of_the_model():
    assert with_limits_of(DATA, WHISPER).seq_len == WHISPER.config["max_target_positions"]
    assert with_limits_of(DataSpec(kind="speech-text", path="a", seq_len=9), WHISPER).seq_len == 9
    assert with_limits_of(DATA, ModelSpec(architecture="WhisperForConditionalGeneration")).seq_len == 448


@pytest.mark.parametrize("config", [{"add_adapter": True}, {"conv_kernel": []}])
def test_frames_that_are_not_known_are_left_open(config):
    model = ModelSpec(architecture="Wav2Vec2ForCTC", config={**CTC, **config})
    assert "frames" not in with_limits_of(DATA, model).kwargs


def test_a_batch_completes_its_jobs(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"audio": "a.wav", "text": "a"}\n')
    job = Job(
        name="speech",
        model=HUBERT,
        data=replace(DATA, path=str(tmp_path / "rows.jsonl")),
        num_steps=1,
        global_batch_size=1,
    )
    (completed,) = Batch.of(name="speech", jobs=[job]).jobs
    assert completed.data.kwargs == {"frames": FRAMES}


@pytest.mark.parametrize("model", [HUBERT, WHISPER], ids=["ctc", "whisper"])
def test_the_kind_follows_from_the_model_and_the_columns(tmp_path, model):
    (tmp_path / "rows.jsonl").write_text('{"audio": "a.wav", "sentence": "a"}\n')
    (tmp_path / "others.jsonl").write_text('{"input": "b", "target": "a"}\n')
    assert infer_kind(DataSpec(path=str(tmp_path / "rows.jsonl")), model) == "speech-text"
    assert infer_kind(DataSpec(path=str(tmp_path / "others.jsonl")), model) != "speech-text"
