"""The probe, a tiny step of a job: its errors with remedies, and its findings on dividing the job's batch."""

import shutil
import sys
from dataclasses import replace

import datasets
import pytest
import torch
import transformers
from torch import nn

from ringmaster.errors import ModelTooLarge, StepError
from ringmaster.techniques import Adapter, DataSpec, EvaluationSpec, Job, ModelSpec, registry
from ringmaster.techniques.data import prepare
from ringmaster.techniques.data_source import PreparedData
from ringmaster.techniques.estimates.job_preflight import preflight_job
from ringmaster.techniques.metric import BUILTIN_METRICS, METRICS
from ringmaster.techniques.models import architectures
from ringmaster.techniques.preflight_result import PreflightOrder
from ringmaster.techniques.probing import probe
from ringmaster.techniques.probing.probe import _file, source_state
from ringmaster.techniques.technique import GangShape
from tests.integration.workbench import write_prose
from tests.unit.probing.samples import Garbled, OddMetric

HERE = "tests.unit.probing.samples"
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = ModelSpec(architecture="LlamaForCausalLM", config=TINY)
BERT = ModelSpec(architecture="BertForSequenceClassification", config={**TINY, "vocab_size": 100})
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2}
EXPERTS = {
    **TINY, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip

MIXTRAL = {**TINY, "num_key_value_heads": 2, "num_local_experts": 4}


def model(architecture, **config):
    return ModelSpec(architecture=architecture, config=config)


def made(name, **kwargs):
    return DataSpec(factory=f"{HERE}:{name}", kwargs=kwargs)


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    file = write_prose(tmp_path_factory.mktemp("prose") / "prose.txt", num_lines=60)
    return DataSpec(path=str(file), seq_len=24, vocab_size=300)


def test_a_probe_stands_for_another_job_only_if_the_model_and_the_loss_feel_no_difference(prose, tmp_path):
    data = prepare(prose, cache_dir=tmp_path)
    job = Job(name="job", model=LLAMA, data=prose, num_steps=4)

    def file(what="step", **changes):
        return _file(what, replace(job, **changes), data, tmp_path)

    assert file() == file(name="b", seed=1, num_steps=9, precision="bf16", global_batch_size=2)
    for change in (
        {"evaluation": EvaluationSpec(metrics=("loss", "perplexity"))},
        {"data": replace(prose, kind="chat")},
        {"loss": f"{HERE}:mean_error"},
        {"loss": "cross-entropy", "loss_options": {"label_smoothing": 0.1}},
    ):
        assert file() != file(**change)
    assert file("draws") == file("draws", evaluation=EvaluationSpec(metrics=("perplexity",)), loss="cross-entropy")


@pytest.fixture
def surveyed(tmp_path):
    """A function that probes a job as before a batch is planned, for no gangs."""

    def preflight(of, data, **changes):
        job = Job(name="job", model=of, data=data, num_steps=4, global_batch_size=8, **changes)
        order = PreflightOrder(jobs=(job,), shapes=(), techniques={}, cache_dir=str(tmp_path))
        return vars(preflight_job(job, order).facts)

    return preflight


@pytest.mark.parametrize(
    ("of", "data", "fault"),
    [
        (BERT, made("one_set"), r"returned Samples. To fix: return \(training, held_out\)"),
        (BERT, made("tuples"), "a sample is tuple. To fix: return a dict of tensors"),
        (BERT, made("failing"), "data: it cannot be read: KeyError: 'no such column'. To fix"),
        (BERT, made("uneven"), "samples cannot be read.*equal size.*To fix: give samples .* of equal shapes"),
        (BERT, made("renamed"), "forward takes attention_mask.*samples have labels, tokens. To fix: name"),
        (BERT, made("classes", mask=[1] * 8), "samples have mask, which the model's forward does not take; it takes"),
        (BERT, made("classes", labels=7), "labels are 7 to 7, and the model predicts classes 0 to 1. To fix"),
        (BERT, made("late_class"), "labels are 0 to 2, and the model predicts classes 0 to 1. To fix"),
        (BERT, made("classes", labels=[0, 1, 0]), r"labels are of shape \[3\] a sample, .* predicts one number"),
        (BERT, made("classes", labels=[0.0, 1.0, 0.0]), r"labels are of shape \[3\].* predicts of shape \[2\]"),
        (BERT, made("classes", input_ids=[100] * 8), "input_ids are 100 to 100, and the model has tokens 0 to 99"),
        (model("GPT2LMHeadModel", **GPT2, n_layers=2), made("classes", labels=None), "no field n_layers; did you mean"),
        (ModelSpec(factory=f"{HERE}:narrow"), made("points"), "To fix: name the samples' tensors"),
    ],
)  # fmt: skip
def test_what_would_fail_later_is_refused_with_a_remedy(surveyed, of, data, fault):
    with pytest.raises(StepError, match=fault):
        surveyed(of, data)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def build(*_, **__):\n    raise SystemExit(0)", "SystemExit: 0"),
    ],
)
@pytest.mark.parametrize("where", ["model", "data", "loss"])
def test_a_function_that_cannot_be_imported_or_ends_its_process_is_a_fault_of_its_job(
    surveyed, tmp_path, monkeypatch, body, cause, where
):
    (tmp_path / "faulty.py").write_text(f"{body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    faulty = "faulty:build"
    of = ModelSpec(factory=faulty) if where == "model" else BERT
    data = DataSpec(factory=faulty) if where == "data" else made("classes")
    with pytest.raises(StepError, match=rf"{cause}\. To fix: correct "):
        surveyed(of, data, **({"loss": faulty} if where == "loss" else {}))
    sys.modules.pop("faulty", None)


@pytest.mark.parametrize("content", ["{}", '{"version": "1.0", "model": {}}', '{"version": "1.0", "mod', "[]"])
def test_a_tokenizer_of_damaged_files_is_told_as_one(surveyed, prose, tmp_path, content):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(content)
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(settings)
    with pytest.raises(StepError, match=r"tokenizer '.*' cannot be loaded: .* To fix: give a folder that save_pretr"):
        surveyed(LLAMA, replace(prose, tokenizer=str(tmp_path / "tokenizer")))


@pytest.mark.parametrize(
    ("loss", "fault"),
    [
        ("error", None),
        ("no_gradient", "loss: it has no gradient.*To fix: compute it of what the model returns"),
        ("contrast", "loss: it cannot be computed of samples with point .*To fix: correct loss or data"),
    ],
)
def test_a_loss_of_ones_own_is_tried_too(surveyed, loss, fault):
    given = ModelSpec(factory=f"{HERE}:squared"), made("points")
    if fault is None:
        assert not surveyed(*given, loss=f"{HERE}:{loss}")["whole_batch"]
        return
    with pytest.raises(StepError, match=fault):
        surveyed(*given, loss=f"{HERE}:{loss}")


def test_a_metric_that_does_not_suit_the_model_is_refused(surveyed):
    """The cached result of the same job with other metrics does not hide it."""
    number = model("BertForSequenceClassification", **TINY, vocab_size=100, num_labels=1)
    regression = number, made("classes", labels=0.5)
    assert not surveyed(*regression)["whole_batch"]
    with pytest.raises(StepError, match=r"accuracy cannot be computed: .* logits \[\d, 1\].*To fix: name"):
        surveyed(*regression, evaluation=EvaluationSpec(metrics=("loss", "accuracy")))


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("f1", "one prediction a row: labels of classes, and a logit for each of 2 to 4096 classes"),
        ("matthews", "one label of a class each"),
        ("auroc", r"one prediction a row: logits \[rows, classes\]"),
        ("exact_match", "a label and a logit for each token"),
        ("rouge_l", "a label and a logit for each token"),
        ("preference_accuracy", "a loss over pairs"),
        ("recall_at_1", "last_hidden_state"),
    ],
)
def test_a_metric_says_what_it_needs(surveyed, name, needed):
    number = model("BertForSequenceClassification", **TINY, vocab_size=100, num_labels=1)
    with pytest.raises(StepError, match=rf"^{name} cannot be computed: .*\. {name} needs {needed}.*To fix: name other"):
        surveyed(number, made("classes", labels=0.5), evaluation=EvaluationSpec(metrics=(name,)))


