"""MLflow's own pages, as a person reads and clicks them."""

import re

from playwright.sync_api import expect


def open_registry(page, url):
    """Opens the list of registered models, as the first page that a person visits."""
    page.goto(f"{url}/#/models")
    # MLflow greets everybody with news, once.
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    return page


def open_production_model(page, name):
    """From the list of registered models to the version of `name` that is its champion."""
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))
    expect(row).to_contain_text("@ champion")
    row.get_by_role("link", name=re.compile(r"^Version \d+$")).last.click()
    expect_version(page, name)
    return page


def follow(page, link, *, number=0):
    """Clicks a link of a description, which opens a page of its own; returns that."""
    with page.context.expect_page() as opened:
        page.get_by_role("link", name=link, exact=True).nth(number).click()
    return opened.value


def expect_version(page, name, *, version=1):
    """The page is that of a version of a registered model, with its description."""
    expect(page.get_by_role("heading", name=f"Version {version}")).to_be_visible()
    expect(page.get_by_role("link", name=name, exact=True)).to_be_visible()


def expect_text(page, *texts):
    """The page says all of it."""
    for text in texts:
        expect(page.get_by_text(text).first).to_be_visible()


def picture(page, path):
    """The text of a drawing among a run's artifacts that the page shows, once it is drawn.

    MLflow leaves out what a description calls its pictures: they are known by their path, such as "lineage/".
    """
    found = page.locator(f"img[src*='{path}']")
    expect(found).to_be_visible()
    expect(found).to_have_js_property("complete", True)
    assert found.evaluate("image => image.naturalWidth") > 0, f"blank: {found.get_attribute('src')}"
    answer = page.request.get(found.evaluate("image => image.src"))
    assert answer.ok, answer.status_text
    return answer.text()
