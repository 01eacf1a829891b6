"""Starts supervisors and proves that nothing of them is left."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pid1 import SETPRIV, UID, UNSHARE, Pid1

from needs import unavailable


@pytest.fixture(scope="session")
def namespaces() -> None:
    """PID namespaces and other users: what the tests below need from the machine."""
    probe = subprocess.run([*UNSHARE, *SETPRIV, "true"], capture_output=True, text=True)
    if probe.returncode:
        unavailable(f"cannot make a PID namespace here: {probe.stderr.strip()}")


@pytest.fixture
def start(namespaces: None) -> Iterator[Callable[..., Pid1]]:
    """Start a supervisor; all that were started are ended, and none of their processes is left."""
    started: list[Pid1] = []

    def start_one(*args: object, **kwargs: object) -> Pid1:
        started.append(Pid1(*args, **kwargs))  # type: ignore[arg-type]
        return started[-1]

    yield start_one
    for pid1 in started:
        pid1.stop()
    assert processes_of(UID) == []


def processes_of(uid: int) -> list[str]:
    """The processes of this user, by name."""
    names = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                names.append((entry / "cmdline").read_text()[:80])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return names
