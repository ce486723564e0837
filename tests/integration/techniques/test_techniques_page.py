"""The technique in docs/techniques.md, taken from the page, passes the conformance tests of built-in techniques."""

import re
import sys
from pathlib import Path

import pytest

from tests.integration.techniques.test_conformance import assert_trains_on_from
from tests.integration.techniques.test_conformance import assert_trains_the_same as assert_trains
from tests.integration.workbench import ADAMW, SGD, SINGLE, Layout
from tests.matrix import matrix

PAGE = Path(__file__).parents[3] / "docs" / "techniques.md"
LAYOUTS = [
    Layout("replicas_of_the_page:Replicas", num_devices, config)
    for num_devices, config in ((2, {}), (2, {"micro_batch": 3}), (2, {"recompute": "full"}), (4, {}))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's code as a module that workers can import."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    lines = [line for line in code.splitlines() if line]
    assert len(lines) <= 16, "the page says fifteen"
    folder = tmp_path_factory.mktemp("page")
    (folder / "replicas_of_the_page.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield str(folder)
    sys.modules.pop("replicas_of_the_page", None)


class Importing:
    """A workbench whose workers also import from `folder`."""

    def __init__(self, bench, folder):
        self._bench, self._folder = bench, folder
        self.reference = bench.reference

    def train(self, job, layout, where, **changes):
        return self._bench.train(job, layout, where, import_paths=(self._folder,), **changes)


@pytest.mark.parametrize("optimizer", matrix([SGD, ADAMW], quick=[ADAMW], ids=["sgd", "adamw"]))
# Three micro-batches on two ranks hold what whole batches do. The other layouts are the built-in techniques' too.
@pytest.mark.parametrize("layout", matrix(LAYOUTS, quick=LAYOUTS[1:2]))
def test_it_trains_what_single_trains(bench, folder, tmp_path, layout, optimizer):
    job = bench.job(optimizer=optimizer, clip_grad_norm=1.0)
    assert_trains(Importing(bench, folder), job, layout, tmp_path)


def test_it_goes_on_from_others_and_others_from_it(bench, folder, tmp_path):
    job, importing = bench.job(optimizer=ADAMW), Importing(bench, folder)
    importing.train(job, SINGLE, tmp_path, last_step=2)
    importing.train(job, LAYOUTS[0], tmp_path, last_step=4)
    assert_trains_on_from(importing, job, Layout("fsdp", 2, {"reshard": True}), tmp_path, first_step=4)
