"""Ludwig configurations as entries of jobs: what they become, and that all that is not taken is refused at once."""

import json
from pathlib import Path

import pytest

from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch import load_batch, parse_batch

EXAMPLE = Path(__file__).parents[3] / "examples" / "ludwig"


def test_the_example_becomes_a_job():
    batch = load_batch(EXAMPLE / "ludwig.yaml", data=EXAMPLE / "flats.csv")
    (job,) = batch.jobs
    assert (batch.name, job.name, job.data.kind) == ("ludwig", "ludwig", "features")
    assert (job.optimizer.name, job.optimizer.lr, job.optimizer.options) == ("adamw", 0.003, {"weight_decay": 0.0})
    assert (job.loss, dict(job.loss_options)) == ("weighted-outputs", {"weights": [1.0, 0.5]})
    assert (job.num_epochs, job.global_batch_size, job.clip_grad_norm) == (30, 32, 0.5)
    assert [each["name"] for each in job.data.kwargs["features"] if each.get("is_output")] == ["rent", "price_class"]


def test_the_keys_of_the_job_win_also_in_a_grid(tmp_path):
    entry = {"name": "flats", "ludwig": str(EXAMPLE / "ludwig.yaml"), "data": {"path": str(EXAMPLE / "flats.csv")}}
    raw = {
        "jobs": [{**entry, "seed": 3, "optimizer": {"name": "sgd", "lr": 0.1}}],
        "grid": [{"template": {**entry, "name": "grid"}, "over": {"seed": [1, 2]}}],
    }
    jobs = parse_batch(json.dumps(raw), folder=tmp_path, name="batch").jobs
    assert [(job.seed, job.optimizer.name) for job in jobs] == [(3, "sgd"), (1, "adamw"), (2, "adamw")]
    assert len({json.dumps(dict(job.data.kwargs)) for job in jobs}) == 1


WRONG = {
    "input_features": [
        {"name": "sound", "type": "audio"},
        {"name": "size", "type": "number", "preprocessing": {"outlier_strategy": "fill_with_mean"}, "tied": "x"},
        {"name": "words", "type": "text", "encoder": {"type": "stacked_cnn"}},
        {"name": "more", "type": "text", "encoder": {"type": "bert"}},
        {"name": "size", "type": "image", "preprocessing": {"height": 8}},
    ],
    "output_features": [
        {"name": "labels", "type": "set"},
        {"name": "kind", "type": "category", "decoder": {"size": 3}},
    ],
    "combiner": {"type": "tabtransformer"},
    "trainer": {"learning_rate": -1, "optimizer": {"type": "lamb"}, "early_stop": 5},
    "defaults": {},
}
PLACES = [
    "input_features[0].type", "input_features[1].preprocessing.outlier_strategy", "input_features[1].tied",
    "input_features[2].encoder.type", "input_features[3].encoder", "input_features[4].preprocessing", "input_features",
    "output_features[0].type", "output_features[1].decoder.size", "combiner.type", "trainer.learning_rate",
    "trainer.optimizer.type", "trainer.early_stop", "defaults",
]  # fmt: skip


def test_all_that_is_not_taken_is_refused_at_once():
    raw = {"jobs": [{"name": "one", "ludwig": WRONG, "data": {"path": str(EXAMPLE / "flats.csv")}}]}
    with pytest.raises(BatchFileError) as error:
        parse_batch(json.dumps(raw), folder=Path(), name="batch")
    assert sorted(each.place for each in error.value.faults) == sorted(f"jobs[0].ludwig.{place}" for place in PLACES)


@pytest.mark.parametrize("configuration", ["nothing.yaml", 3, "flats.csv", {}])
def test_what_is_no_configuration_is_refused(configuration):
    raw = {"jobs": [{"name": "one", "ludwig": configuration, "data": {"path": "flats.csv"}}]}
    with pytest.raises(BatchFileError, match="ludwig"):
        parse_batch(json.dumps(raw), folder=EXAMPLE, name="batch")


def test_faults_are_told_with_their_lines(tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text("input_features:\n  - {name: a, type: number}\n  - {name: b, type: audio}\noutput_features: 3\n")
    with pytest.raises(BatchFileError) as error:
        load_batch(file, data=EXAMPLE / "flats.csv")
    assert [(each.file, each.line) for each in error.value.faults] == [("wrong.yaml", 3), ("wrong.yaml", 4)]
    raw = {"jobs": [{"name": "one", "ludwig": "wrong.yaml", "data": {"path": str(EXAMPLE / "flats.csv")}}]}
    with pytest.raises(BatchFileError) as error:
        parse_batch(json.dumps(raw), folder=tmp_path, name="batch")
    assert [each.message.rpartition(" ")[2] for each in error.value.faults] == ["(wrong.yaml:3)", "(wrong.yaml:4)"]
