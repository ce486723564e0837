"""The built-in kinds of data that make a sample of each row: tokens, labels, masks, and batches of them."""

import json
import shutil
from pathlib import Path

import pytest

from ringmaster.techniques.data import fetch, prepare, sampler_of, width_of
from ringmaster.techniques.data.inference import infer_kind
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import DataSpec, ModelSpec
from ringmaster.techniques.metric import IGNORED
from tests.unit.data.prepared_rows import NUM_ROWS, jsonl, opened, refused


def test_pairs_of_texts_have_the_tokenizers_special_tokens(tmp_path, bert_tokenizer):
    rows = [{"text": "one two", "text_pair": "three", "label": i % 2} for i in range(4)]
    _, training, tokenizer = opened(tmp_path, "text-classification", rows, tokenizer=bert_tokenizer)
    sample = {name: tensor.tolist() for name, tensor in training[0].items()}
    assert tokenizer.convert_ids_to_tokens(sample["input_ids"]) == ["[CLS]", "one", "two", "[SEP]", "three", "[SEP]"]
    assert sample["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    reference = tokenizer("one two", "three")
    assert sample["input_ids"] == reference["input_ids"]
    assert sample["token_type_ids"] == reference["token_type_ids"]


def test_a_row_without_the_second_text_that_others_have_is_refused(tmp_path, bert_tokenizer):
    rows = [{"text": "one two", "text_pair": "three" if i != 2 else None, "label": i % 2} for i in range(6)]
    said = refused(tmp_path, "text-classification", rows, tokenizer=bert_tokenizer)
    assert "rows.jsonl, line 3 has no value in 'text_pair'. To fix: add the value, or remove the row" in said


@pytest.mark.parametrize("length", [3, 4, 5, 6, 7, 8])
def test_the_longer_text_of_a_pair_is_cut(tmp_path, bert_tokenizer, length):
    rows = [{"text": "one two one two", "text_pair": "three", "label": i % 2} for i in range(4)]
    prepared, training, tokenizer = opened(
        tmp_path, "text-classification", rows, tokenizer=bert_tokenizer, seq_len=length
    )
    reference = tokenizer("one two one two", "three", truncation="longest_first", max_length=length)
    assert prepared.num_truncated == (4 if length < 8 else 0)
    kept = training[0]["attention_mask"].bool()
    assert training[0]["input_ids"][kept].tolist() == reference["input_ids"]
    assert prepared.seq_len == length


def test_what_is_cut_is_counted(tmp_path):
    rows = [{"prompt": "a" * 5, "completion": "b" * length} for length in (3, 30, 300)]
    prepared, training, _ = opened(tmp_path, "completion", rows, seq_len=10, vocab_size=257)
    assert prepared.num_truncated == 2
    assert fetch(training, range(3))["input_ids"].shape == (3, 10)
    assert prepared.lengths == (10, 10)


def test_typical_lengths_are_recorded(tmp_path):
    rows = [{"prompt": "p", "completion": "c" * length} for length in (1, 3, 5, 9)]
    assert opened(tmp_path, "completion", rows, seq_len=20, vocab_size=257)[0].lengths == (7, 11)


def test_what_has_nothing_to_learn_is_left_out(tmp_path):
    rows = [{"prompt": "p" * length, "completion": "c"} for length in (1, 2, 40, 50)]
    prepared, training, _ = opened(tmp_path, "completion", rows, seq_len=10, vocab_size=257)
    assert (len(training), prepared.num_samples, prepared.num_left_out) == (2, 2, 2)
    assert prepared.summary("completion").endswith("2 were left out, as nothing to learn was left of them")
    said = refused(tmp_path / "..", "completion", rows[2:], seq_len=10, vocab_size=257)
    assert "holds no row to train on. To fix: raise seq_len" in said


def test_a_prompt_has_no_labels(tmp_path):
    rows = [{"question": f"what is {i}?", "answer": f" it is {i}"} for i in range(NUM_ROWS)]
    _, training, tokenizer = opened(tmp_path, "completion", rows)
    tokens, labels = training[3]["input_ids"], training[3]["labels"]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "what is 3? it is 3"
    assert tokenizer.decode(labels[labels != IGNORED]) == " it is 3<|endoftext|>"
    assert "attention_mask" not in training[3]


def test_an_instruction_may_have_an_input(tmp_path):
    rows = [{"instruction": "say it twice", "input": word, "output": f"{word} {word}"} for word in ("a", "b", "")]
    _, training, tokenizer = opened(tmp_path, "completion", rows)
    texts = [tokenizer.decode(training[i]["input_ids"], skip_special_tokens=True) for i in (0, 2)]
    assert texts == ["say it twice\n\naa a", "say it twice "]


def test_a_completion_may_be_a_message(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "ho"}]}] * 3
    _, training, tokenizer = opened(tmp_path, "completion", rows, vocab_size=270)
    tokens, labels = training[0]["input_ids"], training[0]["labels"]
    assert tokenizer.decode(labels[labels != IGNORED]) == "ho<|im_end|>\n"
    assert tokenizer.decode(tokens).startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho")


