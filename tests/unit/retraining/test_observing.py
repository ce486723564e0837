"""The data that is inspected for drift."""

import numpy as np
import pyarrow as pa

from ringmaster.codec import from_json, to_json
from ringmaster.tasks.evaluation.scores import CLASSIFIER, Scores
from ringmaster.tasks.retraining.drift import (
    MAX_ROWS,
    TrainingRecord,
    input_features,
    logged_features,
    references_of,
    scored_features,
)
from ringmaster.techniques.data.arrow_files import ArrowWriter, column_of, split_file


def prepared(folder, **columns):
    with ArrowWriter(split_file(folder, "training")) as writer:
        writer.write(pa.table({name: column_of(values) for name, values in columns.items()}))
    return folder


def test_images_have_brightness_contrast_and_label(tmp_path):
    pixels = np.stack([np.zeros((1, 2, 2)), np.array([[[0.0, 2.0], [0.0, 2.0]]])])
    found = input_features(prepared(tmp_path, pixel_values=pixels, labels=np.array([3, 7])))
    assert found["brightness"].tolist() == [0.0, 1.0]
    assert found["contrast"].tolist() == [0.0, 1.0]
    assert found["label"].tolist() == [3, 7]


def test_text_has_tokens_and_how_many_differ(tmp_path):
    found = input_features(prepared(tmp_path, input_ids=np.array([[1, 1, 1, 1], [1, 2, 3, 4]])))
    assert found["token"].tolist() == [1, 1, 1, 1, 1, 2, 3, 4]
    assert found["distinct_tokens"].tolist() == [0.25, 1.0]


def test_texts_of_different_lengths_have_the_same_features(tmp_path):
    with ArrowWriter(split_file(tmp_path, "training")) as writer:
        writer.write(pa.table({"input_ids": column_of(np.array([1, 1, 1, 1, 5, 2, 3]), np.array([4, 1, 2]))}))
    found = input_features(tmp_path)
    assert found["token"].tolist() == [1, 1, 1, 1, 5, 2, 3]
    assert found["distinct_tokens"].tolist() == [0.25, 1.0, 1.0]


def test_large_data_is_looked_at_in_part(tmp_path):
    found = input_features(prepared(tmp_path, pixel_values=np.zeros((MAX_ROWS + 7, 1, 1, 1))))
    assert len(found["brightness"]) == MAX_ROWS


def test_data_that_was_not_prepared_has_no_features(tmp_path):
    assert input_features(tmp_path) == {}


def test_logs_have_predictions_and_confidences():
    rows = [
        {"prediction": "cat", "confidence": 1},
        {"prediction": "dog", "probabilities": [0.1, 0.9]},
        {"prediction": None, "other": 1},
    ]
    assert logged_features(rows) == {"prediction": ["cat", "dog"], "confidence": [1.0, 0.9]}
    assert logged_features([{"other": 1}]) == {}


def test_probabilities_that_are_no_numbers_have_no_confidence():
    rows = [{"probabilities": [None, 0.3]}, {"probabilities": ["a", 0.3]}, {"probabilities": []}, {"confidence": 0.5}]
    assert logged_features(rows) == {"confidence": [0.5]}


def test_the_newest_rows_of_a_log_count():
    rows = [{"prediction": number} for number in range(MAX_ROWS + 10)]
    assert logged_features(rows)["prediction"][0] == 10


def test_scores_have_the_same_features_as_a_log():
    probabilities = np.array([[0.25, 0.75], [0.5, 0.5]], dtype=np.float32)
    scores = Scores(kind=CLASSIFIER, num_rows=2, predictions=np.array([1, 0]), probabilities=probabilities)
    found = references_of(scored_features(scores))
    assert found["prediction"].categories == ("0", "1")
    assert found["confidence"].is_number
    logged = references_of(logged_features([{"prediction": 1, "confidence": 0.75}, {"prediction": 0, "confidence": 1}]))
    assert logged["prediction"].categories == found["prediction"].categories


def test_a_feature_without_a_finite_number_has_no_reference():
    features = {"confidence": np.array([np.nan, np.inf]), "prediction": np.array([0, 0]), "label": [None]}
    assert list(references_of(features)) == ["prediction"]


def test_what_is_kept_travels_as_json():
    kept = TrainingRecord(
        run_date="2026-11-20",
        at_s=5.0,
        digest="d",
        num_samples=3,
        files=(("a.jsonl", "10 20"),),
        inputs=references_of({"label": np.array([1, 2])}),
        predictions=references_of({"confidence": np.array([0.5, 1.0])}),
    )
    assert from_json(TrainingRecord, to_json(kept)) == kept
