"""Stores that fsspec reaches by a URL (s3, gcs, memory, ...): opened, and what is wrong where one cannot be used.

The store's own library (s3fs for s3) is used, with the credentials, the endpoint and the retries that it finds in its
usual places. Nothing is retried here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ringmaster.errors import ObjectStoreUnavailable
from ringmaster.extras import install_command

# Stores without folders. To make a folder there costs a request, and may create a bucket whose name is a mistake.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "ocs", "r2", "memory"})

CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, on every machine that uses the store"


def is_url(path: str) -> bool:
    """Returns whether fsspec is needed to read the path."""
    return "://" in path


def open_store(url: str) -> tuple[Any, str]:
    """Returns the store of a URL, and the path in it; nothing is connected yet.

    Raises ValueError where the library for its protocol is missing, or refuses the URL.
    """
    from fsspec.core import url_to_fs

    try:
        store, path = url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"{error}. To fix: {_install(url)}") from error
    return store, str(path)


@contextmanager
def store_errors() -> Iterator[None]:
    """Inside the context, every error of a store's library but FileNotFoundError becomes ObjectStoreUnavailable."""
    try:
        yield
    except (FileNotFoundError, ObjectStoreUnavailable):
        raise
    except Exception as error:  # the libraries of stores have no common base class: refused, unknown host, ...
        raise ObjectStoreUnavailable(_cause(error)) from error


def explained(error: OSError, url: str) -> str:
    """Returns the cause of an error inside `store_errors`, and what to do about it."""
    return f"{_cause(error)}. To fix: {_remedy(error, url)}"


def _cause(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _remedy(error: OSError, url: str) -> str:
    origin = error.__cause__ if isinstance(error, ObjectStoreUnavailable) and error.__cause__ is not None else error
    kind = type(origin).__name__  # by name, as the library need not be installed
    if kind in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
        return CREDENTIALS
    if kind in ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError", "InvalidEndpoint"):
        return f"check that the store runs, and its address: {_endpoint()}"
    if isinstance(origin, FileNotFoundError):
        return f"create the bucket of {url}, or correct its name; the address of the store is {_endpoint()}"
    if isinstance(origin, PermissionError):
        return f"check the credentials, and that they may list, read, write and delete objects below {url}"
    return f"check the URL {url}, the credentials, and the address of the store: {_endpoint()}"


def _endpoint() -> str:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL"):
        if value := os.environ.get(name):
            return f"{name}={value}"
    return "that of the provider, as AWS_ENDPOINT_URL is not set"


def _install(url: str) -> str:
    protocol = url.partition("://")[0]
    return install_command("s3") if protocol in ("s3", "s3a") else f"install what fsspec needs for {protocol}"