def test_both_answers_are_rows_of_a_sample(tmp_path):
    rows = [{"prompt": f"q {i}", "chosen": " yes, I know", "rejected": " no"} for i in range(NUM_ROWS)]
    prepared, training, tokenizer = opened(tmp_path, "preference", rows)
    batch = fetch(training, [0, 5])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 2, prepared.seq_len)
    said = [[tokenizer.decode(labels[labels != IGNORED]) for labels in sample] for sample in batch["labels"]]
    assert said == [[" yes, I know<|endoftext|>", " no<|endoftext|>"]] * 2
    assert tokenizer.decode(batch["input_ids"][1, 1], skip_special_tokens=True) == "q 5 no"


@pytest.mark.parametrize("has_prompt", [True, False], ids=["prompt", "whole-conversations"])
def test_answers_may_be_messages(tmp_path, has_prompt):
    prompt = [{"role": "user", "content": "hi"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("hello", "go away")]
    chosen, rejected = answers if has_prompt else (prompt + answer for answer in answers)
    row = {"chosen": chosen, "rejected": rejected, **({"prompt": prompt} if has_prompt else {})}
    _, training, tokenizer = opened(tmp_path, "preference", [row] * 3, vocab_size=280)
    said = [tokenizer.decode(labels[labels != IGNORED]) for labels in training[0]["labels"]]
    assert said == ["hello<|im_end|>\n", "go away<|im_end|>\n"]


def test_a_prompt_is_what_both_texts_begin_with(tmp_path):
    rows = [{"chosen": "Human: hi Assistant: yes", "rejected": "Human: hi Assistant: no"}] * 3
    _, training, tokenizer = opened(tmp_path, "preference", rows)
    said = [tokenizer.decode(labels[labels != IGNORED]) for labels in training[0]["labels"]]
    assert said == [" yes<|endoftext|>", " no<|endoftext|>"]


def test_texts_begin_with_the_tokenizers_special_token_and_are_encoded_as_one(tmp_path, bert_tokenizer):
    row = {"prompt": "what is three", "completion": "two", "chosen": "two", "rejected": " it"}
    whole = ["[CLS]", "what", "is", "three", "##two"]
    _, training, tokenizer = opened(tmp_path, "completion", [row] * 3, tokenizer=bert_tokenizer)
    assert tokenizer.convert_ids_to_tokens(training[0]["input_ids"].tolist()) == whole
    assert training[0]["labels"].tolist() == [IGNORED] * 4 + tokenizer.convert_tokens_to_ids(["##two"])
    _, training, _ = opened(tmp_path, "preference", [row] * 3, tokenizer=bert_tokenizer)
    assert tokenizer.convert_ids_to_tokens(training[0]["input_ids"][0].tolist()) == whole
    _, training, _ = opened(tmp_path, "prompt", [{"prompt": row["prompt"]}] * 3, tokenizer=bert_tokenizer)
    assert tokenizer.convert_ids_to_tokens(training[0]["input_ids"][:4].tolist()) == whole[:4]


def test_pairs_have_masks_and_no_labels(tmp_path):
    rows = [{"anchor": f"q {i}", "positive": f"a rather long answer {i}"} for i in range(NUM_ROWS)]
    _, training, _ = opened(tmp_path, "embedding", rows)
    batch = fetch(training, [0, 1])
    assert set(batch) == {"input_ids", "attention_mask"}
    lengths = batch["attention_mask"].sum(-1)
    assert (lengths[:, 0] < lengths[:, 1]).all()


def test_triplets_have_a_hard_negative_each(tmp_path):
    rows = [{"anchor": f"q {i}", "positive": f"answer {i}", "negative": "another answer"} for i in range(NUM_ROWS)]
    _, training, tokenizer = opened(tmp_path, "embedding", rows)
    batch = fetch(training, [0, 1])
    assert batch["input_ids"].shape[:2] == batch["attention_mask"].shape[:2] == (2, 3)
    said = tokenizer.decode(batch["input_ids"][1, 2][batch["attention_mask"][1, 2].bool()])
    assert said == "another answer"
    rows[2] |= {"negative": None}
    assert "line 3 has no value in 'negative'" in refused(tmp_path, "embedding", rows)


def test_an_encoder_decoders_labels_are_the_target(tmp_path):
    rows = [{"input": f"number {i}", "target": f"it is {i}"} for i in range(NUM_ROWS)]
    _, training, tokenizer = opened(tmp_path, "seq2seq", rows, kwargs={"prefix": "say: "})
    sample = training[2]
    assert tokenizer.decode(sample["input_ids"][sample["attention_mask"].bool()]) == "say: number 2<|endoftext|>"
    assert tokenizer.decode(sample["labels"][sample["labels"] != IGNORED]) == "it is 2<|endoftext|>"


def test_the_first_token_of_a_word_has_its_label(tmp_path, bert_tokenizer):
    rows = [{"tokens": ["one", "threetwo", "two"], "labels": ["A", "B", "O"]}] * 4
    prepared, training, tokenizer = opened(tmp_path, "token-classification", rows, tokenizer=bert_tokenizer)
    assert prepared.labels == ("A", "B", "O")
    shown = list(
        zip(tokenizer.convert_ids_to_tokens(training[0]["input_ids"]), training[0]["labels"].tolist(), strict=True)
    )
    assert shown == [
        ("[CLS]", IGNORED), ("one", 0), ("three", 1), ("##two", IGNORED), ("two", 2), ("[SEP]", IGNORED)
    ]  # fmt: skip


def test_numbers_are_predicted_by_regression(tmp_path):
    rows = [{"text": f"row {i}", "label": f"{i / 2}"} for i in range(NUM_ROWS)]
    prepared, training, _ = opened(tmp_path, "text-regression", rows)
    assert prepared.num_labels == 1
    assert training[3]["labels"].item() == 1.5


def test_a_batch_is_as_wide_as_its_longest_sample(tmp_path):
    rows = [{"prompt": "q", "completion": "word " * length} for length in (1, 2, 3, 40)]
    prepared, training, _ = opened(tmp_path, "completion", rows, vocab_size=257)
    lengths = [int((training[i]["labels"] != IGNORED).sum()) + 1 for i in range(4)]
    assert width_of(training, [0, 1], multiple_of=1) == lengths[1]
    assert width_of(training, [1, 0], multiple_of=8) == -(-lengths[1] // 8) * 8
    assert width_of(training, [3, 0], multiple_of=1000) == prepared.seq_len == lengths[3]
    narrow = fetch(training, [0, 1], width=lengths[1])
    wide = fetch(training, [0, 1])
    assert (wide["input_ids"][:, : lengths[1]] == narrow["input_ids"]).all()
    assert (wide["labels"][:, lengths[1] :] == IGNORED).all()


def test_batches_have_samples_of_similar_length(tmp_path):
    rows = [{"prompt": "q", "completion": "word " * (1 + i * 7 % 40)} for i in range(NUM_ROWS)]
    prepared, training, _ = opened(tmp_path, "completion", rows, sampling="length-grouped", vocab_size=257)
    plain = DataSpec(kind="completion", path=str(tmp_path / "rows.jsonl"), vocab_size=257, held_out=0.0)
    assert prepared.folder == prepare(plain, cache_dir=tmp_path / "cache").folder  # prepared once
    lengths = [int((sample["labels"] != IGNORED).sum()) + 1 for sample in training]
    assert training.lengths().tolist() == lengths
    data = DataSpec(path="", sampling="length-grouped")
    sampler = sampler_of(Job(name="a", model=ModelSpec(), data=data, global_batch_size=4), training)
    assert max(lengths) in {lengths[i] for i in sampler.indices(0)}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"source": "python-stdlib"}, "samples of kind python-stdlib have one length. To fix: set sampling to random"),
        ({"path": "*.png", "kind": "image-classification"}, "samples of kind image-classification have one length"),
        ({"path": "a.jsonl", "kind": "chat", "sampling": "sorted"}, "'sorted' is unknown. To fix: give one of random"),
    ],
)
def test_samples_of_one_length_are_not_grouped(tmp_path, spec, says):
    with pytest.raises(ValueError, match=says):
        prepare(DataSpec(**{"sampling": "length-grouped", **spec}), cache_dir=tmp_path)


