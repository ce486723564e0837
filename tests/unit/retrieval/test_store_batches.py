"""Batch files with jobs of kind store, and the passages that they read."""

import json

import pytest

from ringmaster.codec import from_json
from ringmaster.errors import BatchFileError
from ringmaster.features.stores.job import StoreSettings
from ringmaster.features.stores.passages import ids_and_texts
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.tasks.batch import Batch, load_batch
from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.arrow_files import open_split
from ringmaster.techniques.data.row_kind import retriever_of
from ringmaster.techniques.job_specs import DataSpec
from tests.unit.retrieval.encoders import save_encoder

FILE = """
jobs:
  - name: wiki
    kind: store
    model: {from_pretrained: encoder}
    data: {path: passages.jsonl}
"""


@pytest.fixture
def folder(tmp_path):
    save_encoder(tmp_path / "encoder")
    (tmp_path / "passages.jsonl").write_text('{"id": "a", "text": "city1 city2"}\n{"id": "b", "text": "river1"}\n')
    return tmp_path


def load(folder, text=FILE):
    (folder / "batch.yaml").write_text(text)
    return load_batch(folder / "batch.yaml")


def test_a_store_reads_all_passages_once_with_the_tokenizer_of_its_encoder(folder):
    batch = load(folder)
    (job,) = batch.jobs
    assert job.feature(StoreSettings) == StoreSettings()
    assert (job.data.kind, job.data.held_out, job.data.seq_len) == ("passages", 0.0, 256)
    assert (job.num_epochs, job.global_batch_size) == (1.0, 1024)
    assert job.data.tokenizer == str(folder / "encoder")
    assert Batch.of(name="again", jobs=batch.jobs, folder=folder).jobs == batch.jobs


def test_the_length_of_passages_is_given_once(folder):
    for text in ("store: {max_length: 64}\n    data: ", "data: {seq_len: 64, path: passages.jsonl} #"):
        (job,) = load(folder, FILE.replace("data: ", text)).jobs
        assert (job.data.seq_len, job.feature(StoreSettings).max_length) == (64, 64)


def test_faults_of_stores_are_all_refused(folder):
    text = FILE.replace("model: {from_pretrained: encoder}", "model: {architecture: BertModel}\n    loss: contrastive")
    with pytest.raises(BatchFileError) as refused:
        load(folder, text.replace("data: {path: passages.jsonl}", "data: {source: digits}\n    store: {index: tree}"))
    faults = str(refused.value)
    for fault in ("passages are encoded by a model", "a store trains nothing", "no files of passages", "'tree'"):
        assert fault in faults


def passages_of(path, tmp_path, **options):
    spec = DataSpec(
        kind="passages", path=str(path), held_out=0.0, seq_len=64, tokenizer=str(tmp_path / "encoder"), kwargs=options
    )
    prepared = prepare(spec, cache_dir=tmp_path / "cache")
    return prepared, list(ids_and_texts(open_split(tmp_path / prepared.folder, "training")))


def test_long_texts_are_divided_into_passages_that_overlap(folder):
    rows = [{"id": "long", "text": "a b c d e f g"}, {"id": "short", "text": "a b"}, {"id": 7, "text": "a b c d"}]
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, found = passages_of(folder / "long.jsonl", folder, words=4, overlap=1)
    assert found == [("long#0", "a b c d"), ("long#1", "d e f g"), ("short", "a b"), ("7", "a b c d")]
    with pytest.raises(ValueError, match="overlap is not below words"):
        passages_of(folder / "long.jsonl", folder, words=4, overlap=4)


def test_texts_without_ids_are_named_by_their_content(folder):
    (folder / "plain.jsonl").write_text('{"text": "city1"}\n{"text": "city2"}\n{"text": "city1"}\n')
    prepared, found = passages_of(folder / "plain.jsonl", folder)
    assert [text for _, text in found] == ["city1", "city2"]
    assert len({name for name, _ in found}) == 2
    assert not prepared.training_faults


def test_repeated_ids_are_found_before_a_store_is_made(folder):
    (folder / "twice.jsonl").write_text('{"id": "a", "text": "city1"}\n{"id": "a", "text": "city2"}\n')
    prepared, _ = passages_of(folder / "twice.jsonl", folder)
    assert "'a' 2 times" in prepared.training_faults[0]


READER = """
  - name: reader
    model: {architecture: LlamaForCausalLM}
    data: {kind: completion, path: rows.jsonl, retriever: {store: wiki, k: 2}}
    num_steps: 1
"""


@pytest.mark.parametrize(
    ("data", "store", "fault"),
    [
        ("kind: embedding", "index: flat", r"data\.kind: is not passages"),
        ("seq_len: 64", "max_length: 32", r"data\.seq_len: is 64, and store\.max_length.* is 32"),
        ("kwargs: {words: 3}", "words: 5", r"data\.kwargs: is not read: a store divides"),
    ],
)
def test_what_a_store_would_overwrite_is_refused(folder, data, store, fault):
    text = f"""
jobs:
  - name: wiki
    kind: store
    base: ./encoder
    model: {{architecture: BertModel}}
    data: {{path: passages.jsonl, {data}}}
    store: {{{store}}}
"""
    with pytest.raises(BatchFileError, match=fault):
        load(folder, text)