def test_a_metric_that_fails_is_named(surveyed, monkeypatch):
    monkeypatch.setitem(BUILTIN_METRICS, "unmeasurable", f"{HERE}:Unmeasurable")
    with pytest.raises(StepError, match=r"the metric unmeasurable cannot be computed: TypeError: .*To fix: correct it"):
        surveyed(BERT, made("classes"), evaluation=EvaluationSpec(metrics=("loss", "unmeasurable", "accuracy")))


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("sums", "fault"),
    [
        (lambda _, n: torch.ones(n + 1), r"its sum 'odd' has the shape \[5\], and not \[4\]"),
        (lambda _, n: torch.ones(n, 2, 2), r"its sum 'odd' has the shape \[4, 2, 2\]"),
        (lambda _, n: torch.ones(n, 0), r"its sum 'odd' has the shape \[4, 0\]"),
        (lambda _, n: torch.tensor(1.0), r"its sum 'odd' has the shape \[\], and not \[3\]"),
        (lambda _, n: torch.ones(n, n), r"the sum 'odd' has rows of \[3\], and had \[4\]"),
        (lambda _, n: torch.ones(n, dtype=torch.complex64), "its sum 'odd' is a tensor of torch.complex64"),
        (lambda _, n: torch.ones(n).to_sparse(), "its sum 'odd' is a tensor of torch.float32 .torch.sparse_coo"),
        (lambda _, n: 1.0, "its sum 'odd' is float, and not a tensor"),
        (lambda _, n: {"odd": torch.ones(n)}, "its sum 'rows' is missing, and not a tensor"),
        (lambda _, n: [1.0], "compute_sums returned list, and not a tensor for each of odd, rows"),
        (lambda *_: _raise(KeyboardInterrupt()), "KeyboardInterrupt"),
        (lambda *_: _raise(SystemExit(3)), "SystemExit: 3"),
        (lambda *_: _raise(ValueError()), "ValueError"),
        (lambda *_: _raise(Garbled()), "Garbled: .its message cannot be read: KeyboardInterrupt."),
    ],
)
def test_an_installed_metric_is_computed_in_advance_as_it_will_be(surveyed, monkeypatch, sums, fault):
    monkeypatch.setitem(METRICS.registered, "odd", f"{HERE}:OddMetric")
    monkeypatch.setattr(OddMetric, "made", staticmethod(sums))
    with pytest.raises(
        StepError, match=rf"^evaluation: the metric odd cannot be computed: (odd: )?{fault}.*\. To fix: "
    ):
        surveyed(BERT, made("classes"), evaluation=EvaluationSpec(metrics=("loss", "odd")))


