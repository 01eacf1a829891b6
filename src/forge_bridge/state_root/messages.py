"""``outbox/`` and ``cleanup-reports/``: what the hub has not acknowledged yet, a file a message.

A file is one sealed JSON object: ``id``, ``method``, ``created``, ``payload``.  It goes when the
hub has acknowledged it; what the hub has refused goes to ``rejected/`` beside it, with the
reason.  A damaged file becomes ``*.suspect`` and stops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

from forge_bridge.state_root.bounds import SUSPECTS, Bound, prune, set_aside
from forge_core.errors import DiskUnusable, ForgeError, RefusedError
from forge_core.outbox import CLEANUP_REPORT, Entry, entry_of
from forge_core.sealed import BrokenSeal, encode, seal, unseal
from forge_edges.durable_file import (
    SharedTrips,
    disk_errors,
    on_disk,
    read_file,
    replace_file,
    sync_directory,
)

MAX_MESSAGE_FILE_BYTES: Final = 8 * 2**20
REJECTED: Final = Bound(max_files=500, max_age_days=30)

logger = structlog.get_logger(__name__)


class MessageStore:
    """The files behind :class:`forge_core.outbox.Outbox`; every method may raise DiskUnusable."""

    def __init__(self, outbox: Path, cleanup_reports: Path) -> None:
        self._outbox = outbox
        self._cleanup_reports = cleanup_reports
        self._reads = SharedTrips(self._read)
        self._removals = SharedTrips(self._remove)

    async def load(self) -> tuple[Entry, ...]:
        """All entries in the order of creation; damaged files are set aside."""
        return await on_disk(self._load)

    async def write(self, entry: Entry, payload: Mapping[str, Any]) -> None:
        """Durable when it returns.

        :raises RefusedError: code ``message_too_large``, or ``malformed``.
        """
        await on_disk(self._write, entry, payload)

    async def read(self, entry: Entry) -> Mapping[str, Any]:
        """The payload as it was written.

        :raises RefusedError: code ``message_damaged``; the file has been set aside.
        """
        return await self._reads.call(entry)

    async def remove(self, entry: Entry) -> None:
        """Forget an acknowledged message.

        Not synced: one that comes back after a crash is sent again and is a duplicate.
        """
        await self._removals.call(entry)

    async def set_aside(self, entry: Entry, reason: str, detail: str) -> None:
        """Keep a message that is not sent any more for the operator, with the reason.

        :raises RefusedError: code ``message_damaged``.
        """
        await on_disk(self._set_aside, entry, reason, detail)

    def tidy(self) -> None:
        """Hold the bounds on what was set aside; blocks."""
        for directory in (self._outbox, self._cleanup_reports):
            prune(directory / "rejected", "*.json", REJECTED)
            prune(directory, "*.suspect", SUSPECTS)

    def _path(self, entry: Entry) -> Path:
        if entry.method == CLEANUP_REPORT:
            return self._cleanup_reports / f"{entry.id}.json"
        return self._outbox / f"{entry.created:017d}-{entry.id}.json"

    def _load(self) -> tuple[Entry, ...]:
        with disk_errors("list", self._outbox):
            # What an earlier process could not make durable counts as durable from here on.
            sync_directory(self._outbox)
            sync_directory(self._cleanup_reports)
            paths = [*self._outbox.glob("*.json"), *self._cleanup_reports.glob("*.json")]
        entries = []
        for path in paths:
            try:
                entries.append(self._entry_in(path))
            except (BrokenSeal, RefusedError) as error:
                self._suspect(path, error)
            except DiskUnusable as error:
                logger.error("leaving a message to the next start", error=str(error))
        return tuple(sorted(entries, key=lambda entry: entry.created))

    def _entry_in(self, path: Path) -> Entry:
        content = _content_of(path)
        created = content.get("created")
        if not isinstance(created, int) or created < 0:
            raise BrokenSeal("it does not say when it was created")
        message_id, method = str(content.get("id")), str(content.get("method"))
        entry = entry_of(message_id, method, content["payload"], created)
        if self._path(entry) != path:
            raise BrokenSeal("it is the file of another message")
        return entry

    def _write(self, entry: Entry, payload: Mapping[str, Any]) -> None:
        path = self._path(entry)
        try:
            body = encode(
                {
                    "id": entry.id,
                    "method": entry.method,
                    "created": entry.created,
                    "payload": payload,
                }
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise RefusedError(f"cannot write {path}: {error}", code="malformed") from error
        if len(body) > MAX_MESSAGE_FILE_BYTES:
            raise RefusedError(
                f"cannot write {path}: it would have {len(body)} bytes,"
                f" {MAX_MESSAGE_FILE_BYTES} is the most",
                code="message_too_large",
            )
        try:
            replace_file(path, seal(body))
        except DiskUnusable:
            # It may be visible all the same; the next start must not send what was never put.
            with suppress(OSError):
                path.unlink()
            raise

    def _read(self, entry: Entry) -> Mapping[str, Any]:
        payload: Mapping[str, Any] = self._content(entry)["payload"]
        return payload

    def _content(self, entry: Entry) -> dict[str, Any]:
        path = self._path(entry)
        try:
            return _content_of(path)
        except (BrokenSeal, RefusedError) as error:
            self._suspect(path, error)
            raise RefusedError(
                f"cannot read {entry.method} {entry.id}: {path} is damaged: {error}",
                code="message_damaged",
            ) from error

    def _remove(self, entry: Entry) -> None:
        path = self._path(entry)
        with disk_errors("remove", path):
            path.unlink(missing_ok=True)

    def _set_aside(self, entry: Entry, reason: str, detail: str) -> None:
        path = self._path(entry)
        content = self._content(entry) | {"rejection": {"reason": reason, "detail": detail}}
        rejected = path.parent / "rejected"
        replace_file(rejected / path.name, seal(encode(content)))
        self._remove(entry)
        prune(rejected, "*.json", REJECTED)

    def _suspect(self, path: Path, error: Exception) -> None:
        logger.error("setting a damaged message aside", path=str(path), error=str(error))
        try:
            set_aside(path)
        except ForgeError as failure:
            logger.warning("cannot set a damaged message aside", error=str(failure))


def _content_of(path: Path) -> dict[str, Any]:
    content = unseal(read_file(path, MAX_MESSAGE_FILE_BYTES * 2))
    if not isinstance(content.get("payload"), dict):
        raise BrokenSeal("it is not a message")
    return content
