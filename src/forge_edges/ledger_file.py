"""The append-only record of one attempt on disk (:class:`forge_core.ports.Ledger`; storage.md).

Appends that meet share one write and one ``fdatasync`` (group commit).  The file is made longer
in advance, without blocks, and reads as NUL there: a sync that need not commit a new length as
well takes two thirds of the time.  A write that fails leaves the file as it was before.  After a
sync that fails the file is not written to any more, since the kernel may believe clean what the
disk never saw (fsync(2), NOTES): the next append copies what was durable into a new file and
goes on there.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Self

import anyio

from forge_core.errors import DiskUnusable, ForgeError, RefusedError
from forge_core.ledger import (
    MAX_LEDGER_BYTES,
    ROOM_FOR_THE_END,
    LedgerContents,
    complete_line,
    encode_body,
    parse_ledger,
)
from forge_core.ready import ENDING
from forge_edges.durable_file import (
    FILE_MODE,
    disk_errors,
    on_disk,
    read_file,
    replace_file,
    sync_directory,
    write_all,
)

ROOM_BYTES: Final = 64 * 2**10
"""How much longer the file is made when a record does not fit: some 300 records."""

_MAX_BATCH: Final = 256
_OPEN_FLAGS: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Append:
    """Records on their way together.

    :ivar outcome: what went wrong, or None; settled on the event loop.
    """

    bodies: list[bytes]
    outcome: asyncio.Future[ForgeError | None]


class LedgerFile:
    """One ledger, open for appending; one object a file, used from one event loop.

    It has a thread of its own, which takes whatever waits, writes it and syncs once.

    :param utc: the wall clock as RFC 3339, for the ``time`` of records.
    """

    def __init__(
        self, path: Path, descriptor: int, *, sequence: int, size_bytes: int, utc: Callable[[], str]
    ) -> None:
        self.path = path
        self._descriptor = descriptor
        self._sequence = sequence
        self._size_bytes = size_bytes
        self._room_until_bytes = size_bytes
        self._utc = utc
        self._broken: str | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._waiting: SimpleQueue[_Append | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._run, name=path.name, daemon=True)
        self._writer.start()

    @classmethod
    async def create(cls, path: Path, *, utc: Callable[[], str]) -> Self:
        """Begin a ledger; the empty file is durable when this returns.

        :raises RefusedError: ``file_exists``.
        :raises DiskUnusable: there is no ledger; after a crash there may be an empty one.
        """
        descriptor = await on_disk(_create, path)
        return cls(path, descriptor, sequence=0, size_bytes=0, utc=utc)

    @classmethod
    async def open(cls, path: Path, *, utc: Callable[[], str]) -> Self:
        """Go on with a ledger; a torn tail is cut off.

        :raises RefusedError: ``ledger_suspect``, or ``file_missing``.
        """
        descriptor, contents = await on_disk(_reopen, path)
        return cls(
            path,
            descriptor,
            sequence=len(contents.records),
            size_bytes=contents.good_bytes,
            utc=utc,
        )

    async def append(self, kind: str, data: Mapping[str, Any]) -> None:
        """Add one record; see :meth:`append_all`."""
        await self.append_all([(kind, data)])

    async def append_all(self, records: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Add records in one write; all are durable when this returns, none when it raises.

        Once begun it is carried through although the caller is cancelled: an intent without its
        effect does no harm.  A crash may leave the first of them.  Records become durable in the
        order of the calls.

        :raises DiskUnusable: the records must be taken as not written.
        :raises RefusedError: ``record_invalid``, ``record_too_large``, ``ledger_closed``, or
            ``ledger_full``: there is still room for the records of an end.
        """
        time, records = self._utc(), tuple(records)
        bodies = [encode_body(time, kind, data) for kind, data in records]
        if self._closed:
            raise RefusedError(f"cannot append to {self.path}: it is closed", code="ledger_closed")
        if ENDING.isdisjoint(kind for kind, _ in records):
            room_bytes = int(MAX_LEDGER_BYTES * (1 - ROOM_FOR_THE_END))
            self._require_room(sum(map(len, bodies)), room_bytes)
        append = _Append(bodies, self._loop.create_future())
        with anyio.CancelScope(shield=True):
            self._waiting.put(append)
            error = await append.outcome
        if error is not None:
            raise error

    async def close(self) -> None:
        """Finish the appends under way and let go of the file; idempotent."""
        if not self._closed:
            self._closed = True
            self._waiting.put(None)
        with anyio.CancelScope(shield=True):
            await on_disk(self._writer.join)

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                error = self._try_to_write([body for append in batch for body in append.bodies])
                self._loop.call_soon_threadsafe(_settle, batch, error)
        finally:
            self._cut_back()
            os.close(self._descriptor)

    def _try_to_write(self, bodies: list[bytes]) -> ForgeError | None:
        """What went wrong, whatever it is: somebody waits for the outcome of every append."""
        try:
            self._write(bodies)
        except ForgeError as error:
            return error
        except Exception as bug:  # noqa: BLE001 - told to whoever waits
            self._broken = f"{type(bug).__name__} in the bridge"
            return DiskUnusable(f"cannot append to {self.path}: {self._broken}")
        return None

    def _next_batch(self) -> list[_Append]:
        """Wait for a record and take what else is there; nothing when the ledger is closed.

        Nothing comes after the mark that says so.
        """
        batch: list[_Append] = []
        while len(batch) < _MAX_BATCH and not (batch and self._waiting.empty()):
            append = self._waiting.get()
            if append is None:
                self._waiting.put(None)
                break
            batch.append(append)
        return batch

    def _write(self, bodies: list[bytes]) -> None:
        if self._broken is not None:
            self._begin_anew(self._broken)
        lines = b"".join(
            complete_line(sequence, body)
            for sequence, body in enumerate(bodies, self._sequence + 1)
        )
        self._require_room(len(lines), MAX_LEDGER_BYTES)
        with disk_errors("append to", self.path):
            self._write_lines(lines)
        self._sequence += len(bodies)
        self._size_bytes += len(lines)

    def _require_room(self, more_bytes: int, room_bytes: int) -> None:
        if self._size_bytes + more_bytes > room_bytes:
            raise RefusedError(
                f"cannot append to {self.path}: it would exceed {room_bytes} bytes",
                code="ledger_full",
            )

    def _write_lines(self, lines: bytes) -> None:
        end_bytes = self._size_bytes + len(lines)
        try:
            if end_bytes > self._room_until_bytes:
                room_until_bytes = min(end_bytes + ROOM_BYTES, MAX_LEDGER_BYTES)
                os.ftruncate(self._descriptor, room_until_bytes)
                self._room_until_bytes = room_until_bytes
            os.lseek(self._descriptor, self._size_bytes, os.SEEK_SET)
            write_all(self._descriptor, lines)
        except OSError as error:
            if not self._cut_back():
                self._broken = error.strerror
            raise
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._broken = error.strerror
            self._cut_back()
            raise

    def _begin_anew(self, broken: str) -> None:
        """Go on in a new file that holds exactly the records whose sync succeeded."""
        try:
            durable = read_file(self.path, 2 * MAX_LEDGER_BYTES)[: self._size_bytes]
            if parse_ledger(durable).good_bytes != self._size_bytes:
                raise DiskUnusable("what was durable before cannot be read back")
            replace_file(self.path, durable)
            with disk_errors("open", self.path):
                descriptor = os.open(self.path, _OPEN_FLAGS)
        except ForgeError as error:
            raise DiskUnusable(
                f"cannot append to {self.path}: an earlier write failed ({broken}), and: {error}"
            ) from error
        os.close(self._descriptor)
        self._descriptor, self._broken = descriptor, None
        self._room_until_bytes = self._size_bytes

    def _cut_back(self) -> bool:
        """Remove what a failed write left, so that nobody takes the next record for its end."""
        try:
            os.ftruncate(self._descriptor, self._size_bytes)
        except OSError:
            return False
        self._room_until_bytes = self._size_bytes
        return True


