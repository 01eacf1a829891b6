"""Where the plaintext of grants comes from; the hub never keeps it (B-60, B-61).

A source is asked at each redemption and nowhere in between, so what changes there counts at once.
The directories that the settings name are one kind of source; a program that embeds the hub may
hand in another (:func:`forge_hub.server.running_hub`)::

    <FORGE_HUB_SECRETS_DIRECTORY>/<project id>/<NAME>               the value, and a newline or not
    <FORGE_HUB_CREDENTIALS_DIRECTORY>/<project id>/<repository>.json
        {"repositoryUrl": "https://…", "username": "…", "credential": "…", "expiresAt"?: "…"}

Files are private to the hub's account (0600), directories are changed by nobody else.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

import anyio.to_thread

from forge_core.errors import RefusedError
from forge_core.publication import Credential, normal_url
from forge_core.wire.base import ID_PATTERN, Timestamp, WireModel, parse
from forge_edges.trusted_file import UntrustedFile, read_trusted_file

MAX_SECRET_BYTES: Final = 65_536
MAX_SECRETS_BYTES: Final = 262_144
"""All of one grant: its answer is one message (protocol.md, Size)."""

_PROJECT: Final = re.compile(ID_PATTERN)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class SecretSource(Protocol):
    """Where the secrets of projects are."""

    async def secrets(self, project_id: str, names: Iterable[str]) -> dict[str, str]:
        """All of them by name.

        :raises RefusedError: code ``secret_unavailable``, naming the first that cannot be had.
        """


@dataclass(frozen=True, slots=True)
class PublishCredential:
    """What one project may push to one repository with.

    :param repository_url: as :func:`forge_core.publication.normal_url` writes it.
    :param expires_at: when it ends by itself, RFC 3339; None: it is not said.
    """

    repository_url: str
    username: str
    password: str = field(repr=False)
    expires_at: str | None = None


class CredentialSource(Protocol):
    """Where the credentials are with which results are published."""

    async def credential(self, project_id: str, repository: str) -> PublishCredential:
        """The project's credential for the repository.

        :raises RefusedError: code ``credential_unavailable``.
        """


class DirectorySecrets:
    """Implements :class:`SecretSource`; one file a secret."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def secrets(self, project_id: str, names: Iterable[str]) -> dict[str, str]:
        """See the protocol."""
        return await anyio.to_thread.run_sync(self._read_all, project_id, tuple(names))

    def _read_all(self, project_id: str, names: tuple[str, ...]) -> dict[str, str]:
        values = {name: self._read(project_id, name) for name in names}
        if sum(len(value.encode()) for value in values.values()) > MAX_SECRETS_BYTES:
            raise _no_secret(f"they have more than {MAX_SECRETS_BYTES} bytes together")
        return values

    def _read(self, project_id: str, name: str) -> str:
        try:
            if not _NAME.fullmatch(name):
                raise ValueError("it is no name of an environment variable")
            path = _inside(self._directory, project_id) / name
            raw = read_trusted_file(path, max_bytes=MAX_SECRET_BYTES, private=True)
            value = raw.decode("utf-8").removesuffix("\n")
            if not value or "\0" in value:
                raise ValueError("it is empty or holds a NUL")
        except (UntrustedFile, UnicodeDecodeError, ValueError) as error:
            why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            raise _no_secret(f"{name[:256]!r} of project {project_id}: {why}") from None
        return value


class _CredentialFile(WireModel):
    """What is in the file, named like the answer that it becomes."""

    repository_url: str
    username: str
    credential: str
    expires_at: Timestamp | None = None


class DirectoryCredentials:
    """Implements :class:`CredentialSource`; one JSON file for each repository of a project."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def credential(self, project_id: str, repository: str) -> PublishCredential:
        """See the protocol."""
        return await anyio.to_thread.run_sync(self._read, project_id, repository)

    def _read(self, project_id: str, repository: str) -> PublishCredential:
        what = f"for repository {repository[:128]!r} of project {project_id}"
        try:
            if not _REPOSITORY.fullmatch(repository):
                raise ValueError("it is no name of a repository")
            path = _inside(self._directory, project_id) / f"{repository}.json"
            raw = read_trusted_file(path, max_bytes=MAX_SECRET_BYTES, private=True)
            told = parse(_CredentialFile, json.loads(raw), what=str(path))
            url = normal_url(told.repository_url)
            Credential(told.username, told.credential).wipe()
            if told.expires_at is not None:
                datetime.fromisoformat(told.expires_at)
        except (RefusedError, ValueError, RecursionError) as error:
            # A JSON error quotes nothing of the text, and neither do ours.
            raise RefusedError(
                f"cannot have the credential {what}: {error}", code="credential_unavailable"
            ) from None
        return PublishCredential(url, told.username, told.credential, told.expires_at)


def _inside(directory: Path, project_id: str) -> Path:
    """The project's directory; nobody else may have changed what is in it.

    :raises ValueError: somebody may, or it is none.
    """
    if not _PROJECT.fullmatch(project_id):
        raise ValueError("its project has no id that a directory can have")
    for path in (directory, directory / project_id):
        try:
            status = path.stat()
        except OSError as error:
            raise ValueError(f"cannot open {path}: {error.strerror}") from None
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{path} is not a directory")
        if status.st_uid not in {0, os.geteuid()} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"other accounts can change {path}; run chmod 700 {path}")
    return directory / project_id


def _no_secret(why: str) -> RefusedError:
    return RefusedError(f"cannot have a secret: {why}", code="secret_unavailable")
