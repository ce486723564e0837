"""A bundle of parts without secrets. Each part is collected alone: one that fails is noted, and the others are there.

Secrets are those that this machine knows, and what looks like one. Of environment variables, only those of an allow
list are shown; the values of all others count as secrets, and are removed wherever a text quotes them.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ringmaster.text import printable, printable_lines, storable, xml

REDACTED = "[redacted]"
SHORTEST_SECRET = 6  # shorter values are ordinary words and numbers of texts

SHOWN_VARIABLES = frozenset(
    {
        *("RINGMASTER_HOME", "RINGMASTER_CHECKPOINTS", "RINGMASTER_TENSORS", "RINGMASTER_NODE", "RINGMASTER_UMASK"),
        "RINGMASTER_ENGINE",
        *("RINGMASTER_PATIENCE", "RINGMASTER_LOG_FORMAT", "RINGMASTER_ALLOWED_HOSTS", "RINGMASTER_READY_FILE"),
        *(
            "PREFECT_API_URL",
            "PREFECT_HOME",
            "PREFECT_LOGGING_LEVEL",
            "PREFECT_SERVER_LOGGING_LEVEL",
            "PREFECT_PROFILE",
        ),
        *("PREFECT_SERVER_ANALYTICS_ENABLED", "PREFECT_UI_API_URL", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"),
        *("PREFECT_RESULTS_PERSIST_BY_DEFAULT", "PREFECT_RESULTS_DEFAULT_SERIALIZER"),
        *("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT"),
        *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_ARTIFACTS_DESTINATION", "MLFLOW_AUTH_CONFIG_PATH"),
        *("MLFLOW_SERVER_ALLOWED_HOSTS", "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION"),
        *("MLFLOW_CONFIGURE_LOGGING", "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"),
        *("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
        *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS"),
        *("HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TRANSFORMERS_OFFLINE", "DO_NOT_TRACK"),
        *("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "VIRTUAL_ENV", "CONDA_PREFIX"),
        *("LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "SHELL", "HOME", "PWD", "OLDPWD", "USER", "LOGNAME", "HOSTNAME"),
        *("TMPDIR", "XDG_RUNTIME_DIR", "SLURM_JOB_ID", "SLURM_NODELIST", "KUBERNETES_SERVICE_HOST", "INVOCATION_ID"),
    }
)
"""The environment variables whose values are shown, and are no secrets where texts quote them."""

_VALUE = r"""(?P<value>[^\s"',;&<>{}\[\]]{4,})"""
_SENSITIVE_NAME = (
    r"password|passwd|passphrase|secret|(?<![a-z])tokens?(?![a-z])|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|(?:account|encryption|license|master|service|signing|storage|wandb)[_-]?key|auth[_-]?string|credentials?|signature"
)
# Each has a group `value`, which is what is removed.
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"[a-z][a-z0-9+.-]*://(?P<value>[^\s/\"'<>]+)@",  # what precedes the host in a URL
        r"\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer|token)\s+)?" + _VALUE,
        r"\b(?:basic|bearer)\s+(?P<value>[A-Za-z0-9+/=._~-]{12,})",
        rf"(?:{_SENSITIVE_NAME})[\w.-]*\\?[\"']?\s*(?:[=:]|\bis\b)\s*\\?[\"']?{_VALUE}",
        rf"--[\w-]*(?:{_SENSITIVE_NAME})[\w-]*\s+{_VALUE}",  # on a command line
        r"\s(?:-u|--user|--proxy-user)\s+[^\s:]+:(?P<value>\S+)",
        r"\b(?:set-)?cookie[\"']?\s*[:=]\s*(?P<value>[^\r\n]+)",
        r"[?&][\w.-]*(?:sig|key|code|auth)=(?P<value>[^\s&\"'#]+)",
        r"https?://(?P<value>hooks\.slack\.com/[^\s\"'<>]+)",
        r"https?://(?P<value>[^\s\"'<>]*webhook[^\s\"'<>]*)",
        r"(?P<value>\b(?:hf|ghp|gho|ghu|ghs|ghr|glpat|pypi|github_pat|npm)[-_][A-Za-z0-9_-]{16,})",
        r"(?P<value>\b(?:sk|rk|pk|xox[a-z])-[A-Za-z0-9-]{16,})",
        r"(?P<value>\b(?:AKIA|ASIA)[A-Z0-9]{16}\b)",
        r"(?P<value>\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+)",
        r"(?P<value>-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*-----|\Z))",
    )
)
_NO_SECRET = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?%?|true|false|none|null|\*+|PASSWORD|DBPASSWORD", re.IGNORECASE)

