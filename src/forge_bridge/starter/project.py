"""What kind of project a repository holds, by the files at its top."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge_bridge.starter import Kind
from forge_core.errors import RefusedError
from forge_edges.durable_file import read_file
from forge_edges.git_layout import common_directory

MAX_FILE_BYTES: Final = 4 << 20
MAX_CANDIDATES: Final = 50

_WITH_HASHES: Final = re.compile(rb"--hash=sha(?:256|384|512):")
_NEEDS_OTHERS: Final = re.compile(
    rb"^\s*(?:-[rce]|--(?:requirement|constraint|editable)\b|\.|file:)", re.MULTILINE
)
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


_MARKS: Final = {
    Kind.PYTHON: (
        "pyproject.toml",
        "setup.py",
        "setup.cfg",
        "requirements.txt",
        "requirements.lock",
    ),
    Kind.NODE: ("package.json",),
    Kind.PHP: ("composer.json",),
}


@dataclass(frozen=True, slots=True)
class Project:
    """What was found.

    :param seen: the file that says what kind it is; None: no such file.
    :param lock: the file from which exactly the same packages are installed each time, relative
        to the root, where there is one that needs nothing else of the repository.
    """

    kind: Kind
    seen: str | None
    lock: str | None = None


def find_root(directory: Path) -> Path:
    """The top of the working tree that ``directory`` is in.

    :raises RefusedError: code ``not_a_repository``: it is in none.
    """
    start = directory.resolve()
    for candidate in (start, *start.parents):
        if not (candidate / ".git").exists():
            continue
        try:
            common_directory(candidate)
        except (OSError, ValueError) as error:
            raise _no_repository(directory, f"{candidate / '.git'}: {error}") from None
        return candidate
    raise _no_repository(directory, "it is in no working tree of Git")


def look_at(root: Path, kind: Kind | None = None) -> Project:
    """What the repository at ``root`` holds.

    :param kind: look for this kind only; None: the first of :class:`Kind` that is found.
    """
    for one, marks in _MARKS.items():
        seen = next((mark for mark in marks if (root / mark).is_file()), None)
        if kind is one or (kind is None and seen is not None):
            return Project(one, seen, _lock(root, one))
    return Project(Kind.PLAIN, None)


def _lock(root: Path, kind: Kind) -> str | None:
    match kind:
        case Kind.PYTHON:
            return next(_hashed_requirements(root), None)
        case Kind.NODE:
            return "package-lock.json" if _installs_alone(root) else None
        case Kind.PHP:
            return "composer.lock" if (root / "composer.lock").is_file() else None
        case Kind.PLAIN:
            return None


def _hashed_requirements(root: Path) -> Iterator[str]:
    """Requirements files with hashes; those for developers, who also test, come first."""
    found = [
        path
        for directory in (root, root / "requirements")
        for pattern in ("*requirements*.txt", "*.lock", "*.txt")
        for path in directory.glob(pattern)
        if directory != root or pattern != "*.txt"
    ]
    names = sorted({path.relative_to(root).as_posix() for path in found})[:MAX_CANDIDATES]
    for name in sorted(names, key=lambda name: ("dev" not in name, name)):
        content = _content(root / name)
        if (
            all(_PLAIN_NAME.fullmatch(part) for part in name.split("/"))
            and _WITH_HASHES.search(content)
            and not _NEEDS_OTHERS.search(content)
        ):
            yield name


def _installs_alone(root: Path) -> bool:
    """Whether ``npm ci`` needs nothing but the two files: no workspaces."""
    try:
        package = json.loads(_content(root / "package.json"))
    except (ValueError, RecursionError):
        return False
    has_lock = (root / "package-lock.json").is_file()
    return has_lock and isinstance(package, dict) and "workspaces" not in package


def _content(path: Path) -> bytes:
    """What is in the file; nothing where it cannot be read, is a link, or is too large."""
    try:
        return read_file(path, MAX_FILE_BYTES)
    except RefusedError:
        return b""


def _no_repository(directory: Path, why: str) -> RefusedError:
    return RefusedError(
        f"cannot use {directory}: {why}; go to a clone, or begin one with git init",
        code="not_a_repository",
        field="directory",
    )
