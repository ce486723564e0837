"""Pipeline stages are balanced by measured times of layers. All readers of a config cut the model alike."""

import json
from dataclasses import replace

import pytest

from ringmaster.codec import to_json
from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec, registry
from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.estimates import layer_times as measuring
from ringmaster.techniques.estimates import time_estimate
from ringmaster.techniques.estimates.job_preflight import preflight_job
from ringmaster.techniques.estimates.layer_times import LayerTimes, layer_times
from ringmaster.techniques.models.build import skeleton
from ringmaster.techniques.models.facts import model_facts
from ringmaster.techniques.preflight_result import MemoryEstimate, PreflightOrder
from ringmaster.techniques.processes.order import Slot
from ringmaster.techniques.sharding.pipe import parts_of
from ringmaster.techniques.technique import GangShape

TOKENS = PreparedData(
    name="text", digest="", num_samples=100, num_held_out=16, kind="tokens", vocab_size=300, seq_len=16, source=""
)
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
LLAMA = ModelSpec(architecture="LlamaForCausalLM", config={**TINY, "num_hidden_layers": 4})
SLIDING = ModelSpec(
    architecture="Qwen2ForCausalLM",
    config={**TINY, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
)
JOB = Job(name="tiny", model=LLAMA, data=DataSpec(source="python-stdlib", seq_len=16, vocab_size=300), num_steps=10)
MEMORY_BYTES = 1 << 36
SLOTS = [Slot(kind="cpu", index=0)]


def times(*layers_s, forward=0.0, entry_s=0.0, exit_s=0.0):
    forward_s = tuple(forward * s for s in layers_s)
    return LayerTimes(layers_s=layers_s, forward_s=forward_s, entry_s=entry_s, exit_s=exit_s)


@pytest.mark.parametrize(
    ("measured", "num_stages", "cut"),
    [
        (times(1, 1, 1, 1), 2, [2, 2]),
        (times(1, 1, 1, 1, exit_s=2), 2, [3, 1]),
        (times(1, 1, 1, 1, entry_s=2), 2, [1, 3]),
        (times(1, 1, 5, 1, 1, 1, 1), 3, [2, 1, 4]),
        (times(0.001, 0.001, 1, 1), 2, [3, 1]),
    ],
    ids=str,
)
def test_the_slowest_stage_is_as_quick_as_can_be(measured, num_stages, cut):
    assert measured.cut(num_stages) == cut


def test_noise_of_a_percent_moves_no_cut():
    for exit_s in (1.98, 2.0, 2.02):
        for wrong in (0.99, 1.0, 1.01):
            assert times(1, 1, wrong, wrong, 1, 1, exit_s=exit_s).cut(2) == [4, 2]


def test_layers_that_are_computed_again_weigh_more_than_the_head():
    measured = times(1, 1, 1, 1, forward=0.4, exit_s=2)
    assert measured.cut(2) == [3, 1]
    assert measured.costs() == [20, 20, 20, 60]
    assert measured.costs(recompute="full") == [20, 20, 20, 20 + round(20 * 2 / 1.4)]


def test_the_slowest_rank_is_waited_for():
    measured = times(1, 1, 1, 1, exit_s=2)
    for config, imbalance in (
        ({"stage_layers": [2, 2]}, 4 / 3),
        ({"stage_layers": [3, 1]}, 1.0),
        ({"stage_layers": [1, 1, 1, 1], "schedule": "interleaved"}, 4 / 3),
        ({"stage_layers": [1, 1, 1, 1], "schedule": "zero_bubble"}, 4 / 3),
    ):
        assert measured.imbalance(config, num_ranks=2) == pytest.approx(imbalance)


def run_once(pieces, *, first):
    """Runs each piece. Reports its place as its seconds, half of them for the forward pass."""
    seconds = {}
    for place, (name, piece) in enumerate(pieces.items(), start=first + 1):
        forward_s, all_s = piece.run()
        assert 0 < forward_s < all_s
        seconds[name] = (place / 2, float(place))
    return seconds


def test_layers_of_one_kind_are_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "_median_s", run_once)
    job = replace(JOB, model=SLIDING)
    facts = model_facts(job.model, data=TOKENS)
    options = {"data": TOKENS, "facts": facts, "num_rows": 1, "cache_dir": tmp_path}
    found = layer_times(job, slots=SLOTS, **options)
    # The first of five pieces is an empty stage. The last two layers attend to fewer tokens and are of another kind.
    assert found == LayerTimes(layers_s=(3, 3, 4, 4), forward_s=(1.5, 1.5, 2, 2), entry_s=1, exit_s=2)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(to_json(times(1, 2, 3, 4))))
    assert layer_times(job, slots=SLOTS, **options).layers_s == (1, 2, 3, 4)
    both = layer_times(job, slots=[*SLOTS, Slot(kind="cpu", index=1)], **options)
    assert both == found  # the mean of two devices, each less its own empty stage


def test_jobs_with_other_adapters_share_the_times_of_their_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "_median_s", run_once)
    for rank in (4, 8):
        adapter = Adapter(rank=rank)
        facts = model_facts(LLAMA, data=TOKENS, adapter=adapter)
        job = replace(JOB, adapter=adapter)
        assert layer_times(job, data=TOKENS, facts=facts, num_rows=1, slots=SLOTS, cache_dir=tmp_path)
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("precision", ["bf16", "bf16-params"])
def test_layers_are_measured_in_the_jobs_precision(tmp_path, monkeypatch, precision):
    monkeypatch.setattr(measuring, "_median_s", run_once)
    job, facts = replace(JOB, precision=precision), model_facts(LLAMA, data=TOKENS)
    found = layer_times(job, data=TOKENS, facts=facts, num_rows=2, slots=SLOTS, cache_dir=tmp_path)
    assert found.costs() == [20 + 7, 20, 20, 20 + 13]


