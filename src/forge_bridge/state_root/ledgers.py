"""``attempts/``: one ledger a dispatch, named ``<attempt id>.<fence>.ledger``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from forge_bridge.state_root.bounds import SUSPECTS, prune, set_aside
from forge_core.errors import ForgeError
from forge_core.ledger import LedgerContents
from forge_edges.durable_file import disk_errors, on_disk, sync_directory
from forge_edges.ledger_file import LedgerFile, read_ledger

_NAME: Final = re.compile(r"(?P<attempt>[A-Za-z0-9][A-Za-z0-9_-]{0,127})\.(?P<fence>[1-9]\d{0,18})")
_SUFFIX: Final = ".ledger"

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoredLedger:
    """A ledger that an earlier process left."""

    attempt_id: str
    fence: int
    contents: LedgerContents


class LedgerStore:
    """The ledgers of this runner; each is open in at most one place.

    Every method may raise DiskUnusable.
    """

    def __init__(self, directory: Path, utc: Callable[[], str]) -> None:
        self._directory = directory
        self._utc = utc
        self._open: dict[Path, LedgerFile] = {}

    async def create(self, attempt_id: str, fence: int) -> LedgerFile:
        """Begin the ledger of a dispatch; raises RefusedError ``file_exists``."""
        path = self._path(attempt_id, fence)
        ledger = await LedgerFile.create(path, utc=self._utc)
        self._open[path] = ledger
        return ledger

    async def reopen(self, attempt_id: str, fence: int) -> LedgerFile:
        """Go on with a ledger of an earlier process; raises RefusedError ``ledger_suspect``."""
        path = self._path(attempt_id, fence)
        ledger = await LedgerFile.open(path, utc=self._utc)
        self._open[path] = ledger
        return ledger

    async def read_all(self) -> tuple[StoredLedger, ...]:
        """Every ledger there is; one that cannot be read is suspect, and never stops the start."""
        return await on_disk(self._read_all)

    async def remove(self, attempt_id: str, fence: int) -> None:
        """Close and remove; that it is gone already is success.

        When this raises it is still there.  One whose removal could not be synced may come back
        after a power cut, and says by itself that it has ended.
        """
        path = self._path(attempt_id, fence)
        await self._close(path)
        await on_disk(_remove, path)

    async def mark_suspect(self, attempt_id: str, fence: int) -> None:
        """Keep the file for the operator, where no start reads it as a ledger again."""
        path = self._path(attempt_id, fence)
        await self._close(path)
        await on_disk(self._mark_suspect, path)

    async def suspects(self) -> tuple[str, ...]:
        """The names of the files that were kept, for the doctor."""
        found = await on_disk(lambda: tuple(self._directory.glob("*.suspect")))
        return tuple(sorted(path.name for path in found))

    async def close(self) -> None:
        """Close every open ledger."""
        for path in tuple(self._open):
            await self._close(path)

    def tidy(self) -> None:
        """Hold the bound on suspect files; blocks."""
        prune(self._directory, "*.suspect", SUSPECTS)

    def _path(self, attempt_id: str, fence: int) -> Path:
        name = f"{attempt_id}.{fence}"
        assert _NAME.fullmatch(name), name
        return self._directory / f"{name}{_SUFFIX}"

    async def _close(self, path: Path) -> None:
        ledger = self._open.pop(path, None)
        if ledger is not None:
            await ledger.close()

    def _read_all(self) -> tuple[StoredLedger, ...]:
        stored = []
        with disk_errors("list", self._directory):
            paths = sorted(self._directory.glob(f"*{_SUFFIX}"))
        for path in paths:
            named = _NAME.fullmatch(path.name.removesuffix(_SUFFIX))
            if named is None:
                logger.warning("ignoring a file that is no ledger", path=str(path))
                continue
            contents = self._read(path)
            stored.append(StoredLedger(named["attempt"], int(named["fence"]), contents))
        return tuple(stored)

    def _read(self, path: Path) -> LedgerContents:
        try:
            return read_ledger(path)
        except ForgeError as error:
            return LedgerContents(suspect=str(error))

    def _mark_suspect(self, path: Path) -> None:
        set_aside(path)
        self.tidy()


def _remove(path: Path) -> None:
    with disk_errors("remove", path):
        path.unlink(missing_ok=True)
    try:
        sync_directory(path.parent)
    except OSError as error:
        logger.warning("cannot sync the removal of a ledger", path=str(path), error=str(error))
