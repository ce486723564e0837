"""Prints the version and the packages of the Python that runs it, as JSON; any may run it."""

import json
import platform
import sys
import sysconfig
from importlib.metadata import distributions

if __name__ == "__main__":
    known: dict[str, str] = {}
    for each in distributions():
        if each.metadata["Name"]:  # the first on the import path is the one that is imported
            known.setdefault(each.metadata["Name"].lower().replace("_", "-").replace(".", "-"), each.version)
    content = {
        "version": platform.python_version(),
        "folder": sysconfig.get_paths()["purelib"],
        "packages": dict(sorted(known.items())),
    }
    json.dump(content, sys.stdout)
