"""Secrets are removed from texts, and what is no secret stays."""

import base64
import json
from urllib.parse import quote

import pytest

from ringmaster.features.diagnosis.bundle import REDACTED, Redactor, secrets_of, shown_environment
from ringmaster.text import printable, storable, xml

SECRET = "corr ect/horse:battery%42"


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        quote(SECRET, safe=""),
        json.dumps(SECRET)[1:-1],
        base64.b64encode(f"ringmaster:{SECRET}".encode()).decode(),
    ],
)
def test_a_known_secret_is_removed_in_every_form(form):
    assert Redactor([SECRET])(f"before {form} after") in (
        f"before {REDACTED} after",
        f"before {REDACTED}= after",
        f"before {REDACTED}== after",
    )


@pytest.mark.parametrize("form", [printable, storable, xml, repr, ascii, json.dumps])
def test_a_secret_of_odd_characters_is_removed_as_logs_and_pages_show_it(form):
    odd = "\x1b[2J pä\x00ss<&>wo'rd\n\ud800 last"
    assert "last" not in Redactor([odd])(f"before {form(odd)} after")


def test_a_secret_within_another_leaves_no_rest():
    assert Redactor(["abcdef", "abcdefghi"])("x abcdefghi y") == f"x {REDACTED} y"


UNKNOWN = "Zq7" + "kW3vB9xT2mLp"  # a secret that this machine does not know


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql+psycopg://ringmaster:{UNKNOWN}@10.0.0.1:5432/ringmaster",
        f"pip install git+https://{UNKNOWN}@example.org/repo",
        f"postgresql://u:{UNKNOWN}@pass@host/db",
        f"connection failed: password={UNKNOWN} host=db",
        f"MY_DB_PASSWORD={UNKNOWN}",
        f'{{"password": "{UNKNOWN}", "user": "u"}}',
        f'{{\\"api_key\\": \\"{UNKNOWN}\\"}}',
        f"Authorization: Basic {UNKNOWN}",
        f"'authorization': 'Bearer {UNKNOWN}'",
        f"curl -H 'X-Auth-Token: {UNKNOWN}'",
        f"the password is {UNKNOWN}",
        f"tool --db-password {UNKNOWN} run",
        f"curl -u me:{UNKNOWN} http://host",
        f"Set-Cookie: session=abc; id={UNKNOWN}",
        f"AccountKey={UNKNOWN};EndpointSuffix=x",
        f"wandb_key: {UNKNOWN}",
        f"aws_secret_access_key = {UNKNOWN}",
        f"https://bucket.example/a?X-Amz-Signature={UNKNOWN}&X-Amz-Date=1",
        f"https://hooks.slack.com/services/T0/B0/{UNKNOWN}",
        f"https://example.org/webhook/{UNKNOWN}",
        "hf_" + UNKNOWN + UNKNOWN,
        "ghp_" + UNKNOWN + UNKNOWN,
        f"github_pat_{UNKNOWN}_{UNKNOWN}",
        f"sk-{UNKNOWN}{UNKNOWN}",
        "-----BEGIN RSA " + f"PRIVATE KEY-----\n{UNKNOWN}\n{UNKNOWN}\n-----END RSA " + "PRIVATE KEY-----",
        "-----BEGIN " + f"PRIVATE KEY-----\n{UNKNOWN}\nthe file ends",
    ],
)
def test_what_looks_like_a_secret_is_removed(text):
    assert UNKNOWN not in Redactor([])(text)


@pytest.mark.parametrize(
    "text",
    [
        "planned (start): 2.2 s for 4 jobs, at most 0.6% above the optimum",
        "http://127.0.0.1:4200/api/health answered 200",
        "tokenizer: gpt2-medium, num_tokens=4096, max_tokens: 512.5",
        "postgresql://ringmaster:PASSWORD@10.0.0.1".replace(":PASSWORD@", "@").replace("ringmaster@", ""),
        '{"has_password": true, "secrets": []}',
        "File /opt/ringmaster/flows/cli.py, line 3, in main",
        "--passwords-file is not an option, nor is --token-limit",
        "Both servers require a password; the one that only you may read",
    ],
)
def test_what_is_no_secret_stays(text):
    assert Redactor([])(text) == text


def test_the_host_of_a_url_stays():
    assert Redactor([])("postgresql://u:pw@db.example:5432/x") == f"postgresql://{REDACTED}@db.example:5432/x"


def test_variables_are_shown_by_an_allow_list():
    shown = shown_environment({"RINGMASTER_HOME": "/srv", "FOO": "bar", "RINGMASTER_NOTIFY": "x"})
    assert shown == {"FOO": REDACTED, "RINGMASTER_HOME": "/srv", "RINGMASTER_NOTIFY": REDACTED}


def test_values_of_other_variables_are_secrets_but_paths_and_versions_are_not(tmp_path):
    environment = {
        "PREFECT_API_AUTH_STRING": "ringmaster:from-prefect",
        "MINE": "of my own",
        "CACHE": str(tmp_path),
        "PYTHON_VERSION": "3.11.9",
        "MLFLOW_TRACKING_URI": "http://user:in%20url@host",
        "PATH": "/usr/bin",
        "GONE": None,
    }
    found = {secret for secret in secrets_of(environment) if secret}
    assert found == {"ringmaster:from-prefect", "from-prefect", "of my own", "in%20url", "in url"}