def test_what_cannot_be_measured_is_told(tmp_path, capfd):
    job = replace(JOB, loss="json:dumps")
    facts = model_facts(job.model, data=TOKENS)
    assert layer_times(job, data=TOKENS, facts=facts, num_rows=1, slots=SLOTS, cache_dir=tmp_path) is None
    assert "stages are balanced by parameters" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def surveyed(
    tmp_path, monkeypatch, *, slots=(Slot(kind="gpu", index=0),), num_devices=2, technique="pipeline", **options
):
    measured = times(1, 1, 1, 1, exit_s=2)
    monkeypatch.setattr(time_estimate, "layer_times", lambda *_, **__: measured)
    order = PreflightOrder(
        jobs=(JOB,),
        shapes=(GangShape(kind="cpu", num_devices=num_devices, memory_bytes=MEMORY_BYTES),),
        techniques={technique: registry.BUILTIN[technique]},
        cache_dir=str(tmp_path),
        describe_data=True,
        slots=slots,
        **options,
    )
    return preflight_job(JOB, order)


def candidates(tmp_path, monkeypatch, **options):
    return surveyed(tmp_path, monkeypatch, **options).candidates


def test_every_pipeline_is_offered_with_its_cut(tmp_path, monkeypatch):
    offered = candidates(tmp_path, monkeypatch)
    cuts = {(c.config["schedule"], c.config["recompute"]): c.config["stage_layers"] for c in offered}
    assert cuts["1f1b", "none"] == cuts["gpipe", "none"] == [3, 1]
    assert cuts["interleaved", "none"] == cuts["zero_bubble", "none"] == [1, 1, 1, 1]


@pytest.mark.full
def test_every_mesh_is_offered_with_its_cut(tmp_path, monkeypatch):
    sizes = {
        c.config["pp"]: c.config.get("stage_layers")
        for c in candidates(tmp_path, monkeypatch, num_devices=4, technique="mesh")
    }
    assert sizes == {2: [3, 1], 1: None}


def test_without_a_device_to_measure_on_stages_are_balanced_by_parameters(tmp_path, monkeypatch):
    assert not any("stage_layers" in c.config for c in candidates(tmp_path, monkeypatch, slots=()))
    parts = parts_of(skeleton(LLAMA, TOKENS), 2)
    assert [len(part.layers) for part in parts] == [3, 1]  # the head is as large as two layers


@pytest.mark.full
def test_where_no_balanced_stages_fit_they_are_balanced_by_parameters(tmp_path, monkeypatch):
    def forecasts(_, choices):
        return [MemoryEstimate(device_bytes=MEMORY_BYTES + ("stage_layers" in config)) for _, config, _ in choices]

    monkeypatch.setattr(time_estimate, "predict_memory", forecasts)
    preflight = surveyed(tmp_path, monkeypatch, forecast_all=True)
    assert preflight.candidates and not any("stage_layers" in c.config for c in preflight.candidates)
    assert all("stage_layers" in refusal.config for refusal in preflight.refusals)
    assert len(preflight.refusals) == len(preflight.candidates)


def test_a_cut_is_a_configs_matter_and_must_fit_the_model():
    model = skeleton(LLAMA, TOKENS)
    parts = parts_of(model, 2, stage_layers=[1, 3])
    assert [(part.first, part.last, part.has_entry, part.has_exit) for part in parts] == [
        (0, 1, True, False),
        (1, 4, False, True),
    ]
    for wrong in ([2, 3], [4, 0], [4], [1, 1, 2]):
        with pytest.raises(ValueError, match="do not divide 4 layers into 2 stages"):
            parts_of(model, 2, stage_layers=wrong)


@pytest.mark.parametrize(("loss", "is_rough"), [(None, False), ("own_losses:doubled", True)])
def test_what_the_operations_of_ones_own_code_predict_is_rough(tmp_path, monkeypatch, loss, is_rough):
    (tmp_path / "own_losses.py").write_text(
        "def doubled(outputs, batch):\n    return 2 * outputs.logits.float().sum(), batch['input_ids'].shape[0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rates = time_estimate.Rates(**dict.fromkeys(time_estimate.Rates.__dataclass_fields__, 1e9))
    monkeypatch.setattr(time_estimate, "rates", lambda *_, **__: rates)
    job = JOB if loss is None else replace(JOB, loss=loss)
    shape = GangShape(kind="cpu", num_devices=1, memory_bytes=MEMORY_BYTES)
    order = PreflightOrder(
        jobs=(job,), shapes=(shape,), techniques={}, cache_dir=str(tmp_path), describe_data=True, slots=tuple(SLOTS)
    )
    facts = model_facts(LLAMA, data=TOKENS)
    estimator = time_estimate.Estimator(job, facts=facts, data=to_json(TOKENS), order=order)
    offered, _ = estimator.weigh(registry.load(registry.BUILTIN["single"]), shape)
    assert offered and all(candidate.step_s is not None for candidate in offered)
    assert {candidate.is_rough for candidate in offered} == {is_rough}
