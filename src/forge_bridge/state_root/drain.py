"""``drain.json``: whether the operator of this host drains it (B-87).

That the file is there is the whole statement, so that no damage to it can undo a drain; its
content is for people.  Every function blocks, and raises RefusedError or DiskUnusable.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from forge_core.errors import RefusedError
from forge_edges.durable_file import create_file, disk_errors, remove_file

DRAIN_FILE: Final = "drain.json"


def is_drained(root: Path) -> bool:
    """Whether this host is drained; asks the file system, not a memory of it."""
    path = root / DRAIN_FILE
    with disk_errors("look for", path):
        try:
            path.lstat()
        except FileNotFoundError:
            return False
    return True


def drain(root: Path, since: str) -> bool:
    """Drain from now on, also after a restart; False: it was drained already."""
    content = json.dumps({"since": since}).encode() + b"\n"
    try:
        create_file(root / DRAIN_FILE, content)
    except RefusedError as error:
        if error.code != "file_exists":
            raise
        return False
    return True


def undrain(root: Path) -> bool:
    """Take work again; False: it was not drained."""
    if not is_drained(root):
        return False
    remove_file(root / DRAIN_FILE)
    return True
