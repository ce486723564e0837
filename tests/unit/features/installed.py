"""Features of distributions that are installed for a test alone."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringmaster import feature_check, feature_hooks, features, registry
from ringmaster.techniques import job_features

CACHES = (
    *(registry.installed, features.installed_packages, features.packages, features.modules_by_package),
    *(feature_hooks.examined, feature_check.feature_findings),
    *(job_features.feature_kinds, job_features.file_keys),
)


def install(site: Path, name: str, modules: Mapping[str, str], *, entry_points: str = "") -> None:
    """Installs a distribution whose package has modules of these texts, and is a feature."""
    package, metadata = site / name, site / f"{name}-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    for module, text in {"__init__": "", **modules}.items():
        (package / f"{module}.py").write_text(text)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{features.ENTRY_POINT_GROUP}]\n{name} = {name}\n{entry_points}")


@contextmanager
def installed(site: Path, packages: Mapping[str, Mapping[str, str]], *, entry_points: str = "") -> Iterator[None]:
    """Installs distributions of features, by their names, inside the context."""
    for name, modules in packages.items():
        install(site, name, modules, entry_points=entry_points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        for cached in CACHES:
            cached.cache_clear()
        try:
            yield
        finally:
            for name, module in [*sys.modules.items()]:
                if str(getattr(module, "__file__", "")).startswith(f"{site}/"):
                    del sys.modules[name]
    for cached in CACHES:
        cached.cache_clear()
