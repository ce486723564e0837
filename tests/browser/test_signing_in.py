"""Signing in with the credentials that `ringmaster up` prints, and refusals of any others."""

import re
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed. To fix: pip install -e '.[dev]'")

from playwright.sync_api import expect

from tests.browser.prefect_pages import open_sign_in, sign_in


@pytest.fixture(scope="module")
def told(home):
    """(user, password), as a user reads them in the output of `up`."""
    said = home.up().stderr
    file = Path(re.search(r"`cat (.+)`", said).group(1))
    user = re.search(r"requires one line: (\w+):PASSWORD", said).group(1)
    assert f"MLflow's page and the metrics require a user, {user}, and PASSWORD" in said
    return user, file.read_text().strip()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_instructions_let_a_person_into_prefects_pages(chromium, prefect_url, told, host):
    with chromium.context() as context:
        page = context.new_page()
        sign_in(page, prefect_url.replace("127.0.0.1", host), user=":".join(told))
        page.get_by_role("link", name="Deployments", exact=True).click()
        expect(page.get_by_text("train-batch").first).to_be_visible()


def test_a_wrong_password_lets_nobody_into_prefects_pages(chromium, prefect_url):
    with chromium.context() as context:
        page = context.new_page()
        with page.expect_response(lambda answer: answer.status == 401):
            field = open_sign_in(page, f"{prefect_url}/deployments")
        field.fill("ringmaster:wrong")
        with page.expect_response(lambda answer: answer.status == 401):
            page.get_by_role("button", name="Login", exact=True).click()
        expect(field).to_be_visible()


def test_the_instructions_let_a_person_into_mlflows_pages(chromium, home, told):
    user, password = told
    url = home.address().mlflow_uri
    with chromium.context() as context:
        assert context.request.get(url).status == 401
    with chromium.context(http_credentials={"username": user, "password": password}) as context:
        page = context.new_page()
        page.goto(f"{url}/#/experiments")
        expect(page.get_by_role("link", name="Default").first).to_be_visible()


def test_a_page_of_another_port_cannot_act_for_a_person_who_has_signed_in(chromium, home, told, prefect_url):
    """Prefect's server represents another user's: it has another port of the same host."""
    user, password = told
    create = f"{home.address().mlflow_uri}/api/2.0/mlflow/experiments/create"
    script = """async ([url, type]) => {
        const [headers, body] = [{"Content-Type": type}, '{"name": "evil"}']
        const request = fetch(url, {method: "POST", credentials: "include", headers, body})
        return request.then(answer => answer.status, error => error.name)
    }"""
    with chromium.context(http_credentials={"username": user, "password": password}) as context:
        page = context.new_page()
        page.goto(home.address().mlflow_uri)
        page.goto(f"{prefect_url}/api/health")
        for kind in ("text/plain", "application/json"):
            assert page.evaluate(script, [create, kind]) == "TypeError", "the browser shows no answer"
        page.goto(f"{home.address().mlflow_uri}/health")
        named = f"{home.address().mlflow_uri}/api/2.0/mlflow/experiments/get-by-name?experiment_name=evil"
        assert page.evaluate("url => fetch(url).then(answer => answer.status)", named) == 404
        assert page.evaluate(script, [create, "application/json"]) == 200
