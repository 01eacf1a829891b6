"""What a killed daemon may leave behind, and its certain removal."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from lib.debian import run
from lib.layout import BedError
from lib.processes import KILL_WAIT_S, belonging_to, describe

SWEEPS_MAX = 5
LOOK_S = 0.02
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
    """Remove the cgroup ``name`` and its children, once what ends in them has ended.

    :raises BedError: something stays in one of them.
    """
    deadline = time.monotonic() + KILL_WAIT_S
    for top in cgroups_named(name):
        for folder, _, _ in os.walk(top, topdown=False):
            while not _removed(folder):
                if time.monotonic() > deadline:
                    left = Path(folder, "cgroup.procs").read_text().split()
                    raise BedError(f"cannot remove cgroup {folder}: processes {left} are in it")
                time.sleep(LOOK_S)


def _removed(folder: str) -> bool:
    """False while a process is in it, also one that ends and has lost what it is known by."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True
