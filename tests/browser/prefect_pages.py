"""Prefect's own pages, as a person reads, fills and clicks them."""

import base64
import re
from http import HTTPStatus
from urllib.parse import urljoin

from playwright.sync_api import expect

from tests.cluster.waiting import until
from tests.pool_home import ask

RUN_PATIENCE_S = 600  # from a run's start to its end
TRIES = 4
ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def sign_in(page, url, *, user):
    """From the first page that a person visits, past the one that asks for USER:PASSWORD, to the dashboard."""
    page.goto(url)
    page.get_by_placeholder("admin:pass").fill(user)
    page.get_by_role("button", name="Login", exact=True).click()
    page.wait_for_url("**/dashboard*")


class Form:
    """A form: of a deployment's run with values of one's own, or of a run that waits for an answer."""

    def __init__(self, page):
        self.page = page

    def field(self, label, *, number=0):
        """A parameter with its description and its control."""
        named = re.compile(rf"^{re.escape(label)}( \(Optional\))?$")
        return self.page.locator("label").filter(has_text=named).nth(number).locator("xpath=../..")

    def fill(self, label, value, *, number=0):
        """Writes into a parameter's line of text, or its number."""
        field = self.field(label, number=number)
        field.get_by_role("textbox").or_(field.get_by_role("spinbutton")).first.fill(str(value))

    def choose(self, label, value):
        """Takes one of a parameter's values from its list, by keyboard: a pointer without a hand opens no list."""
        self.field(label).get_by_role("group").get_by_role("button").press("Space")
        self.page.get_by_role("option", name=value, exact=True).click()

    def say(self, label, form):
        """Of a parameter that takes several forms, takes one, such as "Pasted text", or "int" in place of None."""
        self.field(label).get_by_role("button", name=form, exact=True).first.click()

    def switch_on(self, label):
        """Turns a parameter that is off on."""
        switch = self.field(label).get_by_role("switch")
        switch.click()
        expect(switch).to_have_attribute("aria-checked", "true")

    def submit(self):
        """Presses the button, by keyboard: Prefect's messages lie over it."""
        self.page.get_by_role("button", name="Submit", exact=True).press("Enter")

    def send(self):
        """Submits the form, again where the server is too busy: on SQLite it says so, and the page does not.

        Returns what the server answers.
        """
        for _ in range(TRIES):
            with self.page.expect_response(re.compile(r"/(create_flow_run|resume)$")) as answered:
                self.submit()
            if answered.value.status != HTTPStatus.SERVICE_UNAVAILABLE:
                break
        assert answered.value.ok, answered.value.status_text
        return answered.value.json()

    def start(self):
        """Submits the form, and goes to the page of the run that it has started."""
        run = self.send()
        # The button that leads there is shown for five seconds only, in which a busy machine may not come to press it.
        self.page.goto(urljoin(self.page.url, f"/runs/flow-run/{run['id']}"))
        return self.page

    def expect_fault(self, text):
        """It was submitted in vain: the form is still there, and says why."""
        expect(self.page.get_by_text(text).last).to_be_visible()
        expect(self.page.get_by_role("button", name="Submit", exact=True)).to_be_visible()


def open_form(page, url, deployment):
    """From the list of deployments to the form of one."""
    page.goto(f"{url}/deployments")
    page.get_by_role("link", name=deployment, exact=True).first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("button", name="Custom run").click()
    expect(page.get_by_role("button", name="Submit", exact=True)).to_be_visible()
    return Form(page)


def wait_for_state(page, url, name):
    """Waits until the flow run of a page has come to a state, and the page shows it; returns the run."""
    address = _in_api(page, url)

    def look():
        _, run = ask(address, user=_signed_in(page))
        if run["state"]["name"] == name:
            return run
        assert run["state"]["type"] not in ENDS, f"the run is {run['state']['name']}: {run['state']['message']}"
        return None

    run = until(f"the flow run is {name}", look, seconds=RUN_PATIENCE_S)
    expect(page.get_by_text(name, exact=True).first).to_be_visible()
    return run


def _in_api(page, url):
    """Where the server tells of the flow run of a page."""
    return f"{url}/api/flow_runs/{re.search(r'flow-run/([0-9a-f-]{36})', page.url).group(1)}"


def _signed_in(page):
    """The user, with the password, whom the page's browser has signed in."""
    return base64.b64decode(page.evaluate("localStorage.getItem('prefect-password')")).decode()


def open_answer(page, url):
    """Waits until the run of a page waits for an answer, and opens the form for it."""
    run = wait_for_state(page, url, "Suspended")
    form = run["state"]["state_details"]["run_input_keyset"]["schema"]
    address = f"{_in_api(page, url)}/input/{form}"
    until("the form is there", lambda: ask(address, user=_signed_in(page))[0] == HTTPStatus.OK)
    page.reload()  # a run has its form a moment after its state: the page may have looked for it in between
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    return Form(page)


def open_artifact(page, key):
    """From the page of a flow run to one of its artifacts."""
    page.get_by_role("tablist").get_by_text("Artifacts", exact=True).click()
    kinds = rf"^\s*(markdown|table|progress)\s+{re.escape(key)}\b"
    page.get_by_role("link", name=re.compile(kinds, re.IGNORECASE)).first.click()
    page.wait_for_url("**/artifacts/artifact/**")
    return page


def expect_drawing(page):
    """The page shows the drawing of a markdown artifact: one that is broken has no width."""
    drawn = page.locator("img[src^='data:image/svg+xml']").first
    expect(drawn).to_be_visible()
    expect(drawn).to_have_js_property("complete", True)
    assert drawn.evaluate("image => image.naturalWidth") > 0