def test_an_installed_metric_with_sums_of_rows_is_computed(surveyed, monkeypatch):
    monkeypatch.setitem(METRICS.registered, "odd", f"{HERE}:OddMetric")
    for made_sums in (lambda _, n: torch.ones(n, 3), lambda outputs, _: outputs.losses[0]):
        monkeypatch.setattr(OddMetric, "made", staticmethod(made_sums))
        surveyed(BERT, made("classes"), evaluation=EvaluationSpec(metrics=("loss", "odd")))
    monkeypatch.setattr(OddMetric, "sums", ("odd", "predictions"))
    with pytest.raises(StepError, match=r"metric odd may not name a sum predictions\. To fix: rename the sum"):
        surveyed(BERT, made("classes"), evaluation=EvaluationSpec(metrics=("odd",)))


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (lambda rows, counts: rows["lost"], "KeyError: 'lost'"),
        (lambda rows, counts: 1.0, r"of 3 samples of rows its value has the shape \[\], and not \[3\]"),
    ],
)
def test_an_installed_metric_is_computed_of_samples_of_rows(surveyed, monkeypatch, value, fault):
    monkeypatch.setitem(METRICS.registered, "odd", f"{HERE}:OddMetric")
    monkeypatch.setattr(OddMetric, "made", staticmethod(lambda _, n: torch.ones(n)))
    monkeypatch.setattr(OddMetric, "value_of_rows", lambda self, rows, counts: value(rows, counts))
    with pytest.raises(StepError, match=f"^evaluation: the metric odd cannot be computed: {fault}.*To fix: correct it"):
        surveyed(BERT, made("classes"), evaluation=EvaluationSpec(metrics=("odd",)))


