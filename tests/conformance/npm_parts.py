"""Packages from npm for the conformance tests: installed once into a cache, by lock file."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from needs import unavailable


def cache_root() -> Path:
    """Where downloaded parts are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "forge-bridge" / "conformance"


@contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """Hold a cache folder alone; yields whether it is complete, and marks it so on success."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / ".complete"
    with (folder / ".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield mark.exists()
        mark.touch()


def installed(project: Path) -> Path:
    """Return a folder with the project's locked packages in its ``node_modules``."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        unavailable("node and npm are needed to install the parts of the conformance tests")
    lock = project / "package-lock.json"
    folder = cache_root() / f"{project.name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    with locked_folder(folder) as complete:
        if not complete:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(project / name, folder / name)
            done = subprocess.run(
                [str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
                cwd=folder, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                unavailable(f"npm could not install {project.name}: {done.stderr[-2000:]}")
    return folder
