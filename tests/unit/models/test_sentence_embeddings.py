"""Pooling and normalization of bases of Sentence-Transformers: read from their files, computed, and refused."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers

from ringmaster.techniques.models.sentence_embeddings import (
    FORMER_MODES,
    Pooling,
    copy_modules,
    embeddings,
    max_length_of,
    pooling_of,
)

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}


def base_in(folder, *modules, settings=None, **pooling):
    """Writes the files of a base other than its transformer, as releases before 6 named the modules."""
    folder.mkdir()
    named = [
        {"path": f"{i}_{name}", "type": name if "." in name else f"sentence_transformers.models.{name}"}
        for i, name in enumerate(modules, 1)
    ]
    (folder / "modules.json").write_text(json.dumps([TRANSFORMER, *named]))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings or {}))
    if "Pooling" in modules:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(folder)


@pytest.mark.parametrize(
    ("pooling", "modes"),
    [
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max")),
        ({"pooling_mode_cls_token": False, "pooling_mode_max_tokens": True, "pooling_mode_lasttoken": True},
         ("max", "lasttoken")),
        ({"word_embedding_dimension": 8}, ("mean",)),
    ],
)  # fmt: skip
def test_a_base_says_how_it_pools(tmp_path, pooling, modes):
    assert pooling_of(base_in(tmp_path / "base", "Pooling", "Normalize", **pooling)) == Pooling(modes=modes)


@pytest.mark.parametrize(("similarity", "is_normalized"), [(None, True), ("cosine", True), ("dot", False)])
def test_embeddings_that_the_base_leaves_as_they_are_are_compared_as_it_says(tmp_path, similarity, is_normalized):
    base = base_in(tmp_path / "base", "Pooling", settings={"similarity_fn_name": similarity})
    assert pooling_of(base).is_normalized == is_normalized


def test_a_model_without_modules_has_the_normalized_mean(tmp_path):
    assert pooling_of(None) == pooling_of(str(tmp_path)) == Pooling(modes=("mean",), is_normalized=True)


@pytest.mark.parametrize(
    ("modules", "settings", "pooling", "fault"),
    [
        (("custom.Pooling",), {}, {}, "has the Sentence-Transformers module custom.Pooling, which is not trained here"),
        (("Pooling", "Dense"), {}, {}, "has the Sentence-Transformers module Dense, which is not trained here. To fix"),
        (("Pooling",), {"similarity_fn_name": "manhattan"}, {}, "compares embeddings by manhattan, .* To fix"),
        (("Pooling",), {}, {"pooling_mode": "median"}, "pools by median, which is none of cls, max, .* To fix"),
        (("Pooling",), {"default_prompt_name": "q", "prompts": {"q": "query: "}}, {}, "puts the prompt 'q' before"),
    ],
)
def test_what_training_would_contradict_is_refused(tmp_path, modules, settings, pooling, fault):
    base = base_in(tmp_path / "base", *modules, settings=settings, **pooling)
    with pytest.raises(ValueError, match=fault):
        pooling_of(base)


@pytest.mark.parametrize("modes", [*((mode,) for mode in FORMER_MODES.values()), ("mean", "cls")])
@pytest.mark.parametrize("pads_left", [False, True])
def test_embeddings_are_those_of_sentence_transformers(modes, pads_left):
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    states = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(6) < torch.tensor([[6], [4], [1], [3]])).long()
    mask = mask.flip(1) if pads_left else mask
    theirs = modules.Pooling(8, pooling_mode=modes)({"token_embeddings": states, "attention_mask": mask})
    expected = theirs["sentence_embedding"]
    assert torch.allclose(embeddings(states, mask, Pooling(modes=modes, is_normalized=False)), expected, atol=1e-6)
    unit = torch.nn.functional.normalize(expected, dim=-1)
    assert torch.allclose(embeddings(states, mask, Pooling(modes=modes)), unit, atol=1e-6)


def test_the_files_of_modules_are_copied_and_those_of_the_transformer_are_not(tmp_path):
    base = base_in(tmp_path / "base", "Pooling", pooling_mode="cls")
    (tmp_path / "base" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "base" / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    (tmp_path / "export").mkdir()
    copy_modules(base, tmp_path / "export", seq_len=5)
    copied = sorted(path.relative_to(tmp_path / "export").as_posix() for path in (tmp_path / "export").rglob("*.*"))
    assert copied == [
        "1_Pooling/config.json", "config_sentence_transformers.json", "modules.json", "sentence_bert_config.json",
    ]  # fmt: skip
    assert pooling_of(str(tmp_path / "export")).modes == ("cls",)
    assert max_length_of(str(tmp_path / "export")) == 7
    copy_modules(base, tmp_path / "export", seq_len=9)  # it was trained on longer texts, which it then reads
    assert max_length_of(str(tmp_path / "export")) == 9


@pytest.mark.parametrize(
    ("settings", "tokenizer", "config", "most"),
    [
        ({"max_seq_length": 8}, {"model_max_length": 16}, {"max_position_embeddings": 32}, 8),
        ({"max_seq_length": 8, "tokenizer_args": {"model_max_length": 4}}, {}, {}, 4),
        ({}, {"model_max_length": 16}, {"max_position_embeddings": 32}, 16),
        ({}, {"model_max_length": 10**30}, {"max_position_embeddings": 32}, 32),
        ({}, {}, {"model_type": "roberta", "max_position_embeddings": 34, "pad_token_id": 1}, 32),
        ({}, {}, {"model_type": "xlnet"}, None),
    ],
)
def test_a_base_says_how_many_tokens_it_reads(tmp_path, settings, tokenizer, config, most):
    base = base_in(tmp_path / "base", "Pooling")
    files = {"sentence_bert_config.json": settings, "tokenizer_config.json": tokenizer}
    for name, content in {**files, "config.json": {"model_type": "bert", **config}}.items():
        (tmp_path / "base" / name).write_text(json.dumps(content))
    assert max_length_of(base) == most
    (tmp_path / "base" / "modules.json").unlink()
    assert max_length_of(base) is None


@pytest.mark.parametrize("lower_cases", [True, False])
def test_texts_in_lower_case_are_those_of_the_tokenizer_or_refused(tmp_path, lower_cases):
    base = base_in(tmp_path / "base", "Pooling")
    (tmp_path / "base" / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    inner = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase() if lower_cases else None
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]").save_pretrained(base)
    if lower_cases:
        assert pooling_of(base) == Pooling()
        return
    with pytest.raises(ValueError, match=r"lower-cases texts before its tokenizer reads them, .*To fix: "):
        pooling_of(base)
