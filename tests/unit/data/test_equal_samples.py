"""Equal files give equal samples in every release: the digests of prepared data are in the records of models."""

import json

import pytest

from tests.unit.data.equal_samples import CASES, prepared_case
from tests.unit.data.recorded_samples import KINDS, RECORD, recorded_kind

# Of the samples, and of the rows of data with a name; computed by release 0.2, which read files whole.
DIGESTS = {
    "one text": ("67a5824fc0703796",),
    "one text, none held out": ("7f9b03cf06122a03",),
    "several texts": ("045a8f9eee1a9ad9",),
    "one text, named": ("67a5824fc0703796", "e5f03dac4d43772d", "ff4919a28f772e2a"),
    "one text, a tokenizer": ("401302b572b95a9f",),
    "several texts, a tokenizer": ("660f3c3b62888c97", "66c7e5569ff83c08", "6a67e98fc695157e"),
    "last texts": ("9fef2730b7e4b834", "eabada2d6fc6e214", "1ba4d0a4c865cd66"),
    "jsonl": ("c6fc46ede5abfb94",),
    "jsonl, a tokenizer": ("914265afce51f649", "bdae914e993ea7d8", "8e333dab7cdfde05"),
    "csv": ("c6fc46ede5abfb94",),
    "parquet": ("c6fc46ede5abfb94", "bdae914e993ea7d8", "8e333dab7cdfde05"),
    "files of rows": ("2543391564cde5f6", "1da6804c03479aa9", "3bb1da75e12ca7b4"),
    "last days": ("52b379d071aeaf02", "6fc5ba2764316f8d", "f990b0df2391478d"),
    "last rows": ("4f15e242090b0237", "ac40640471d89160", "f609390fa022b762"),
    "ids": ("ffd5fcd1db5d9628",),
    "large ids": ("ccf9b0415cb5d1bc", "772639256d83b032", "ad8944b362681793"),
}


@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_earlier_releases(name, tmp_path):
    assert prepared_case(name, tmp_path) == DIGESTS[name]


@pytest.mark.parametrize("name", KINDS)
def test_samples_of_a_kind_are_those_of_the_release_before(name, tmp_path):
    found = json.loads(json.dumps(recorded_kind(name, tmp_path)))
    assert found == json.loads(RECORD.read_text())[name]