@pytest.mark.parametrize("kind", ["embedding", "completion"])
def test_samples_may_be_read_in_any_order(tmp_path, kind):
    """Pairs [2, tokens] and rows [tokens], cut, padded, or as long as the width."""
    first, second = ("anchor", "positive") if kind == "embedding" else ("prompt", "completion")
    rows = [{first: "a" * (1 + i), second: "b" * (2 + 3 * i)} for i in range(4)]
    _, training, _ = opened(tmp_path, kind, rows, vocab_size=257)
    alone, order = [training[i] for i in range(4)], (3, 0, 3, 2)
    for width in (3, 7, training.width):
        for name, tensor in fetch(training, order, width=width).items():
            assert tensor.tolist() == [alone[i][name][..., :width].tolist() for i in order]


def test_a_trained_tokenizer_pads(tmp_path):
    """As pipelines of transformers do, which encode texts in batches."""
    rows = [{"text": "some text", "label": "a"}, {"text": "more", "label": "b"}]
    *_, tokenizer = opened(tmp_path, "text-classification", rows)
    masks = tokenizer(["some text", "more"], padding=True)["attention_mask"]
    assert len(masks[0]) == len(masks[1]) > sum(masks[1])


def test_texts_are_as_long_as_sentence_transformers_reads_them_or_it_is_told(tmp_path, bert_tokenizer):
    folder = Path(bert_tokenizer)
    base = shutil.copytree(folder, tmp_path / "base")
    (base / "modules.json").write_text('[{"path": "", "type": "sentence_transformers.models.Transformer"}]')
    (base / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    path = str(tmp_path / "rows.jsonl")
    jsonl(tmp_path / "rows.jsonl", [{"anchor": "one two three four", "positive": f"one {n}"} for n in range(9)])

    def told(tokenizer, **spec):
        given = DataSpec(kind="embedding", path=path, tokenizer=str(tokenizer), held_out=0, **spec)
        prepared = prepare(given, cache_dir=tmp_path / "cache")
        notes = tuple(note for note in prepared.notes if "Sentence-Transformers" in note)
        return prepared.seq_len, prepared.num_truncated, notes

    assert told(base) == (4, 9, ())
    length, _, (note,) = told(base, seq_len=20)
    assert length == 20
    assert "of which Sentence-Transformers reads 4 with" in note
    assert told(folder)[1:] == (0, ())


def test_an_answer_may_consist_of_blanks_and_a_text_that_begins_with_its_prompt_may_not(tmp_path):
    path = tmp_path / "rows.jsonl"

    def prepared(kind, row):
        path.write_text(json.dumps(row) + "\n")
        return prepare(DataSpec(kind=kind, path=str(path), vocab_size=300, held_out=0), cache_dir=tmp_path / "cache")

    prepared("completion", {"prompt": "a", "completion": " "})
    prepared("preference", {"prompt": "a", "chosen": "b", "rejected": " "})
    with pytest.raises(ValueError, match=r"row 1: the rejected is ' ', which has no visible character"):
        prepared("preference", {"chosen": " b", "rejected": " "})


CAUSAL, CLASSIFIER = "LlamaForCausalLM", "BertForSequenceClassification"


@pytest.mark.parametrize(
    ("row", "architecture", "kind"),
    [
        ({"messages": []}, CAUSAL, "chat"),
        ({"chosen": "", "rejected": ""}, CAUSAL, "preference"),
        ({"prompt": "", "completion": ""}, CAUSAL, "completion"),
        ({"prompt": "", "completion": "", "text": ""}, CAUSAL, None),
        ({"prompt": "", "completion": "", "label": True}, CAUSAL, "unpaired-preference"),
        ({"text": ""}, CAUSAL, None),
        ({"text": "", "label": ""}, CLASSIFIER, "text-classification"),
        ({"text": "", "stars": ""}, CLASSIFIER, "text-classification"),
        ({"text": ""}, "T5ForConditionalGeneration", None),
        ({"sentence1": "", "sentence2": "", "label": ""}, CLASSIFIER, "text-classification"),
        ({"tokens": [], "ner_tags": []}, "BertForTokenClassification", "token-classification"),
        ({"input": "", "target": ""}, "T5ForConditionalGeneration", "seq2seq"),
        ({"anchor": "", "positive": ""}, "BertModel", "embedding"),
        ({"image": "", "label": ""}, "ViTForImageClassification", "image-classification"),
        ({"messages": []}, None, "chat"),
        ({"prompt": "", "completion": ""}, None, None),
    ],
)
def test_the_kind_is_inferred_where_there_is_no_doubt(tmp_path, row, architecture, kind):
    spec = DataSpec(path=jsonl(tmp_path / "rows.jsonl", [row]))
    model = ModelSpec(factory="a:b") if architecture is None else ModelSpec(architecture=architecture)
    assert infer_kind(spec, model) == kind
