"""Bases of Sentence-Transformers: trained as they pool and normalize, and exported so that the library loads them."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional

from ringmaster.techniques import Adapter, DataSpec, EvaluationSpec, ModelSpec
from ringmaster.techniques.data import prepare
from ringmaster.techniques.models.build import build_model
from ringmaster.techniques.models.sentence_embeddings import Pooling, embeddings, pooling_of
from tests.integration.workbench import ADAMW, SINGLE
from tests.matrix import matrix

WORDS = [f"w{i}" for i in range(40)]
ROWS = [(f"w{i} w{i + 1} w{i + 2}", f"w{39 - i} w{i}") for i in range(8)]
TEXTS = [text for row in ROWS for text in row]
BERT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("sentence_transformers")


@pytest.fixture
def base(tmp_path, library):
    """A function that saves a base of a pooling by Sentence-Transformers."""
    from sentence_transformers.base.modules.normalize import Normalize
    from sentence_transformers.base.modules.transformer import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    def save(mode, *, normalizes, similarity="cosine"):
        raw, folder = tmp_path / "raw", tmp_path / "base"
        torch.manual_seed(0)
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
        transformers.BertModel(transformers.BertConfig(vocab_size=len(names), **BERT)).save_pretrained(raw)
        words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(raw)
        modules = [Transformer(str(raw)), Pooling(32, pooling_mode=mode), *([Normalize()] if normalizes else [])]
        model = library.SentenceTransformer(modules=modules, similarity_fn_name=similarity)
        model.save_pretrained(str(folder))
        return folder, model

    return save


POOLINGS = [("cls", True, "cosine"), ("mean", False, "dot"), ("max", False, "cosine")]


@pytest.mark.parametrize("adapter", [None, Adapter(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("mode", "normalizes", "similarity"), matrix(POOLINGS, quick=POOLINGS[1:2], ids=lambda case: case[0])
)
def test_a_base_is_trained_and_exported_as_it_embeds(
    bench, tmp_path, library, base, mode, normalizes, similarity, adapter
):
    folder, model = base(mode, normalizes=normalizes, similarity=similarity)
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"anchor": a, "positive": p}) + "\n" for a, p in ROWS))
    data = DataSpec(path=str(file), held_out_path=str(file), kind="embedding", tokenizer=str(folder))
    spec = ModelSpec(from_pretrained=str(folder))
    job = bench.job(
        spec, data=data, loss="contrastive", loss_options={"temperature": 0.5}, optimizer=ADAMW, num_steps=3,
        adapter=adapter, evaluation=EvaluationSpec(metrics=("recall_at_1", "loss")),
    )  # fmt: skip
    trained = bench.train(job, SINGLE, tmp_path / "run")
    assert trained.outcome.status == "done", trained.outcome

    # The first loss is that of the base's own embeddings of the one batch that there is.
    before = model.encode(TEXTS, convert_to_tensor=True).cpu()
    compared = functional.normalize(before, dim=-1) if similarity == "cosine" else before
    expected = functional.cross_entropy(compared[::2] @ compared[1::2].T / 0.5, torch.arange(len(ROWS)))
    assert trained.losses[0] == pytest.approx(float(expected), rel=1e-5)

    # The export's embeddings are those of the trained weights, and no longer those of the base.
    exported = tmp_path / "run" / "model"
    after = library.SentenceTransformer(str(exported), device="cpu").encode(TEXTS, convert_to_tensor=True)
    prepared = prepare(data, cache_dir=bench.cache_dir)
    weights = build_model(spec, data=prepared, seed=0, weights_from=exported).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = weights(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
    own = embeddings(hidden, tokens["attention_mask"], Pooling(modes=(mode,), is_normalized=normalizes))
    assert torch.allclose(after, own, atol=1e-6)
    assert float((after - before).abs().max()) > 1e-3
    assert pooling_of(str(exported)) == pooling_of(str(folder))