def test_a_metric_that_suits_is_computed_in_advance(surveyed, prose):
    for metrics in (("f1", "matthews", "auroc"), ("precision", "recall")):
        surveyed(BERT, made("classes"), evaluation=EvaluationSpec(metrics=metrics))
    surveyed(LLAMA, prose, evaluation=EvaluationSpec(metrics=("exact_match", "rouge_l")))


def test_several_faults_are_told_at_once(surveyed, prose):
    with pytest.raises(StepError, match=r"must be divisible.*no field n_layers; did you mean n_layer") as found:
        surveyed(model("GPT2LMHeadModel", n_embd=65, n_layers=2, n_head=2), prose)
    assert len(found.value.faults) == 2


def test_a_classifier_of_text_files_lacks_labels(surveyed, prose):
    with pytest.raises(StepError, match=r"text has no labels.*To fix: set data.kind to text-classification"):
        surveyed(model("BertForSequenceClassification", **TINY), prose)


def test_a_fresh_head_beside_an_adapter_is_trained_too(surveyed, tmp_path):
    transformers.BertModel(transformers.BertConfig(**TINY, vocab_size=300)).save_pretrained(tmp_path / "bert")
    spec = ModelSpec(from_pretrained=str(tmp_path / "bert"), architecture="BertForSequenceClassification")
    remedy = r"the head \(classifier\) is fresh.*set adapter.modules_to_save to \[classifier\]"
    with pytest.raises(StepError, match=remedy):
        surveyed(spec, made("classes"), adapter=Adapter())
    surveyed(spec, made("classes"), adapter=Adapter(modules_to_save=("classifier",)))


def test_a_pretrained_model_without_a_tokenizer_learns_no_tokens_of_a_new_one(surveyed, prose, tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, vocab_size=400)).save_pretrained(tmp_path / "llama")
    spec = ModelSpec(from_pretrained=str(tmp_path / "llama"))
    with pytest.raises(StepError, match=r"llama holds no tokenizer.* To fix: set data.tokenizer .*vocab_size to 400"):
        surveyed(spec, prose)
    surveyed(spec, replace(prose, vocab_size=400))


def test_a_pretrained_model_learns_no_tokens_of_another_tokenizer(surveyed, prose, tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, vocab_size=400)).save_pretrained(tmp_path / "llama")
    data = prepare(replace(prose, vocab_size=400), cache_dir=tmp_path)
    shutil.copytree(data.tokenizer_dir, tmp_path / "llama", dirs_exist_ok=True)
    spec = ModelSpec(from_pretrained=str(tmp_path / "llama"))
    with pytest.raises(StepError, match=r"llama was trained with another tokenizer .* To fix: set data.tokenizer"):
        surveyed(spec, replace(prose, vocab_size=380))
    surveyed(spec, replace(prose, vocab_size=380, tokenizer=str(tmp_path / "llama")))


def test_a_pretrained_model_learns_token_ids_of_a_data_set_without_a_tokenizer(surveyed, tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, vocab_size=400)).save_pretrained(tmp_path / "llama")
    datasets.Dataset.from_dict({"input_ids": [[n % 90] * 24 for n in range(60)]}).save_to_disk(tmp_path / "ids")
    surveyed(ModelSpec(from_pretrained=str(tmp_path / "llama")), DataSpec(dataset=str(tmp_path / "ids"), seq_len=24))


@pytest.mark.parametrize(
    "of",
    [
        model("Qwen3MoeForCausalLM", **EXPERTS, head_dim=8),
        model("FalconH1ForCausalLM", **TINY, num_key_value_heads=2, head_dim=8, mamba_d_ssm=64, mamba_n_heads=8,
              mamba_d_head=8, mamba_d_state=16),
        model("DebertaV2ForMaskedLM", **TINY, relative_attention=True, pos_att_type=["p2c"], position_buckets=8),
    ],
    ids=lambda spec: spec.architecture,
)  # fmt: skip
def test_a_field_that_the_class_does_not_declare_is_taken_where_the_model_reads_it(surveyed, prose, of):
    data = made("masked") if of.architecture.endswith("ForMaskedLM") else prose
    assert surveyed(of, data)["num_layers"] == 2


