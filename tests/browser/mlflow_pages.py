"""Helpers that read and click MLflow's own pages, as a user does."""

import re

from playwright.sync_api import expect


def open_registry(page, url):
    """Opens the list of registered models, as the first page of a visit."""
    page.goto(f"{url}/#/models")
    # MLflow shows a dialog with news on the first visit.
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    return page


def open_production_model(page, name):
    """Navigates from the list of registered models to the champion version of `name`."""
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))
    expect(row).to_contain_text("@ champion")
    row.get_by_role("link", name=re.compile(r"^Version \d+$")).last.click()
    expect_version(page, name)
    return page


def follow(page, link, *, number=0):
    """Clicks a link of a description, which opens a new page; returns that page."""
    with page.context.expect_page() as opened:
        page.get_by_role("link", name=link, exact=True).nth(number).click()
    return opened.value


def expect_version(page, name, *, version=1):
    """Asserts that the page shows a version of a registered model."""
    expect(page.get_by_role("heading", name=f"Version {version}")).to_be_visible()
    expect(page.get_by_role("link", name=name, exact=True)).to_be_visible()


def expect_text(page, *texts):
    """Asserts that the page shows all texts."""
    for text in texts:
        expect(page.get_by_text(text).first).to_be_visible()


def picture(page, path):
    """Waits until the page shows a drawing from a run's artifacts; returns the drawing's text.

    MLflow omits the alternative text of pictures in a description, so that a picture is found by its path, such as
    "lineage/".
    """
    found = page.locator(f"img[src*='{path}']")
    expect(found).to_be_visible()
    expect(found).to_have_js_property("complete", True)
    assert found.evaluate("image => image.naturalWidth") > 0, f"blank: {found.get_attribute('src')}"
    answer = page.request.get(found.evaluate("image => image.src"))
    assert answer.ok, answer.status_text
    return answer.text()
