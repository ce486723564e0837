"""Parameters for tests of many cases, of which `make test` runs a few."""

import pytest


def matrix(cases, *, quick, ids=str):
    """The parameters of a test: `make test` runs the cases in `quick`, and `make test-full` the others.

    cases: values; a tuple is several arguments. ids: names a case, or a list of names in the order of the cases.
    """
    cases, quick = list(cases), list(quick)
    assert all(case in cases for case in quick), "a quick case is none of the cases"
    names = ids if isinstance(ids, list) else [ids(case) for case in cases]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=[] if case in quick else [pytest.mark.full],
        )
        for case, name in zip(cases, names, strict=True)
    ]
