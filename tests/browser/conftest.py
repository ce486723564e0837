"""Fixtures of the browser tests: a running pool, and a user's browser."""

import shutil
from pathlib import Path

import pytest

from tests.browser.chromium import PAGES, Chromium, keep_pages
from tests.browser.prefect_pages import sign_in
from tests.pool_home import Home

HERE = Path(__file__).parent
UP = pytest.mark.timeout(1200)  # the first test of a session waits for all servers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks all tests of this folder, which need Chromium: `make test-browser` runs them, `make test` does not."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("browser")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(UP)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Saves the open pages of a failed test in its folder, and adds their paths to the report."""
    report = yield
    if report.when == "call" and report.failed and (context := item.stash.get(PAGES, None)) is not None:
        report.sections.append(("what the browser shows", keep_pages(context, item.funcargs["tmp_path"])))
    return report


@pytest.fixture(scope="session")
def chromium():
    """The browser of all tests; skips them where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium on the PATH. To fix: apt-get install chromium")
    with Chromium(program) as browser:
        yield browser


@pytest.fixture(scope="session")
def home(tmp_path_factory, chromium):
    """A home with a running pool: servers, executor, and this machine as its node."""
    home = Home(tmp_path_factory.mktemp("home"))
    try:
        done = home.up("--json")
        assert done.returncode == 0, done.stderr
        yield home
    finally:
        home.down()


@pytest.fixture(scope="session")
def prefect_url(home):
    """The address of Prefect's pages."""
    return home.address().prefect_api.removesuffix("/api")


@pytest.fixture(scope="session")
def signed_in(chromium, home, prefect_url):
    """The stored browser state of a user who has signed in to both servers."""
    address = home.address()
    credentials = {"username": address.username, "password": address.password, "origin": address.mlflow_uri}
    with chromium.context() as context:
        sign_in(context.new_page(), prefect_url, user=home.user)
        return {"storage_state": context.storage_state(), "http_credentials": credentials}


@pytest.fixture
def page(chromium, signed_in, request, tmp_path):
    """A new page of a signed-in user's browser; its content is saved where the test fails."""
    with chromium.context(**signed_in) as context:
        request.node.stash[PAGES] = context
        yield context.new_page()