def _settle(batch: list[_Append], error: ForgeError | None) -> None:
    for append in batch:
        if not append.outcome.done():  # a loop that is being torn down cancels everything
            append.outcome.set_result(error)


def read_ledger(path: Path) -> LedgerContents:
    """What the ledger at ``path`` says; blocks.

    :raises RefusedError: ``file_missing`` or ``path_refused``.
    :raises DiskUnusable: the disk does not answer (EIO).
    """
    try:
        return parse_ledger(read_file(path, MAX_LEDGER_BYTES))
    except RefusedError as error:
        if error.code == "file_too_large":
            return LedgerContents(suspect=str(error))
        raise


def _create(path: Path) -> int:
    with disk_errors("create", path):
        descriptor = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            sync_directory(path.parent)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return descriptor


def _reopen(path: Path) -> tuple[int, LedgerContents]:
    contents = read_ledger(path)
    if contents.suspect is not None:
        raise RefusedError(f"cannot go on with {path}: {contents.suspect}", code="ledger_suspect")
    with disk_errors("open", path):
        descriptor = os.open(path, _OPEN_FLAGS)
        try:
            os.ftruncate(descriptor, contents.good_bytes)
            # A killed process may have written what nobody has synced: it counts from here on.
            os.fdatasync(descriptor)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor, contents
