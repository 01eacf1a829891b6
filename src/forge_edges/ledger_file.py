"""The append-only record of one attempt on disk (:class:`forge_core.ports.Ledger`; storage.md).

Appends that meet share one write and one ``fdatasync`` (group commit): whoever finds the file
free writes for everyone who waits.  A write that fails leaves the file as it was before; a sync
that fails ends the ledger for this process, since what such a file holds is known only after it
was read again (fsync(2), NOTES).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import anyio

from forge_core.errors import DiskUnusable, ForgeError, RefusedError
from forge_core.ledger import (
    MAX_LEDGER_BYTES,
    LedgerContents,
    complete_line,
    encode_body,
    parse_ledger,
)
from forge_edges.durable_file import (
    FILE_MODE,
    disk_errors,
    on_disk,
    read_file,
    sync_directory,
    write_all,
)

_OPEN_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class _Batch:
    """Records that become durable, or fail, together; until shown otherwise, they failed."""

    __slots__ = ("bodies", "error", "is_done")

    def __init__(self, path: Path) -> None:
        self.bodies: list[bytes] = []
        self.is_done = False
        self.error: ForgeError | None = DiskUnusable(f"cannot append to {path}: not written")


class LedgerFile:
    """One ledger, open for appending; one object a file.

    :param utc: the wall clock as RFC 3339, for the ``time`` of records.
    """

    def __init__(
        self, path: Path, descriptor: int, *, sequence: int, size_bytes: int, utc: Callable[[], str]
    ) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._sequence = sequence
        self._size_bytes = size_bytes
        self._utc = utc
        self._next = _Batch(path)
        self._writing = anyio.Lock(fast_acquire=True)
        self._broken: str | None = None

    @classmethod
    async def create(cls, path: Path, *, utc: Callable[[], str]) -> Self:
        """Begin a ledger; the empty file is durable when this returns.

        :raises RefusedError: ``file_exists``.
        :raises DiskUnusable: there is no ledger, or an empty one.
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
        """Add one record; it is durable when this returns, and not there when this raises.

        Once begun it is carried through although the caller is cancelled: an intent without its
        effect does no harm.

        :raises DiskUnusable: the record must be taken as not written.
        :raises RefusedError: ``record_invalid``, ``record_too_large``, ``ledger_full`` or
            ``ledger_closed``.
        """
        body = encode_body(self._utc(), kind, data)
        batch = self._next
        batch.bodies.append(body)
        with anyio.CancelScope(shield=True):
            async with self._writing:
                if not batch.is_done:
                    self._next = _Batch(self.path)
                    await self._commit(batch)
        if batch.error is not None:
            raise batch.error

    async def close(self) -> None:
        """Wait for appends under way and let go of the file; idempotent."""
        with anyio.CancelScope(shield=True):
            async with self._writing:
                if self._descriptor is not None:
                    os.close(self._descriptor)
                    self._descriptor = None

    async def _commit(self, batch: _Batch) -> None:
        batch.is_done = True
        try:
            await on_disk(self._write, batch.bodies)
        except ForgeError as error:
            batch.error = error
        else:
            batch.error = None

    def _write(self, bodies: list[bytes]) -> None:
        if self._descriptor is None:
            raise RefusedError(f"cannot append to {self.path}: closed", code="ledger_closed")
        if self._broken is not None:
            raise DiskUnusable(
                f"cannot append to {self.path}: an earlier sync failed: {self._broken}"
            )
        lines = b"".join(
            complete_line(sequence, body)
            for sequence, body in enumerate(bodies, self._sequence + 1)
        )
        if self._size_bytes + len(lines) > MAX_LEDGER_BYTES:
            raise RefusedError(
                f"cannot append to {self.path}: it would exceed {MAX_LEDGER_BYTES} bytes",
                code="ledger_full",
            )
        with disk_errors("append to", self.path):
            self._write_lines(self._descriptor, lines)
        self._sequence += len(bodies)
        self._size_bytes += len(lines)

    def _write_lines(self, descriptor: int, lines: bytes) -> None:
        try:
            write_all(descriptor, lines)
        except OSError as error:
            self._undo(descriptor, error)
            raise
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            self._broken = str(error.strerror)
            with suppress(OSError):
                os.ftruncate(descriptor, self._size_bytes)
            raise

    def _undo(self, descriptor: int, cause: OSError) -> None:
        """Cut off what a failed write left, so that nobody takes the next record for its end."""
        try:
            os.ftruncate(descriptor, self._size_bytes)
        except OSError:
            self._broken = str(cause.strerror)


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
            raise
        return descriptor


def _reopen(path: Path) -> tuple[int, LedgerContents]:
    contents = read_ledger(path)
    if contents.suspect is not None:
        raise RefusedError(f"cannot go on with {path}: {contents.suspect}", code="ledger_suspect")
    with disk_errors("open", path):
        descriptor = os.open(path, _OPEN_FLAGS)
        try:
            if contents.torn_tail:
                os.ftruncate(descriptor, contents.good_bytes)
                os.fdatasync(descriptor)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor, contents