def test_masked_language_modeling_of_tokens_without_masks_is_refused(surveyed, prose):
    with pytest.raises(StepError, match=r"none of which is masked.* To fix: mask tokens in a data.factory"):
        surveyed(model("BertForMaskedLM", **TINY), prose)
    surveyed(model("BertForMaskedLM", **TINY), made("masked"))


@pytest.mark.parametrize(
    ("of", "loss", "is_divisible"),
    [
        (LLAMA, None, True),
        (LLAMA, "contrast", False),
        (model("MixtralForCausalLM", **MIXTRAL), None, True),
        (model("MixtralForCausalLM", **MIXTRAL, output_router_logits=True), None, False),
        (model("Qwen3MoeForCausalLM", **EXPERTS), None, True),
        (model("Qwen3MoeForCausalLM", **EXPERTS, output_router_logits=True), None, False),
        (model("T5ForConditionalGeneration", d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4), None, True),
        (model("BertForMaskedLM", **TINY), None, True),
        (model("GPT2LMHeadModel", **GPT2), None, True),
    ],
    ids=lambda value: value.architecture if isinstance(value, ModelSpec) else str(value),
)
def test_whether_a_batch_may_be_divided_is_measured(surveyed, prose, of, loss, is_divisible):
    data = made("masked") if of.architecture == "BertForMaskedLM" else prose
    reason = surveyed(of, data, loss=loss and f"{HERE}:{loss}").get("whole_batch", "")
    assert ("dividing a batch changes its gradients" in reason) != is_divisible


@pytest.mark.parametrize(
    ("normalised", "loss", "is_divisible"),
    [(False, "error", True), (True, "error", False), (False, "mean_error", False)],
)
def test_batch_statistics_and_means_are_seen_too(surveyed, normalised, loss, is_divisible):
    of = ModelSpec(factory=f"{HERE}:squared", kwargs={"normalised": normalised})
    reason = surveyed(of, made("points"), loss=f"{HERE}:{loss}").get("whole_batch", "")
    assert ("dividing a batch changes its gradients" in reason) != is_divisible


def test_tokens_that_are_routed_to_experts_have_no_mask_of_their_own(surveyed, prose):
    of = model("SwitchTransformersForConditionalGeneration", d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4)
    assert "without a dimension of samples" in surveyed(of, prose)["whole_batch"]


def test_the_real_model_is_not_built(tmp_path, prose, monkeypatch):
    """A model of many layers is tried with two narrow layers."""
    sizes = []
    before = nn.Module.train

    def train(module, mode=True):
        if hasattr(module, "lm_head"):
            sizes.append(sum(parameter.numel() for parameter in module.parameters()))
        return before(module, mode)

    deep = model("LlamaForCausalLM", hidden_size=1024, num_hidden_layers=24, num_attention_heads=8)
    job = Job(name="deep", model=deep, data=prose, num_steps=1)
    data = prepare(job.data, cache_dir=tmp_path)
    monkeypatch.setattr(nn.Module, "train", train)
    assert probe(job, data=data, cache_dir=tmp_path).undivided == ""
    assert max(sizes) < 1_000_000


def test_a_tiny_model_still_shows_what_does_not_go_together(surveyed, prose):
    """The tiny model's width is eight times its heads, plus the real width's remainder when divided by them."""
    with pytest.raises(StepError, match="model: "):
        surveyed(model("LlamaForCausalLM", hidden_size=100, num_attention_heads=8, num_key_value_heads=3), prose)


