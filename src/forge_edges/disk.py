"""How full the disk is (:class:`forge_core.ports.Disk`; statvfs(3))."""

from __future__ import annotations

import os
from pathlib import Path

from forge_core.ports import DiskUsage
from forge_edges.durable_file import disk_errors, on_disk


class FileSystemDisk:
    """The filesystem that holds ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def usage(self) -> DiskUsage:
        """As an unprivileged writer sees it: the blocks kept for root count as used.

        :raises DiskUnusable: the filesystem does not answer.
        """
        return await on_disk(self._usage)

    def _usage(self) -> DiskUsage:
        with disk_errors("look at", self._path):
            facts = os.statvfs(self._path)
        used = facts.f_blocks - facts.f_bfree
        reachable = used + facts.f_bavail
        # Rounded up, as df(1) does: a disk is full before it is entirely full.
        percent = 100 if reachable == 0 else -(-used * 100 // reachable)
        return DiskUsage(min(percent, 100), facts.f_bavail * facts.f_frsize)
