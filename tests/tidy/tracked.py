"""The files that the repository tracks, for the checks of this folder."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from needs import unavailable

ROOT = Path(__file__).resolve().parents[2]


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every tracked file that is there, below :data:`ROOT`; a test without Git has none."""
    if not (ROOT / ".git").exists():
        unavailable("the tracked files of something that is not a Git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60
    ).stdout
    paths = (Path(name) for name in listed.decode().split("\0") if name)
    return tuple(path for path in paths if (ROOT / path).is_file())


def tracked_text() -> list[tuple[Path, str]]:
    """Path and text of every tracked text file."""
    found = []
    for path in tracked_files():
        content = (ROOT / path).read_bytes()
        if b"\0" not in content:
            found.append((path, content.decode()))
    return found


def python_sources(*folders: str) -> list[Path]:
    """Tracked Python files below these folders."""
    return [p for p in tracked_files() if p.suffix == ".py" and p.parts[0] in folders]