def test_survey_orders_of_devices_say_why(tmp_path, prose):
    job = Job(name="job", model=LLAMA, data=prose, num_steps=4, global_batch_size=8, loss=f"{HERE}:contrast")
    shapes = tuple(GangShape(kind="cpu", num_devices=n, memory_bytes=1 << 33) for n in (1, 2))
    techniques = {name: registry.dotted_path(name) for name in ("single", "ddp", "tensor", "pipeline")}
    preflight = preflight_job(
        job, PreflightOrder(jobs=(job,), shapes=shapes, techniques=techniques, cache_dir=str(tmp_path))
    )
    assert {candidate.technique for candidate in preflight.candidates} == {"single", "tensor"}
    assert {candidate.config["micro_batch"] for candidate in preflight.candidates} == {8}
    reasons = {refusal.technique: refusal.reason for refusal in preflight.refusals if refusal.num_devices == 2}
    assert "dividing a batch changes its gradients" in reasons["ddp"]


def test_a_parameter_that_is_a_number_is_not_sharded(tmp_path):
    of = ModelSpec(factory=f"{HERE}:scaled")
    job = Job(name="job", model=of, data=made("points"), num_steps=4, global_batch_size=8, loss=f"{HERE}:error")
    shapes = (GangShape(kind="cpu", num_devices=2, memory_bytes=1 << 33),)
    techniques = {name: registry.dotted_path(name) for name in ("ddp", "fsdp", "fsdp_static")}
    preflight = preflight_job(
        job, PreflightOrder(jobs=(job,), shapes=shapes, techniques=techniques, cache_dir=str(tmp_path))
    )
    assert {candidate.technique for candidate in preflight.candidates} == {"ddp"}
    assert all(r.reason.startswith("parameter scale is a single number") for r in preflight.refusals)


NO_DATA = PreparedData(name="n", digest="", num_samples=1, num_held_out=1, kind="tokens", source="")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (replace(LLAMA, config={**TINY, "num_hidden_layers": 100_000_000}), "num_hidden_layers is 100,000,000; a"),
        (model("GPT2LMHeadModel", n_embd=32, n_head=2, n_layer=10**12), "n_layer is 1,000,000,000,000; a model has at"),
        (replace(LLAMA, config={**TINY, "hidden_size": 2**40}), "hidden_size is 1,099,511,627,776; a model"),
        (replace(LLAMA, config={**TINY, "hidden_size": 10**400}), "hidden_size is about 2^1329; a model has at most"),
        (replace(LLAMA, config={**TINY, "vocab_size": 10**9}), "numbers, 32,000,000,000 of them in"),
        (model("GPTNeoForCausalLM", hidden_size=32, num_layers=2, num_heads=2,
               attention_types=[[["global", "local"], 1]], max_position_embeddings=10**6), "10^12"),
    ],
)  # fmt: skip
def test_an_absurd_number_of_a_config_is_refused_before_anything_grows(surveyed, prose, spec, said):
    with pytest.raises(StepError) as raised:
        surveyed(spec, prose)
    assert said.replace("10^12", "000,000,000,000 of them in") in str(raised.value)
    assert "To fix: lower" in str(raised.value)


@pytest.mark.parametrize("patch_size", [0, -1, 3])
def test_patches_that_do_not_divide_an_image_are_refused(surveyed, patch_size):
    spec = model("ViTForImageClassification", **TINY, image_size=8, patch_size=patch_size)
    with pytest.raises(StepError, match=f"cuts images of 8 pixels into patches of {patch_size}. To fix: set"):
        surveyed(spec, DataSpec(source="digits"))


def test_a_model_of_too_many_modules_is_no_longer_built(monkeypatch):
    monkeypatch.setattr(architectures, "MAX_MODULES", 50)
    config = architectures.fresh_config(replace(LLAMA, config={**TINY, "num_hidden_layers": 500}), NO_DATA)
    with pytest.raises(ModelTooLarge, match=r"has more than 51 modules .* To fix: lower the numbers of layers"):
        architectures.instantiate(config)


def test_sizes_of_a_saved_config_are_checked_before_it_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 100000000}')
    with pytest.raises(ValueError, match="num_hidden_layers is 100,000,000"):
        architectures.pretrained_config(ModelSpec(from_pretrained=str(tmp_path)), NO_DATA)


def test_a_function_without_a_source_file_has_no_state():
    assert source_state("math:fsum") == ("math:fsum", None)
