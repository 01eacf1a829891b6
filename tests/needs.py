"""What a test needs of its machine: without it a test fails in CI, and is skipped elsewhere."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest


def unavailable(what: str) -> NoReturn:
    """Something cannot be had."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


def require_root(why: str) -> None:
    """Go on as root only.

    :param why: what it is that only root can do.
    """
    if os.geteuid() != 0:
        unavailable(f"only root can {why}")


@contextmanager
def tmpfs(path: Path, options: str = "mode=0700") -> Iterator[Path]:
    """A file system of its own at ``path``.

    :param options: of mount(8); see tmpfs(5).
    """
    path.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        unavailable(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True, capture_output=True)
