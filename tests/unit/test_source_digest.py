"""The digest of a user's code, which holds the modules that it imports."""

import sys
from pathlib import Path

import pytest

from ringmaster.registry import resolve, source_digest, source_files
from ringmaster.tasks.profiling import profile_store

FILES = {
    "own_package/__init__.py": "",
    "own_package/losses.py": "from own_package import masks\nfrom .numbers.scales import X\ndef loss(): return masks",
    "own_package/masks.py": "def mask():\n    import own_helper\n    return own_helper",
    "own_package/numbers/__init__.py": "from . import defaults",
    "own_package/numbers/defaults.py": "X = 1",
    "own_package/numbers/scales.py": "from ..masks import mask\nX = 2",
    "own_package/other.py": "Y = 1",
    "own_helper.py": "import json, own_package.losses",
    "not_imported.py": "",
}
USED = [name for name in FILES if name not in ("own_package/other.py", "not_imported.py")]


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("own_package", "own_helper")]:
        del sys.modules[name]


def test_the_modules_of_a_project_that_a_module_imports_are_its_sources(project):
    files = source_files(project / "own_package" / "losses.py", module="own_package.losses")
    assert sorted(str(each.relative_to(project)) for each in files) == sorted(USED)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_helper_changes_the_digest_of_what_imports_it(project, name):
    dotted = "own_package.losses:loss"

    def digests():
        return source_digest(resolve(dotted)), profile_store.source_digest(dotted, (str(project),))

    before = digests()
    (project / name).write_text(FILES[name] + "\n# changed")
    assert [one != two for one, two in zip(before, digests(), strict=True)] == [name in USED] * 2


def test_a_module_that_cannot_be_read_imports_nothing(project):
    (project / "own_helper.py").write_text("def (")
    files = source_files(project / "own_package" / "masks.py", module="own_package.masks")
    assert [each.name for each in files] == ["masks.py", "own_helper.py"]


def test_installed_modules_are_known_by_their_files_alone():
    file = Path(pytest.__file__)
    assert source_files(file, module="pytest") == [file]
