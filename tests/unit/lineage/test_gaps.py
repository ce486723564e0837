"""Which tokens were taken out of a sequence, for `ringmaster lineage undo`."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.features.undo.undoing import _first_step_with, gaps_between, samples_with_gaps
from ringmaster.techniques import DataSpec
from ringmaster.techniques.data import open_data, prepare, sampler_of
from ringmaster.techniques.data.arrow_files import column_of, table_of
from ringmaster.techniques.job import Job
from ringmaster.techniques.job_specs import ModelSpec


def tokens_in(gaps):
    return {token for first, end in gaps for token in range(first, end)}


@st.composite
def documents(draw):
    """(documents, which one is taken out): of few different tokens, so that neighbours often look alike."""
    result = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=2, max_size=8))
    return result, draw(st.integers(0, len(result) - 1))


@given(documents())
def test_the_tokens_of_a_document_that_was_taken_out_are_all_found(value):
    parts, taken = value
    old = np.array([token for part in parts for token in part])
    new = np.array([token for i, part in enumerate(parts) if i != taken for token in part], dtype=old.dtype)

    gaps = gaps_between(old, new)

    # What is left of the sequence is explained by the gaps, and the document lies in them.
    first = sum(map(len, parts[:taken]))
    assert set(range(first, first + len(parts[taken]))) <= tokens_in(gaps)


def test_equal_sequences_have_no_gap():
    assert gaps_between(np.arange(9), np.arange(9)) == []


def test_the_last_tokens_that_fill_no_sample_are_no_gap():
    old = np.arange(400)
    assert gaps_between(old, np.delete(old, range(5, 9))[:390]) == [(5, 9)]


def test_a_text_cut_into_samples_names_those_in_which_the_gap_lies():
    old = np.arange(400)
    new = np.delete(old, range(10, 13))[:396]
    assert samples_with_gaps(text(old), text(new)) == {2, 3}


def text(tokens):
    return table_of({"input_ids": column_of(tokens.reshape(-1, 4))})


def test_other_samples_are_compared_one_by_one():
    old, new = (
        [{"a": 1, "b": [1]}, {"a": 2, "b": [1, 2]}, {"a": 1, "b": [1]}],
        [{"a": 1, "b": [1]}, {"a": 2, "b": [1, 2]}],
    )
    assert samples_with_gaps(rows(old), rows(new)) == {2}


def rows(values):
    import pyarrow as pa

    return pa.Table.from_pylist(values)


def test_the_first_step_with_a_row_is_that_of_the_order_in_which_samples_of_equal_length_are_trained(tmp_path):
    rows = [{"prompt": "ab" * (1 + n % 7), "note": "long " * (40 - n), "number": n} for n in range(40)]

    def prepared_without(number):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows if row["number"] != number))
        data = DataSpec(kind="prompt", path=str(file), vocab_size=300, held_out=0.0, sampling="length-grouped")
        return data, prepare(data, cache_dir=tmp_path)

    data, prepared = prepared_without(None)
    job = Job(name="a", model=ModelSpec(architecture="GPT2LMHeadModel"), data=data, global_batch_size=4, num_steps=10)
    training, _ = open_data(data, cache_dir=tmp_path, prepared=prepared)
    sampler = sampler_of(job, training)
    for number in (0, 17, 39):
        step = _first_step_with(job, sampler, prepared, prepared_without(number)[1], first=0)
        assert number in sampler.indices(step).tolist()
