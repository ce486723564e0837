"""LoRAs of models of speech: the same under every technique, and what peft loads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringmaster.techniques import Adapter
from ringmaster.techniques.data import fetch, open_data, prepare
from ringmaster.techniques.models.build import build_model
from tests.integration.techniques.test_conformance import LARGEST_DIFFERENCE
from tests.integration.workbench import ADAMW, Layout, largest_difference
from tests.matrix import matrix
from tests.recordings import ctc_processor, spec_of, whisper_processor, write_recordings
from tests.speech_models import HUBERT, WAV2VEC2, WHISPER

MODELS = [WAV2VEC2, HUBERT, WHISPER]
LAYOUTS = [Layout("ddp", 2), Layout("fsdp", 2, {"reshard": True})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    result = tmp_path_factory.mktemp("speech")
    write_recordings(result / "recordings", number=12)
    write_recordings(result / "others", number=4)
    ctc_processor(result / "ctc")
    whisper_processor(result / "whisper")
    return result


@pytest.mark.parametrize("model", matrix(MODELS, quick=[], ids=["wav2vec2", "hubert", "whisper"]))
def test_a_lora_is_the_same_under_every_technique_and_peft_loads_it(bench, folder, tmp_path, model):
    from peft import PeftModel

    processor = folder / ("whisper" if model is WHISPER else "ctc")
    data = spec_of(folder / "recordings" / "rows.jsonl", processor, held_out_path=str(folder / "others" / "rows.jsonl"))
    adapter = Adapter(rank=4)
    job = bench.job(model, data=data, optimizer=replace(ADAMW, lr=1e-2), global_batch_size=4, adapter=adapter)
    expected = bench.reference(job)
    for layout in LAYOUTS:
        trained = bench.train(job, layout, tmp_path / layout.technique)
        assert largest_difference(trained.weights, expected.weights) <= LARGEST_DIFFERENCE["adamw"]
        assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
    prepared = prepare(data, cache_dir=bench.cache_dir)
    _, held_out = open_data(data, cache_dir=bench.cache_dir, prepared=prepared)
    base = build_model(model, data=prepared, seed=job.seed)
    loaded = PeftModel.from_pretrained(base, Path(expected.order.model_dir)).eval()
    batch = fetch(held_out, [0], width=int(held_out.lengths()[0]) or None)
    with torch.no_grad():
        adapted = loaded(**batch).logits
        with loaded.disable_adapter():
            plain = loaded(**batch).logits
    assert float((adapted - plain).abs().max()) > 1e-3
