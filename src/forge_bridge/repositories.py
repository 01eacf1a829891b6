"""The repositories that this runner serves, by name (B-40).

``<state root>/repositories.json`` maps each name to the absolute path of the operator's clone,
which is only ever read.  The running bridge reads the file at each registration with the hub, so
a change counts from its next connection on.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from forge_core.errors import ForgeError, RefusedError
from forge_edges.durable_file import disk_errors, on_disk, read_file, replace_file
from forge_edges.git_layout import common_directory

logger = structlog.get_logger(__name__)

REGISTRY_FILE: Final = "repositories.json"
LOCK_FILE: Final = "repositories.lock"
MAX_REPOSITORIES: Final = 1000
MAX_NAMES_BYTES: Final = 20_000
"""All names together: each registration with the hub lists them (protocol.md, Size)."""

MAX_REGISTRY_BYTES: Final = 4_194_304
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def list_repositories(state_root: Path) -> dict[str, Path]:
    """Name → path, sorted by name; empty where none was ever added.

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
    for name, where in entries.items():
        if not (NAME_PATTERN.fullmatch(name) and isinstance(where, str) and where[:1] == "/"):
            raise _damaged(path)
    return {name: Path(entries[name]) for name in sorted(entries)}


def add_repository(state_root: Path, name: str, path: Path) -> bool:
    """Serve the repository at ``path`` as ``name``; durable when it returns.

    :param path: a clone, a linked work tree of one, or a bare repository; relative paths count
        from the current directory.
    :returns: whether anything changed: adding the same again is success.
    :raises RefusedError: ``field`` is ``name`` or ``path``: not a usable name, already the name
        of another path, or no Git repository that this account can read.
    """
    _require_name(name)
    absolute = path.absolute()
    where = absolute.resolve() if absolute.exists() else absolute
    require_repository(where)
    with _locked(state_root):
        known = list_repositories(state_root)
        if known.get(name) == where:
            return False
        if name in known:
            raise RefusedError(
                f"cannot add {name}: it already names {known[name]}; remove it first "
                f"(forge-bridge remove-repo {name})",
                code="repository_exists",
                field="name",
            )
        if len(known) >= MAX_REPOSITORIES:
            raise RefusedError(
                f"cannot add {name}: there are {MAX_REPOSITORIES} repositories, the most",
                code="repositories_full",
                field="name",
            )
        if sum(len(other) + len('"",') for other in (*known, name)) > MAX_NAMES_BYTES:
            raise RefusedError(
                f"cannot add {name}: with it the names of all repositories have more than "
                f"{MAX_NAMES_BYTES} bytes, too many to tell the hub; choose shorter ones",
                code="repositories_full",
                field="name",
            )
        _store(state_root, known | {name: where})
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


def _store(state_root: Path, repositories: Mapping[str, Path]) -> None:
    entries = {name: str(path) for name, path in sorted(repositories.items())}
    text = json.dumps({"version": 1, "repositories": entries}, indent=2)
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
        self.clones: dict[str, Path] = {}

    async def refresh(self) -> None:
        """Read the registry again; what cannot be read leaves the last known state."""
        try:
            found = await on_disk(list_repositories, self._state_root)
        except ForgeError as error:
            logger.error("cannot read the repositories", error=str(error))
            return
        self.clones.clear()
        self.clones.update(found)

    def paths(self) -> Mapping[str, str]:
        """Name → path."""
        return {name: str(path) for name, path in self.clones.items()}
