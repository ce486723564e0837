"""jsonschema is imported without what makes a parser at its import, which others may import afterwards."""

import importlib.util
import subprocess
import sys

import pytest

from ringmaster.compat.jsonschema import GRAMMAR

CODE = f"""
import sys
from ringmaster.compat.jsonschema import import_without_iris
import_without_iris()
print("jsonschema" in sys.modules, "{GRAMMAR}" in sys.modules)
import prefect
print("{GRAMMAR}" in sys.modules)
import {GRAMMAR}
print({GRAMMAR}.is_valid_syntax("iri", "https://example.org/\u00e4"))
import_without_iris()
print("{GRAMMAR}" in sys.modules)
"""


@pytest.mark.skipif(importlib.util.find_spec(GRAMMAR) is None, reason="the package is not installed")
def test_the_grammar_of_iris_is_not_imported_and_can_be_imported_later():
    done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False", "True", "True"]
