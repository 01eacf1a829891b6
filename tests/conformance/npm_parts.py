"""Packages from npm for the conformance tests: installed once into a cache, by lock file."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest


def cache_root() -> Path:
    """Where downloaded parts are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "forge-bridge" / "conformance"


def missing(what: str) -> None:
    """A part cannot be had: a failure in CI, a skip elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


def installed(project: Path) -> Path:
    """Return a folder with the project's locked packages in its ``node_modules``."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        missing("node and npm are needed to run SignalR's JavaScript client")
    lock = project / "package-lock.json"
    folder = cache_root() / f"{project.name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            for name in ("package.json", "package-lock.json"):
                shutil.copy(project / name, folder / name)
            done = subprocess.run(
                [str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
                cwd=folder, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                missing(f"npm could not install {project.name}: {done.stderr[-2000:]}")
            (folder / ".complete").touch()
    return folder
