"""What estimates of memory replace in their process is there, and what replaces it is called."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from ringmaster.codec import to_json
from ringmaster.features.kernels.job import Numerics
from ringmaster.features.loss_teacher.job import LossTeacher
from ringmaster.techniques import DataSpec, Job, ModelSpec, registry
from ringmaster.techniques.data import PreparedData
from ringmaster.techniques.data_source import SampleTensor
from ringmaster.techniques.estimates import rank_memory
from ringmaster.techniques.estimates.device_rates import run_in_children
from ringmaster.techniques.estimates.rank_memory import RankScenario, estimate_rank
from ringmaster.techniques.technique import ATTENTION, KERNELS, GangShape
from tests.image_texts import QWEN_2_5, QWEN_2_5_CONFIG
from tests.integration.workbench import GPT2_WITH_DROPOUT, LLAMA
from tests.matrix import matrix
from tests.speech_models import CTC

TOKENS = PreparedData(
    name="text", digest="", num_samples=64, num_held_out=8, kind="tokens", vocab_size=64, seq_len=16, source=""
)
MIXTURE = ModelSpec(
    architecture="MixtralForCausalLM", config={**LLAMA.config, "num_local_experts": 4, "num_experts_per_tok": 2}
)
QWEN = ModelSpec(architecture=QWEN_2_5, config=QWEN_2_5_CONFIG)
WITH_IMAGES = replace(
    TOKENS,
    vocab_size=288,
    tensors=tuple(
        SampleTensor(name=name, dtype=dtype, shape=shape)
        for name, dtype, shape in (
            ("input_ids", "int64", (16,)),
            ("labels", "int64", (16,)),
            ("pixel_values", "float32", (16, 96)),
            ("image_grid_thw", "int64", (1, 3)),
        )
    ),
    images={"token": 5, "counts": [4], "arrays": {"image_grid_thw": [[1, 4, 4]]}},
)
SPEECH = ModelSpec(architecture="Wav2Vec2ForCTC", config={**CTC, "mask_time_prob": 0.1})
RECORDINGS = replace(
    TOKENS,
    kind="other",
    seq_len=None,
    pad_token_id=0,
    tensors=tuple(
        SampleTensor(name=name, dtype=dtype, shape=(length,))
        for name, dtype, length in (
            ("input_values", "float32", 4_000),
            ("attention_mask", "int64", 4_000),
            ("labels", "int64", 9),
        )
    ),
)
STUDENT = ModelSpec(architecture="LlamaForCausalLM", config={**LLAMA.config, "num_hidden_layers": 1})
DATA_OF = {QWEN.architecture: WITH_IMAGES, SPEECH.architecture: RECORDINGS}
EVERYWHERE = {"build_model", "draws_of", "open_data", "prepare"}
ELSEWHERE = {"why_no_products"}  # for jobs that need torchao
# What a model, a technique and a config need, in addition to what all of them do.
CASES = [
    (LLAMA, "single", {KERNELS: f"{ATTENTION}:eager"}, {"_apply", "is_tracing", "why_kernels_differ"}),
    (GPT2_WITH_DROPOUT, "ddp", {}, {"DistributedDataParallel", "is_tracing", "kept"}),
    (LLAMA, "context", {"exchange": "all_gather", "sharded": False}, {"causal_lower_right"}),
    (
        LLAMA,
        "tensor",
        {"sequence_parallel": True, "loss_parallel": True},
        {"_are_we_tracing"},
    ),
    (MIXTURE, "expert", {"reshard": True}, {"sizes_of", "_can_use_grouped_mm"}),
    (QWEN, "single", {}, {"positions_of", "windows_of"}),
    (SPEECH, "single", {}, {"frame_losses"}),
    (STUDENT, "single", {}, {"build_teacher", "rollout_of"}),
]


def scene(folder, model, technique, config):
    job = Job(
        name="a",
        model=model,
        data=DataSpec(source="python-stdlib", seq_len=16),
        global_batch_size=8,
        num_steps=1,
        features=(Numerics(tolerance=1e-3),) if KERNELS in config else (),
    )
    if model is STUDENT:
        job = replace(job, loss="on-policy-distillation", loss_options={"max_new_tokens": 4})
        job = job.with_features(LossTeacher(model=LLAMA))
    return RankScenario(
        job=job,
        data=to_json(DATA_OF.get(model.architecture, TOKENS)),
        technique=registry.BUILTIN[technique],
        config={"micro_batch": 4, "recompute": "none", **config},
        shape=GangShape(kind="cpu", num_devices=1 if technique == "single" else 2, memory_bytes=1 << 33),
        cache_dir=str(folder),
    )


def in_child(work):
    ((_, result, fault),) = run_in_children([work], at_once=1)
    assert not fault
    return result


def calls(a_scene):
    """Returns how often each replacement is called in an estimate; its process ends, as parts of torch are replaced."""
    counted, plain = Counter(), rank_memory.replacements

    def counting(name, value):
        def called(*args, **kwargs):
            counted[name] += 1
            return value(*args, **kwargs)

        return called

    rank_memory.replacements = lambda one: [(place, name, counting(name, value)) for place, name, value in plain(one)]
    estimate_rank(a_scene)
    return dict(counted)


@pytest.mark.parametrize(
    ("model", "technique", "config", "needed"),
    matrix(CASES, quick=CASES[:1], ids=[f"{case[0].architecture}-{case[1]}" for case in CASES]),
)
def test_what_an_estimate_replaces_is_used(tmp_path, model, technique, config, needed):
    counted = in_child(partial(calls, scene(tmp_path, model, technique, config)))
    assert needed | EVERYWHERE <= counted.keys()


def test_every_replacement_is_used_in_some_estimate(tmp_path):
    names = [name for _, name, _ in rank_memory.replacements(scene(tmp_path, LLAMA, "single", {}))]
    assert sorted({*names} - ELSEWHERE) == sorted(EVERYWHERE.union(*(needed for *_, needed in CASES)))


def replaces_what_is_gone(a_scene):
    plain = rank_memory.replacements
    rank_memory.replacements = lambda one: [(rank_memory, "no_such_name", None), *plain(one)]
    try:
        estimate_rank(a_scene)
    except AssertionError as error:
        return str(error)


def test_a_name_that_is_gone_is_told(tmp_path):
    told = in_child(partial(replaces_what_is_gone, scene(tmp_path, LLAMA, "single", {})))
    assert told.endswith("rank_memory has no no_such_name, which estimates of memory replace")
