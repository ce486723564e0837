"""A pool that is up, and a person's browser before it."""

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
    """All that lies here needs Chromium and takes minutes: `make test-browser` runs it, `make test` does not."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("browser")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(UP)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Of a test that fails, what the browser shows is kept beside its other files, and the report says where."""
    report = yield
    if report.when == "call" and report.failed and (context := item.stash.get(PAGES, None)) is not None:
        report.sections.append(("what the browser shows", keep_pages(context, item.funcargs["tmp_path"])))
    return report


@pytest.fixture(scope="session")
def chromium():
    """The browser of all tests. Skips them where there is none."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium on the PATH. To fix: apt-get install chromium")
    with Chromium(program) as browser:
        yield browser


@pytest.fixture(scope="session")
def home(tmp_path_factory, chromium):
    """A home whose pool is up: servers, executor, and this machine as its node."""
    home = Home(tmp_path_factory.mktemp("home"))
    try:
        done = home.up("--json")
        assert done.returncode == 0, done.stderr
        yield home
    finally:
        home.down()


@pytest.fixture(scope="session")
def prefect_url(home):
    """Where Prefect's pages are."""
    return home.address().prefect_api.removesuffix("/api")


@pytest.fixture(scope="session")
def signed_in(chromium, home, prefect_url):
    """What the browser of a person keeps who has signed in to both servers."""
    address = home.address()
    credentials = {"username": address.username, "password": address.password, "origin": address.mlflow_uri}
    with chromium.context() as context:
        sign_in(context.new_page(), prefect_url, user=home.user)
        return {"storage_state": context.storage_state(), "http_credentials": credentials}


@pytest.fixture
def page(chromium, signed_in, request, tmp_path):
    """A page of a person's browser who has signed in and done no more; what it shows is kept where the test fails."""
    with chromium.context(**signed_in) as context:
        request.node.stash[PAGES] = context
        yield context.new_page()
