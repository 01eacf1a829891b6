"""The repositories that this runner serves, by name (B-40).

``<state root>/repositories.json`` maps each name to the absolute path of the operator's clone,
which is only ever read, and to the one remote that results of it may be pushed to.  The running
bridge reads the file at each registration with the hub, so a change counts from its next
connection on.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from forge_core.errors import ForgeError, RefusedError
from forge_core.publication import normal_url
from forge_edges.durable_file import disk_errors, on_disk, read_file, replace_file
from forge_edges.git_input import origin_url
from forge_edges.git_layout import common_directory

logger = structlog.get_logger(__name__)

REGISTRY_FILE: Final = "repositories.json"
LOCK_FILE: Final = "repositories.lock"
MAX_REPOSITORIES: Final = 1000
MAX_NAMES_BYTES: Final = 20_000
"""All names together: each registration with the hub lists them (protocol.md, Size)."""

MAX_REGISTRY_BYTES: Final = 4_194_304
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_USERINFO: Final = re.compile(r"(?<=://)[^/@]*@")


@dataclass(frozen=True, slots=True)
class Registered:
    """What the operator said of a repository.

    :param path: of the clone, absolute.
    :param remote: the only URL that results may be pushed to, as
        :func:`forge_core.publication.normal_url` writes it; None: none may be pushed.
    """

    path: Path
    remote: str | None = None


def list_repositories(state_root: Path) -> dict[str, Registered]:
    """By name, sorted; empty where none was ever added.

    :raises RefusedError: the registry is unreadable or not what :func:`add_repository` wrote.
    """
    path = state_root / REGISTRY_FILE
    try:
        payload = json.loads(read_file(path, MAX_REGISTRY_BYTES))
    except RefusedError as error:
        if error.code == "file_missing":
            return {}
        raise
    except (ValueError, RecursionError):
        raise _damaged(path) from None
    entries = payload.get("repositories") if isinstance(payload, dict) else None
    if not isinstance(entries, dict) or len(entries) > MAX_REPOSITORIES:
        raise _damaged(path)
    found = {name: _read_entry(entries[name]) for name in sorted(entries)}
    if not all(map(NAME_PATTERN.fullmatch, found)):
        raise _damaged(path)
    known = {name: entry for name, entry in found.items() if entry is not None}
    if len(known) < len(found):
        raise _damaged(path)
    return known


def _read_entry(entry: object) -> Registered | None:
    """None: it is not what :func:`_store` wrote; a path alone is what version 1 had."""
    told = entry if isinstance(entry, dict) else {"path": entry}
    where, remote = told.get("path"), told.get("remote")
    if not isinstance(where, str) or where[:1] != "/":
        return None
    try:
        if remote is not None and (not isinstance(remote, str) or normal_url(remote) != remote):
            return None
    except RefusedError:
        return None
    return Registered(Path(where), remote)


async def pushable_origin(path: Path) -> str | None:
    """The origin of a clone as a remote that can be registered; None where it is none.

    A user name or password in it is left out: what is pushed with comes from the hub.
    """
    origin = await origin_url(path)
    try:
        return None if origin is None else normal_url(_USERINFO.sub("", origin, count=1))
    except RefusedError:
        return None


def add_repository(
    state_root: Path,
    name: str,
    path: Path,
    *,
    remote: str | None = None,
    origin: str | None = None,
) -> bool:
    """Serve the repository at ``path`` as ``name``; durable when it returns.

    :param path: a clone, a linked work tree of one, or a bare repository; relative paths count
        from the current directory.
    :param remote: where results may be pushed to, in place of what was said before.
    :param origin: likewise where nothing was said, see :func:`pushable_origin`.
    :returns: whether anything changed: adding the same again is success.
    :raises RefusedError: ``field`` is ``name`` or ``path``: not a usable name, already the name
        of another path, or no Git repository that this account can read; code
        ``remote_refused``: nothing may be pushed to such a URL.
    """
    _require_name(name)
    remote = None if remote is None else normal_url(remote)
    absolute = path.absolute()
    where = absolute.resolve() if absolute.exists() else absolute
    require_repository(where)
    with _locked(state_root):
        known = list_repositories(state_root)
        before = known.get(name, Registered(where))
        entry = replace(before, remote=remote or before.remote or origin)
        if before.path != where:
            raise RefusedError(
                f"cannot add {name}: it already names {before.path}; remove it first "
                f"(forge-bridge remove-repo {name})",
                code="repository_exists",
                field="name",
            )
        if known.get(name) == entry:
            return False
        if len(known | {name: entry}) > MAX_REPOSITORIES:
            raise RefusedError(
                f"cannot add {name}: there are {MAX_REPOSITORIES} repositories, the most",
                code="repositories_full",
                field="name",
            )
        if sum(len(other) + len('"",') for other in known | {name: entry}) > MAX_NAMES_BYTES:
            raise RefusedError(
                f"cannot add {name}: with it the names of all repositories have more than "
                f"{MAX_NAMES_BYTES} bytes, too many to tell the hub; choose shorter ones",
                code="repositories_full",
                field="name",
            )
        _store(state_root, known | {name: entry})
    return True


def remove_repository(state_root: Path, name: str) -> bool:
    """Serve ``name`` no more; durable when it returns.  The clone itself stays as it is.

    :returns: whether anything changed: that it is gone already is success.
    """
    _require_name(name)
    with _locked(state_root):
        known = list_repositories(state_root)
        if known.pop(name, None) is None:
            return False
        _store(state_root, known)
    return True


def require_repository(path: Path) -> None:
    """Whether there is a Git repository at ``path`` that this account can read.

    :raises RefusedError: code ``not_a_repository``, field ``path``.
    """
    try:
        git_directory = common_directory(path)
        with (git_directory / "HEAD").open("rb"), os.scandir(git_directory / "objects"):
            pass
    except ValueError as error:
        raise _no_repository(path, str(error)) from None
    except OSError as error:
        raise _no_repository(
            path, f"this account cannot read {error.filename}: {error.strerror}"
        ) from None


def _no_repository(path: Path, why: str) -> RefusedError:
    return RefusedError(
        f"cannot add {path}: {why}; name a clone or a bare repository that the account of the "
        "bridge can read",
        code="not_a_repository",
        field="path",
    )


def _require_name(name: str) -> None:
    if not NAME_PATTERN.fullmatch(name) or name.endswith((".git", ".lock")):
        raise RefusedError(
            f"cannot use {name[:128]!r} as the name of a repository: give letters, digits, ., _ "
            "and -, beginning with a letter or digit, at most 128, not ending in .git or .lock",
            code="malformed",
            field="name",
        )


@contextmanager
def _locked(state_root: Path) -> Iterator[None]:
    """One change at a time; the lock goes with the descriptor, however the process ends."""
    path = state_root / LOCK_FILE
    with disk_errors("lock", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with disk_errors("lock", path):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _store(state_root: Path, repositories: Mapping[str, Registered]) -> None:
    entries = {
        name: {"path": str(entry.path), "remote": entry.remote}
        for name, entry in sorted(repositories.items())
    }
    text = json.dumps({"version": 2, "repositories": entries}, indent=2)
    replace_file(state_root / REGISTRY_FILE, f"{text}\n".encode())


def _damaged(path: Path) -> RefusedError:
    return RefusedError(
        f"cannot read {path}: it is not a list of repositories; move it away and add them again",
        code="malformed",
    )


class RegisteredRepositories:
    """What ``add-repo`` registered, as of the last registration with the hub."""

    def __init__(self, state_root: Path) -> None:
        self._state_root = state_root
        self._remotes: dict[str, str] = {}
        self.clones: dict[str, Path] = {}

    async def refresh(self) -> None:
        """Read the registry again; what cannot be read leaves the last known state."""
        try:
            found = await on_disk(list_repositories, self._state_root)
        except ForgeError as error:
            logger.error("cannot read the repositories", error=str(error))
            return
        self.clones.clear()
        self.clones.update({name: entry.path for name, entry in found.items()})
        self._remotes = {n: entry.remote for n, entry in found.items() if entry.remote is not None}

    def paths(self) -> Mapping[str, str]:
        """Name → path."""
        return {name: str(path) for name, path in self.clones.items()}

    def remotes(self) -> Mapping[str, str]:
        """Name → the remote that results may be pushed to, for those that have one."""
        return self._remotes
