"""Helpers that read, fill and click Prefect's own pages, as a user does."""

import base64
import re
from http import HTTPStatus
from urllib.parse import urljoin

from playwright.sync_api import expect

from tests.cluster.waiting import until
from tests.pool_home import ask

RUN_TIMEOUT_S = 600  # from a run's start to its end
PAGE_TIMEOUT_S = 30  # from a state to the page that shows it, which polls every few seconds
TRIES = 4
ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def sign_in(page, url, *, user):
    """Signs in with USER:PASSWORD on the first page of a visit, and waits for the dashboard."""
    open_sign_in(page, url).fill(user)
    page.get_by_role("button", name="Login", exact=True).click()
    page.wait_for_url("**/dashboard*")


def open_sign_in(page, url):
    """Opens a page that asks a visitor to sign in; returns the field for USER:PASSWORD."""
    page.goto(url)
    return _visible_or_reload(page, page.get_by_placeholder("admin:pass"))


class Form:
    """A form: for a deployment's custom run, or for the input of a suspended run."""

    def __init__(self, page):
        self.page = page

    def field(self, label, *, number=0):
        """Returns a parameter with its description and its control."""
        named = re.compile(rf"^{re.escape(label)}( \(Optional\))?$")
        return self.page.locator("label").filter(has_text=named).nth(number).locator("xpath=../..")

    def fill(self, label, value, *, number=0):
        """Types a value into a parameter's text or number field."""
        field = self.field(label, number=number)
        field.get_by_role("textbox").or_(field.get_by_role("spinbutton")).first.fill(str(value))

    def choose(self, label, value):
        """Selects a value from a parameter's list, by keyboard: the simulated pointer opens no list."""
        self.field(label).get_by_role("group").get_by_role("button").press("Space")
        self.page.get_by_role("option", name=value, exact=True).click()

    def say(self, label, form):
        """Selects one of a parameter's alternative types, such as "Pasted text", or "int" instead of None."""
        self.field(label).get_by_role("button", name=form, exact=True).first.click()

    def switch_on(self, label):
        """Switches a parameter on that is off."""
        switch = self.field(label).get_by_role("switch")
        switch.click()
        expect(switch).to_have_attribute("aria-checked", "true")

    def submit(self):
        """Presses the button, by keyboard: Prefect's notifications cover it."""
        self.page.get_by_role("button", name="Submit", exact=True).press("Enter")

    def send(self):
        """Submits the form, and retries while the server is too busy, which happens on SQLite without a message.

        Returns the server's response.
        """
        for _ in range(TRIES):
            with self.page.expect_response(re.compile(r"/(create_flow_run|resume)$")) as answered:
                self.submit()
            if answered.value.status != HTTPStatus.SERVICE_UNAVAILABLE:
                break
        assert answered.value.ok, answered.value.status_text
        return answered.value.json()

    def start(self):
        """Submits the form, and opens the page of the new run."""
        run = self.send()
        # The button that links to the run is visible for five seconds only, too short on a busy machine.
        self.page.goto(urljoin(self.page.url, f"/runs/flow-run/{run['id']}"))
        return self.page

    def expect_fault(self, text):
        """Asserts that the submission failed: the form is still open, and shows the message."""
        expect(self.page.get_by_text(text).last).to_be_visible()
        expect(self.page.get_by_role("button", name="Submit", exact=True)).to_be_visible()


def open_form(page, url, deployment):
    """Opens the form of a deployment from the list of deployments."""
    page.goto(f"{url}/deployments")
    page.get_by_role("link", name=deployment, exact=True).first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("button", name="Custom run").click()
    expect(page.get_by_role("button", name="Submit", exact=True)).to_be_visible()
    return Form(page)


def wait_for_state(page, url, name):
    """Waits until the flow run of a page has a state, and the page shows it; returns the run."""
    address = _in_api(page, url)

    def poll():
        _, run = ask(address, user=_signed_in(page))
        if run["state"]["name"] == name:
            return run
        assert run["state"]["type"] not in ENDS, f"the run is {run['state']['name']}: {run['state']['message']}"
        return None

    run = until(f"the flow run is {name}", poll, seconds=RUN_TIMEOUT_S)
    _visible_or_reload(page, page.get_by_text(name, exact=True).first)
    return run


def _visible_or_reload(page, locator):
    """Waits until the locator's element is visible, and reloads the page where it is not, as a user would do.

    Prefect's page does not retry requests that failed while it was loaded, which a busy server on SQLite may cause.
    Returns the locator.
    """
    for _ in range(TRIES - 1):
        try:
            expect(locator).to_be_visible(timeout=PAGE_TIMEOUT_S * 1000)
        except AssertionError:
            page.reload()
        else:
            return locator
    expect(locator).to_be_visible()
    return locator


def _in_api(page, url):
    """Returns the API address of the flow run of a page."""
    return f"{url}/api/flow_runs/{re.search(r'flow-run/([0-9a-f-]{36})', page.url).group(1)}"


def _signed_in(page):
    """Returns USER:PASSWORD of the page's signed-in user."""
    return base64.b64decode(page.evaluate("localStorage.getItem('prefect-password')")).decode()


def open_answer(page, url, *, state="Suspended"):
    """Waits until the run of a page is suspended (or paused) for an input, and opens the form for it."""
    run = wait_for_state(page, url, state)
    form = run["state"]["state_details"]["run_input_keyset"]["schema"]
    address = f"{_in_api(page, url)}/input/{form}"
    until("the form is there", lambda: ask(address, user=_signed_in(page))[0] == HTTPStatus.OK)
    page.reload()  # a run gets its form shortly after its state: the page may have loaded in between
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("dialog").get_by_role("switch")).to_be_visible()
    return Form(page)


def open_artifact(page, key):
    """Opens one of a flow run's artifacts from the run's page."""
    page.get_by_role("tablist").get_by_text("Artifacts", exact=True).click()
    of_tasks = page.get_by_text("Task runs", exact=True).last  # listed once a person scrolls there
    of_tasks.evaluate("heading => heading.scrollIntoView({block: 'start'})")
    kinds = rf"^\s*(markdown|table|progress)\s+{re.escape(key)}\b"
    page.get_by_role("link", name=re.compile(kinds, re.IGNORECASE)).first.click()
    page.wait_for_url("**/artifacts/artifact/**")
    return page


def expect_tasks(page, *names):
    """Asserts that the page of a flow run lists these task runs."""
    page.get_by_role("tablist").get_by_text("Task Runs", exact=True).click()
    for name in names:
        expect(page.get_by_role("link", name=name, exact=True).first).to_be_visible()


def expect_drawing(page):
    """Asserts that the page shows the drawing of a markdown artifact; a broken image has no width."""
    drawn = page.locator("img[src^='data:image/svg+xml']").first
    expect(drawn).to_be_visible()
    expect(drawn).to_have_js_property("complete", True)
    assert drawn.evaluate("image => image.naturalWidth") > 0
