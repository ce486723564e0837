"""Word and character error rates of texts that a model writes, and what a CTC model writes in its frames."""

import json

import pytest
import torch
from transformers import Wav2Vec2CTCTokenizer

from ringmaster.features.speech.ctc import Ctc
from ringmaster.features.speech.error_rates import edit_distance
from ringmaster.techniques.loss import LossInputs
from ringmaster.techniques.metric import Outputs, metrics_named

LETTERS = ["<pad>", "<unk>", "|", *"abcde"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    result = tmp_path_factory.mktemp("tokenizer")
    (result / "vocab.json").write_text(json.dumps({each: place for place, each in enumerate(LETTERS)}))
    tokenizer = Wav2Vec2CTCTokenizer(str(result / "vocab.json"), pad_token="<pad>", bos_token=None, eos_token=None)
    tokenizer.save_pretrained(result)
    return result


def tokens(text):
    return [LETTERS.index("|" if each == " " else each) for each in text]


def rates(pairs, folder):
    labels = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens(true)) for _, true in pairs], True, -100)
    outputs = Outputs(
        output=None,
        batch={},
        logits=None,
        labels=labels,
        losses=None,
        tokenizer_dir=folder,
        written=[tokens(own) for own, _ in pairs],
    )
    return {
        metric.name: float(
            metric.value({name: each.sum().numpy() for name, each in metric.compute_sums(outputs).items()})
        )
        for metric in metrics_named(["word_error_rate", "character_error_rate"])
    }


@pytest.mark.parametrize(
    ("one", "other", "edits"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("aab", "aab", 0)],
)
def test_the_edit_distance_is_the_fewest_changes(one, other, edits):
    assert edit_distance(one, other) == edits
    assert edit_distance([*one], [*other]) == edits


def test_rates_are_of_all_rows_together(folder):
    # One of two words is wrong, one of one is missing, and one of one is one too many: 3 of 4 words.
    pairs = [("ab cd", "ab ce"), ("", "a"), ("b b", "b")]
    assert rates(pairs, folder) == {
        "word_error_rate": pytest.approx(3 / 4),
        "character_error_rate": pytest.approx(4 / 7),
    }


def test_equal_letters_beside_each_other_are_two(folder):
    assert rates([("aab", "aab"), ("ab", "aab")], folder)["character_error_rate"] == pytest.approx(1 / 6)


def test_a_row_does_not_depend_on_others(folder):
    pairs = [("ab", "abc"), ("de de", "de"), ("c", "cab abc")]
    alone = [rates([pair], folder)["character_error_rate"] * len(pair[1]) for pair in pairs]
    together = rates(pairs, folder)["character_error_rate"]
    assert together * sum(len(true) for _, true in pairs) == pytest.approx(sum(alone))


@pytest.mark.parametrize("missing", ["written", "labels", "tokenizer_dir"])
def test_what_is_no_transcript_has_no_rate(folder, missing):
    given = {"labels": torch.ones(1, 2, dtype=torch.long), "tokenizer_dir": folder, "written": [[1]]}
    outputs = Outputs(output=None, batch={}, logits=None, losses=None, **{**given, missing: None})
    assert metrics_named(["word_error_rate"])[0].compute_sums(outputs) is None


class Frames:
    """A model of speech whose frames are its samples."""

    class config:
        pad_token_id = 0

    def _get_feat_extract_output_lengths(self, lengths):
        return lengths


@pytest.mark.parametrize("has_mask", [True, False])
def test_a_ctc_model_writes_the_likeliest_tokens_of_frames_of_speech(has_mask):
    frames = torch.tensor([[3, 3, 0, 3, 4, 4, 0], [5, 0, 5, 5, 6, 6, 6]])
    batch = {"input_values": torch.zeros(2, 7)}
    if has_mask:
        batch["attention_mask"] = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    inputs = LossInputs(
        output=None,
        batch=batch,
        logits=torch.nn.functional.one_hot(frames, 8).float(),
        labels=None,
        totals={},
        reference=None,
        model=Frames(),
    )
    assert Ctc().written(inputs) == [[3, 3, 4], [5, 5] if has_mask else [5, 5, 6]]