def test_a_reader_of_a_job_s_store_waits_for_it_and_knows_its_passages(folder):
    (folder / "rows.jsonl").write_text('{"prompt": "city1", "completion": "city2"}\n')
    batch = load(folder, FILE + READER)
    wiki, reader = batch.jobs
    assert reader.parents == ("wiki",)
    assert reader.renamed("b/reader", lambda name: f"b/{name}").parents == ("b/wiki",)
    assert from_json(DataSpec, retriever_of(reader.data).passages) == wiki.data
    assert Batch.of(name="again", jobs=batch.jobs, folder=folder).jobs == batch.jobs


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("store: wiki", "store: reader", "go round in a circle"),
        ("num_steps: 1", "num_steps: 1\n    base: wiki", "wiki makes a knowledge store. To fix: name a job that makes"),
        ("store: wiki", "store: other", "other makes a model. To fix: name a job that makes a knowledge store"),
    ],
)
def test_stores_and_models_are_not_taken_for_each_other(folder, old, new, fault):
    other = READER.replace("reader", "other")
    with pytest.raises(BatchFileError, match=fault):
        load(folder, FILE + READER.replace(old, new) + other)


RETRIEVER = """
jobs:
  - name: finder
    model: {architecture: BertModel}
    data: {kind: embedding, path: pairs.jsonl, tokenizer: ./encoder}
    loss: contrastive
    schedule: {name: cosine, warmup_steps: 4}
    num_steps: 50
    negatives: {path: passages.jsonl, refresh_every: 20, k: 3, store: {index: ivf}}
    user: ana
"""


def test_a_retriever_with_mined_negatives_is_trained_in_parts(folder):
    (folder / "pairs.jsonl").write_text('{"anchor": "city1", "positive": "city2"}\n')
    batch = load(folder, RETRIEVER)
    first, index, second, _, last = batch.jobs
    assert [job.name for job in batch.jobs] == [
        "finder.to-20", "finder.index-20", "finder.to-40", "finder.index-40", "finder",
    ]  # fmt: skip
    assert (index.base, index.feature(StoreSettings).index, index.data.path) == (
        first.name,
        "ivf",
        str(folder / "passages.jsonl"),
    )
    assert second.parents == (first.name, index.name)
    assert last.feature(WarmStart) == WarmStart(checkpoints=second.name, step=40)
    assert [job.loss_options for job in (first, second)] == [{}, {"hard_negatives": 3}]
    assert set(batch.users) == {job.name for job in batch.jobs}
    # What a step trains is that of the whole job, but for the negatives.
    (whole,) = load(folder, RETRIEVER.replace("negatives:", "#")).jobs
    for step in range(50):
        part = next(job for job in (first, second, last) if step < job.num_steps)
        assert (part.learning_rate(step), part.samples(step)) == (whole.learning_rate(step), whole.samples(step))
    assert Batch.of(name="again", jobs=batch.jobs, folder=folder).jobs == batch.jobs


def test_parts_are_evaluated_within_their_own_steps(folder):
    (folder / "pairs.jsonl").write_text('{"anchor": "city1", "positive": "city2"}\n')
    batch = load(folder, RETRIEVER + "    evaluation: {every_steps: 30, at_steps: [10, 25, 45]}\n")
    first, _, second, _, last = (job.evaluation for job in batch.jobs)
    assert (first.every_steps, first.at_steps) == (30, (10,))
    assert (second.every_steps, second.at_steps) == (30, (10, 25))
    assert (last.every_steps, last.at_steps) == (30, (10, 25, 45))
    assert Batch.of(name="again", jobs=batch.jobs, folder=folder).jobs == batch.jobs


def test_the_schedule_of_mined_negatives_is_as_long_as_its_user_says(folder):
    (folder / "pairs.jsonl").write_text('{"anchor": "city1", "positive": "city2"}\n')
    jobs = load(folder, RETRIEVER.replace("name: cosine", "name: cosine, num_steps: 80")).jobs
    assert {job.schedule.num_steps for job in jobs if job.trains and not job.made_by} == {80}
    with pytest.raises(BatchFileError, match=r"schedule\.num_steps: must be at least the 50 steps of the job"):
        load(folder, RETRIEVER.replace("name: cosine", "name: cosine, num_steps: 40"))


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("loss: contrastive", "deadline_s: 9", "are for a contrastive loss"),
        ("num_steps: 50", "num_epochs: 1", "are mined after some of the steps"),
        ("num_steps: 50", "num_steps: 20", "is 20 of 20 steps"),
        ("num_steps: 50", "num_steps: 50\n    warm_start: {checkpoints: other, step: 9}", "no job is named 'other'"),
        ("tokenizer", "retriever: {store: ./encoder}, tokenizer", "cannot be used with negatives"),
    ],
)
def test_negatives_that_cannot_be_mined_on_the_way_are_refused(folder, old, new, fault):
    with pytest.raises(BatchFileError, match=fault):
        load(folder, RETRIEVER.replace(old, new))


def test_a_job_goes_on_from_the_last_step_of_another_alone(folder):
    (folder / "pairs.jsonl").write_text('{"anchor": "city1", "positive": "city2"}\n')
    jobs = RETRIEVER.replace("    negatives", "    #")
    more = jobs.replace("\njobs:", "").replace("finder", "more").replace("50", "60\n    warm_start: {START}")
    load(folder, jobs + more.replace("START", "checkpoints: finder, step: 50"))
    with pytest.raises(BatchFileError, match="finder does not end at step 40"):
        load(folder, jobs + more.replace("START", "checkpoints: finder, step: 40"))
