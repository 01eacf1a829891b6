"""What a killed engine leaves behind goes, as soon as it can."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lib import remains
from lib.layout import BedError

import engines  # noqa: F401 - makes scripts/ importable
from needs import require_root


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup with a child, in one hierarchy of this machine."""
    require_root("make a cgroup")
    top = Path("/sys/fs/cgroup")
    hierarchies = [top, top / "unified", top / "pids"]
    name = f"forge-test-{os.getpid()}"
    place = next(h for h in hierarchies if (h / "cgroup.procs").exists()) / name
    (place / "child").mkdir(parents=True)
    yield place
    for folder in (place / "child", place):
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()


@pytest.fixture
def inside(cgroup: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in it."""
    with subprocess.Popen(["sleep", "600"]) as process:
        (cgroup / "child" / "cgroup.procs").write_text(str(process.pid))
        yield process
        process.kill()


def test_a_cgroup_goes_once_what_ends_in_it_has_ended(
    cgroup: Path, inside: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = remains._removed, list[bool]()

    def end_after_the_first_look(folder: str) -> bool:
        looks.append(look(folder))
        inside.kill()
        inside.wait()
        return looks[-1]

    monkeypatch.setattr(remains, "_removed", end_after_the_first_look)
    remains.remove_cgroup(cgroup.name)
    assert looks[0] is False
    assert not cgroup.exists()


def test_what_lives_on_in_a_cgroup_is_named(
    cgroup: Path, inside: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remains, "KILL_WAIT_S", 0.1)
    with pytest.raises(BedError, match=rf"child: processes \['{inside.pid}'\] are in it"):
        remains.remove_cgroup(cgroup.name)
    assert cgroup.exists()
