"""How many files a directory keeps, and for how long (storage.md, Bounds)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge_edges.durable_file import disk_errors, sync_directory

_DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class Bound:
    """What is kept for an operator, who may never come."""

    max_files: int
    max_age_days: int


SUSPECTS: Final = Bound(max_files=200, max_age_days=30)
"""Of the ``*.suspect`` files of one directory."""


def set_aside(path: Path) -> None:
    """Keep a damaged file for the operator as ``*.suspect``, durably, where no start reads it.

    :raises DiskUnusable: it may still have its old name.
    """
    with disk_errors("set aside", path):
        path.replace(path.with_suffix(".suspect"))
        sync_directory(path.parent)


def prune(directory: Path, pattern: str, bound: Bound) -> int:
    """Remove the files beyond the bound, oldest first; returns how many.

    :raises DiskUnusable: the disk does not let go.
    """
    with disk_errors("prune", directory):
        aged = sorted((path.lstat().st_mtime, path) for path in directory.glob(pattern))
        oldest = time.time() - bound.max_age_days * _DAY_S
        surplus = len(aged) - bound.max_files
        doomed = [path for n, (mtime, path) in enumerate(aged) if n < surplus or mtime < oldest]
        for path in doomed:
            path.unlink(missing_ok=True)
    return len(doomed)
