"""A starter on its way into a working tree: all of it or nothing, and never over anything."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Final

from forge_bridge.starter.render import Starter
from forge_core.errors import RefusedError
from forge_edges.durable_file import disk_errors, sync_directory, write_all

DIRECTORY: Final = ".forge"
MAX_NAMED: Final = 10


def write_starter(root: Path, starter: Starter) -> tuple[Path, ...]:
    """Make ``.forge`` with every file of the starter; returns their paths.

    It is made beside its place and renamed there: rename(2) replaces an empty directory and
    nothing else, so that neither a file nor a link to elsewhere is ever written over.

    :raises RefusedError: code ``file_exists``: something is there already; the text names it.
    :raises DiskUnusable: it could not be written; nothing is left of it.
    """
    directory = root / DIRECTORY
    _require_absent(directory)
    draft = root / f"{DIRECTORY}-{secrets.token_hex(8)}"
    with disk_errors("write", directory):
        draft.mkdir()
        try:
            _fill(draft, starter.files)
            _require_absent(directory)
            draft.rename(directory)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        sync_directory(root)
    return tuple(root / name for name in starter.files)


def _fill(draft: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        name = PurePosixPath(path).relative_to(DIRECTORY).name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(draft / name, flags, 0o666)
        try:
            write_all(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_directory(draft)


def _require_absent(directory: Path) -> None:
    with disk_errors("look at", directory):
        try:
            mode = directory.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "no directory"
            raise _exists(f"{directory} is {kind}")
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_NAMED))
    if names:
        there = ", ".join(str(directory / name) for name in names)
        raise _exists(f"{there} {'is' if len(names) == 1 else 'are'} there")


def _exists(what: str) -> RefusedError:
    return RefusedError(
        f"cannot write a starter: {what}, and nothing is ever overwritten; move it away first",
        code="file_exists",
        field="directory",
    )
