"""Features of installed distributions are found by their entry points."""

import sys

import pytest

from ringmaster import features, registry


@pytest.fixture
def installed_feature(tmp_path, monkeypatch):
    """A package with the module `job` alone, under an entry point."""
    package = tmp_path / "noted"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "job.py").write_text("KEY = 'note'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        registry, "installed", lambda group: {"note": "noted"} if group == features.ENTRY_POINT_GROUP else {}
    )
    for cached in (features.packages, features.modules):
        cached.cache_clear()
    yield
    for cached in (features.packages, features.modules):
        cached.cache_clear()
    for name in ("noted", "noted.job"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("installed_feature")
def test_modules_of_installed_features_follow_the_built_in_ones():
    assert features.packages()[-1] == "noted"
    assert features.modules("job")[-1].KEY == "note"
    assert "noted.trainer" not in [module.__name__ for module in features.modules("trainer")]
