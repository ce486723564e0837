"""Debian's Chromium under Playwright, and copies of its pages for failed tests."""

from contextlib import contextmanager

import pytest

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SIZE = {"width": 1280, "height": 1000}
TIMEOUT_S = 120  # until a page shows what a test expects: machines are busy
PAGES = pytest.StashKey()


class Chromium:
    """A headless browser. program: its path."""

    def __init__(self, program):
        self._program = program

    def __enter__(self):
        from playwright.sync_api import expect, sync_playwright

        expect.set_options(timeout=1000 * TIMEOUT_S)
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=self._program, args=list(OPTIONS))
        return self

    def __exit__(self, *_):
        self._browser.close()
        self._playwright.stop()

    @contextmanager
    def context(self, **options):
        """A browser context with its own pages and cookies, closed at the end. options: of Playwright's new_context."""
        context = self._browser.new_context(viewport=SIZE, **options)
        context.set_default_timeout(1000 * TIMEOUT_S)
        try:
            yield context
        finally:
            context.close()


def keep_pages(context, folder):
    """Saves a screenshot and the text of every open page; returns their paths, one line each."""
    from playwright.sync_api import Error

    kept = []
    for number, page in enumerate(context.pages, start=1):
        picture, text = folder / f"page-{number}.png", folder / f"page-{number}.txt"
        try:
            page.screenshot(path=picture)
            text.write_text(f"{page.url}\n\n{page.locator('body').inner_text()}\n", encoding="utf-8")
            kept.append(f"{page.url}: {picture}, {text.name}")
        except Error as error:  # a crashed page has no content
            kept.append(f"{page.url} cannot be kept: {error}")
    return "\n".join(kept)
