"""Publication of a model's folder in a repository of a Hugging Face hub, in one commit.

The hub is that of HF_ENDPOINT; the token is found where huggingface_hub finds it (HF_TOKEN, `hf auth login`), and is
never shown. A new repository is private.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from ringmaster.errors import InputError, RingmasterError
from ringmaster.text import message_of, redacted, shortened

HUB_ERRORS: tuple[type[Exception], ...] = (
    *(each for each in HfHubHTTPError.__bases__ if issubclass(each, Exception)),
    RuntimeError,
    ValueError,
)
"""What huggingface_hub raises: the errors of the HTTP client that it chooses, OSError, and its own of uploads."""
LOG_IN = "hf auth login, or set HF_TOKEN to a token that may write"
STALE = (".safetensors", ".safetensors.index.json", "adapter_config.json")
"""Files of weights and adapters: those of an earlier version would be read together with, or before, the new ones."""
MAX_MESSAGE = 300


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published model. url: of the repository. commit: its id. removed: weights of an earlier version."""

    repo: str
    url: str
    commit: str
    is_private: bool
    num_files: int
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HubTarget:
    """A repository that this user may write.

    exists: whether it is there. is_private: whether it is, or becomes, private.
    """

    api: HfApi
    repo: str
    exists: bool
    is_private: bool

    @staticmethod
    def of(repo: str, *, is_public: bool) -> HubTarget:
        """Returns the target of that name, before anything is written.

        Raises InputError where the name is invalid, no token is found, the hub refuses it, the owner is another one, or
        the repository is public and `is_public` is False; RingmasterError where the hub does not answer.
        """
        owner, _, _ = repo.partition("/")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
            raise InputError([f"--push: {repo!r} is no name of a repository. To fix: write OWNER/NAME"])
        if not get_token():
            raise InputError([f"there is no token for the hub. To fix: {LOG_IN}"])
        api = HfApi()
        if urlsplit(api.endpoint).scheme not in ("http", "https"):
            problem = f"HF_ENDPOINT: {api.endpoint!r} is no URL of a hub"
            raise InputError([f"{problem}. To fix: write https://HOST, or unset it"])
        with hub_errors(api, "to say whose the token is"):
            account = api.whoami()
        owners = [account["name"], *(each["name"] for each in account.get("orgs") or ())]
        if owner not in owners:
            raise InputError(
                [f"--push: the token is of {', '.join(owners)}, and not of {owner}. To fix: name one of these"]
            )
        with hub_errors(api, f"to look at {repo}"):
            try:
                is_private = bool(api.model_info(repo).private)
            except RepositoryNotFoundError:
                return HubTarget(api=api, repo=repo, exists=False, is_private=not is_public)
        if not is_private and not is_public:
            raise InputError([f"{repo} is public, and so would this model be. To fix: give --public, or another name"])
        return HubTarget(api=api, repo=repo, exists=True, is_private=is_private)

    def publish(self, folder: Path, *, message: str) -> PublishedModel:
        """Commits the files of a folder, and removes weights of an earlier version. Raises as `of` does."""
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        with hub_errors(self.api, f"to take {self.repo}"):
            if not self.exists:
                self.api.create_repo(self.repo, private=self.is_private)
            there = self.api.list_repo_files(self.repo) if self.exists else []
            removed = [name for name in there if name.endswith(STALE) and name not in files]
            done = self.api.create_commit(
                self.repo,
                [
                    *(CommitOperationDelete(path_in_repo=name) for name in removed),
                    *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()),
                ],
                commit_message=message,
            )
        return PublishedModel(
            repo=self.repo,
            url=f"{redacted(self.api.endpoint)}/{self.repo}",
            commit=done.oid,
            is_private=self.is_private,
            num_files=len(files),
            removed=tuple(removed),
        )


@contextmanager
def hub_errors(api: HfApi, request: str) -> Iterator[None]:
    """Inside the context, what a hub refuses is an InputError, and a hub that does not answer a RingmasterError.

    request: what the hub was asked for, such as "to take org/model".
    """
    try:
        yield
    except HUB_ERRORS as error:
        if isinstance(error, RingmasterError):
            raise
        cause = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        reason = getattr(cause, "server_message", None) or message_of(cause)
        reason = shortened(" ".join(str(reason).split()).removesuffix("."), MAX_MESSAGE)
        is_away = status is None and not isinstance(error, ValueError)
        text = f"{redacted(api.endpoint)} {'does not answer' if is_away else f'refuses {request}'}: {reason}"
        if status in (401, 403):
            raise InputError([f"{text}. To fix: {LOG_IN}"]) from error
        if isinstance(error, ValueError) or (status is not None and 400 <= status < 500):
            raise InputError([text]) from error
        raise RingmasterError(f"{text}. To fix: try again when it answers, or correct HF_ENDPOINT") from error
