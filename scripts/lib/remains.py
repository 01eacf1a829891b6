"""What a killed daemon may leave behind, and its certain removal."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from lib.debian import run
from lib.layout import BedError
from lib.processes import KILL_WAIT_S, belonging_to, describe

SWEEPS_MAX = 5
CGROUPS = Path("/sys/fs/cgroup")


def mounts_below(places: Sequence[Path]) -> list[Path]:
    """Mount points at or below ``places``, deepest first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    # proc(5): field 5 is the mount point; blanks and backslashes in it are octal escapes.
    points = [Path(line.split(" ")[4].encode().decode("unicode_escape")) for line in lines]
    below = [point for point in points if any(point.is_relative_to(place) for place in places)]
    return sorted(below, key=lambda point: len(point.parts), reverse=True)


def cgroups_named(name: str) -> list[Path]:
    """The cgroup ``name`` in every hierarchy that has it."""
    candidates = [CGROUPS / name, *CGROUPS.glob(f"*/{name}")]
    return [path for path in candidates if path.is_dir()]


def clear(places: Sequence[Path]) -> None:
    """Kill what still runs from ``places`` and unmount what is mounted there.

    :raises BedError: something resists.
    """
    for _ in range(SWEEPS_MAX):  # a killed shim hands its container to init: look again
        found = belonging_to(places)
        if not found:
            break
        for process in found:
            process.signal(signal.SIGKILL)
        for process in found:
            process.wait_gone(KILL_WAIT_S)
    else:
        raise BedError(f"cannot end {', '.join(map(describe, found))}: started again each time")
    for point in mounts_below(places):
        run(["umount", "--lazy", str(point)])


def remove_tree(place: Path) -> None:
    """Remove a folder and all in it.

    :raises BedError: something is still mounted in it, which would be emptied too.
    """
    mounted = mounts_below([place])
    if mounted:
        raise BedError(f"cannot remove {place}: {mounted[0]} is still mounted")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(place)


def remove_cgroup(name: str) -> None:
    """Remove the cgroup ``name`` and its children; there must be no process in them."""
    for top in cgroups_named(name):
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(folder)
