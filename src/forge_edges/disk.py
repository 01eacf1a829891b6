"""How full the disks are that sandboxes fill (:class:`forge_core.ports.Disk`; statvfs(3))."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from forge_core.ports import DiskUsage
from forge_edges.durable_file import disk_errors, on_disk


class FileSystemDisks:
    """The filesystems that hold some directories; the fullest one speaks for all.

    :param paths: the state root, and the engine's data where it can be looked at from here.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)

    async def usage(self) -> DiskUsage:
        """As an unprivileged writer sees it: the blocks kept for root count as used.

        A filesystem that has run out of inodes is as full as one without blocks.

        :raises DiskUnusable: a filesystem does not answer.
        :raises RefusedError: a directory is gone.
        """
        return await on_disk(self._usage)

    def _usage(self) -> DiskUsage:
        looked = [_look(path) for path in self._paths]
        return DiskUsage(
            max(usage.used_percent for usage in looked), min(usage.free_bytes for usage in looked)
        )


def is_reachable(path: Path) -> bool:
    """Whether this process can look at the filesystem of ``path``: not so on another host."""
    try:
        os.statvfs(path)
    except OSError:
        return False
    return path.is_dir()


def _look(path: Path) -> DiskUsage:
    with disk_errors("look at", path):
        facts = os.statvfs(path)
    blocks = _percent(facts.f_blocks - facts.f_bfree, facts.f_bavail)
    # Some filesystems (Btrfs) count no inodes: all zero.
    inodes = _percent(facts.f_files - facts.f_ffree, facts.f_favail) if facts.f_files else 0
    return DiskUsage(max(blocks, inodes), facts.f_bavail * facts.f_frsize)


def _percent(used: int, available: int) -> int:
    """Rounded up, as df(1) does: a disk is full before it is entirely full."""
    reachable = used + available
    return 100 if reachable == 0 else min(100, -(-used * 100 // reachable))
