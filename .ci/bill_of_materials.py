"""The bill of materials of a wheel: the tested environment of requirements.txt, in CycloneDX's format.

A hook of the build backend writes it to `ringmaster_ml-VERSION.dist-info/sboms/` (PEP 770). Its packages are those that
the release was tested with; an installation may have others of pyproject.toml's ranges. Their scope says what needs
them: `required` packages come with the wheel, `optional` ones with its extras, `excluded` ones are for development.
"""

from __future__ import annotations

import json
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))  # the build backend runs this file by its path
sys.path.insert(0, str(Path(__file__).parent))  # where PYTHONSAFEPATH is set, too
from lock_file import LockedPackage, package_names, read_lock, read_project, with_dependencies

NAME = "ringmaster.cdx.json"


class BillOfMaterials(BuildHookInterface[Any]):
    """The hook: adds the bill of materials to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the bill, and names it to the builder, except for editable installs."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / NAME
        path.write_text(json.dumps(bill_of_materials(Path(self.root)), indent=1) + "\n")
        build_data["sbom_files"].append(str(path))


def bill_of_materials(root: Path) -> dict[str, Any]:
    """Returns the bill of a checkout or of unpacked sources, equal for equal files."""
    project = read_project(root)
    lock = (root / "requirements.txt").read_text()
    packages = read_lock(lock)
    scopes = scopes_of(packages, project=project)
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    parents = {own: project["name"], **{reference_of(package): package.name for package in packages}}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, own + lock)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "purl": own,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": [
            {
                "type": "library",
                "bom-ref": reference_of(package),
                "name": package.name,
                "version": package.version,
                "purl": reference_of(package),
                "scope": scopes[package.name],
            }
            for package in packages
        ],
        "dependencies": [
            {
                "ref": reference,
                "dependsOn": sorted(reference_of(package) for package in packages if name in package.parents),
            }
            for reference, name in parents.items()
        ],
    }


def reference_of(package: LockedPackage) -> str:
    """Returns the address of a package, as purl writes it."""
    return f"pkg:pypi/{package.name}@{package.version}"


def scopes_of(packages: list[LockedPackage], *, project: dict[str, Any]) -> dict[str, str]:
    """Returns what needs each package, by its name."""
    extras = ",".join(name for name in project["optional-dependencies"] if name != "dev")
    roots = {
        "excluded": f"{project['name']}[dev]",
        "optional": f"{project['name']}[{extras}]",
        "required": project["name"],
    }
    scopes: dict[str, str] = {}
    for scope, root in roots.items():  # what is needed most decides
        names = package_names([root], project=project)
        scopes |= dict.fromkeys(with_dependencies(names, packages=packages), scope)
    return scopes