_VERSION = re.compile(r"v?\d+(\.\d+)+")


class Redactor:
    """Removes secrets from texts. secrets: the known ones, which are removed in each form in which texts quote them."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for secret in secrets for form in _forms(secret) if len(form) >= SHORTEST_SECRET}
        longest_first = sorted(forms, key=lambda form: (-len(form), form))  # one may be a part of another
        self._known = re.compile("|".join(map(re.escape, longest_first))) if forms else None

    def __call__(self, text: str) -> str:
        """Returns the text without secrets."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        for pattern in _PATTERNS:
            text = pattern.sub(_without_value, text)
        return text


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by name, with the values of those that are on the allow list."""
    return {name: value if name in SHOWN_VARIABLES else REDACTED for name, value in sorted(environment.items())}


def secrets_of(environment: Mapping[str, str | None]) -> Iterator[str]:
    """Yields the values of the variables that are not on the allow list, and the passwords in the URLs of the others.

    Paths of this machine and numbers of versions are no secrets: without them, no log could be read.
    """
    for name, value in environment.items():
        if not value:
            continue
        yield from passwords_of(value)
        if name not in SHOWN_VARIABLES and not _is_path(value) and not _VERSION.fullmatch(value):
            yield value
            yield value.partition(":")[2]  # of USER:PASSWORD


def passwords_of(url: str) -> Iterator[str]:
    """Yields the password in a URL, as it is written and decoded; nothing if `url` has none or is not a URL."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return
    if password:
        yield password
        yield unquote(password)


def _forms(secret: str) -> Iterator[str]:
    """Yields a secret as it is, and as it is written in URLs, JSON, logs, tracebacks, pages and the header of a
    request."""
    text = secret.strip()
    yield from (text, quote(text, safe="", errors="backslashreplace"), json.dumps(text)[1:-1])
    yield from (printable(text), storable(text), repr(text)[1:-1], ascii(text)[1:-1], xml(text))
    for user in ("", "ringmaster:"):
        yield base64.b64encode(f"{user}{text}".encode(errors="backslashreplace")).decode().rstrip("=")


def _is_path(value: str) -> bool:
    try:
        return all(Path(each).is_absolute() and Path(each).exists() for each in value.split(":"))
    except (OSError, ValueError):
        return False


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    if value == REDACTED or REDACTED in value or _NO_SECRET.fullmatch(value):
        return match[0]
    start, end = match.start("value") - match.start(), match.end("value") - match.start()
    return f"{match[0][:start]}{REDACTED}{match[0][end:]}"


CONTENTS = "contents.json"


@dataclass(frozen=True, kw_only=True)
class BundleFile:
    """A file of the bundle.

    name: its path within the bundle.
    """

    name: str
    text: str

    @classmethod
    def of_json(cls, name: str, value: Any) -> BundleFile:
        """Returns a part with a JSON value; what JSON has no form for is written as text."""
        return cls(name=name, text=json.dumps(value, indent=1, default=str, ensure_ascii=False) + "\n")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What was collected, without secrets. failures: the kind and the text of the error of each part that failed."""

    parts: tuple[BundleFile, ...]
    failures: Mapping[str, str]

    def write(self, file: Path) -> None:
        """Writes a tar.gz that only its owner can read. It has one folder, named like the file."""
        folder = file.name.partition(".")[0] or "ringmaster"
        contents = {
            "parts": {part.name: len(part.text.encode()) for part in self.parts},
            "failures": dict(self.failures),
        }
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as opened, tarfile.open(fileobj=opened, mode="w:gz") as archive:
            os.fchmod(descriptor, 0o600)  # also where the file was there before
            for part in (BundleFile.of_json(CONTENTS, contents), *self.parts):
                content = part.text.encode()
                entry = tarfile.TarInfo(f"{folder}/{part.name}")
                entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(content))


Collect = Callable[[], Iterable[BundleFile]]


def collect(sources: Mapping[str, Collect], *, redact: Redactor) -> Bundle:
    """Collects the parts of all sources, and removes the secrets from their texts, names and errors.

    sources: by name, a function that returns parts. It may raise anything: the error is noted under that name.
    """
    parts, failures = list[BundleFile](), dict[str, str]()
    for name, source in sources.items():
        try:
            for part in source():
                parts.append(
                    BundleFile(name=redact(part.name), text=printable_lines(redact(part.text), limit=sys.maxsize))
                )
        except Exception as error:  # noqa: BLE001 - noted in the bundle: what fails is what the report is about
            failures[name] = redact(f"{type(error).__name__}: {error}")
    return Bundle(parts=tuple(parts), failures=failures)
