"""The simulated disk below the state root, and the two stores that live on it.

Fault model: a write may find no room (ENOSPC) and leaves nothing; a sync may fail (EIO), after
which a ledger goes on in a new file; anything may take seconds.  A killed process
loses nothing that it has written; a power cut keeps of what was not synced an arbitrary prefix,
and forgets a removal that was not synced.  A replaced file is the old one or the new one, whole.

Ledgers are encoded and parsed by :mod:`forge_core.ledger`, messages by :mod:`forge_core.sealed`;
locks, modes and group commit are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import anyio

from forge_core.errors import DiskUnusable, RefusedError
from forge_core.ledger import LedgerContents, complete_line, encode_body, parse_ledger
from forge_core.outbox import CLEANUP_REPORT, Entry, entry_of
from forge_core.ports import DiskUsage
from forge_core.ready import ENDING
from forge_core.sealed import BrokenSeal, encode, seal, unseal

from .faults import Faults
from .world import World

LEDGERS: Final = "attempts/"
OUTBOX: Final = "outbox/"
REPORTS: Final = "cleanup-reports/"
REJECTED: Final = "rejected/"


class DiskWatch(Protocol):
    """Who is told what is written, and what is durable."""

    def wrote(self, path: str, data: bytes) -> None: ...
    def synced(self, path: str, data: bytes) -> None: ...


class SimulatedDisk:
    """What every life of the bridge finds again.

    :ivar files: as a process sees them.
    :ivar synced: as they are after a power cut.
    :ivar full_ledgers: they take nothing more but the end of their dispatch.
    :ivar forgotten: ledgers that were lost.
    :ivar on_written: called between the writing of a record and its sync.
    """

    def __init__(self, world: World, faults: Faults, watch: DiskWatch) -> None:
        self.files: dict[str, bytes] = {}
        self.synced: dict[str, bytes] = {}
        self.full_ledgers: set[str] = set()
        self.forgotten: set[str] = set()
        self.usage = DiskUsage(40, 50 * 2**30)
        self.on_written: Callable[[], None] = lambda: None
        self._world = world
        self._faults = faults
        self._watch = watch
        self._rng = world.rng("disk")

    def power_cut(self) -> None:
        """What was not synced may be there, in part."""
        for path in sorted({*self.files, *self.synced}):
            now, safe = self.files.get(path), self.synced.get(path)
            if now == safe:
                continue
            if now is not None and safe is not None and now.startswith(safe):
                kept = self._rng.randint(len(safe), len(now))
                self._world.note("disk", f"{path} keeps {kept - len(safe)} unsynced bytes")
                self.synced[path] = now[:kept]
            elif self._rng.random() < 0.5 and now is not None:
                self.synced[path] = now
            elif self._rng.random() < 0.5 and now is None:
                del self.synced[path]
        self.files = dict(self.synced)

    def forget_ledgers(self) -> None:
        """Somebody has removed them all."""
        for files in (self.files, self.synced):
            for path in [path for path in files if path.startswith(LEDGERS)]:
                del files[path]
                self.forgotten.add(path)

    async def replace(self, path: str, data: bytes) -> None:
        """Whole; durable when it returns.

        :raises DiskUnusable: the old content is there, or the new one.
        """
        await self._write(path, data)
        self.files[path] = data
        self._require_sync(path)
        self.synced[path] = data
        self._watch.synced(path, data)

    async def append(self, path: str, data: bytes) -> None:
        """Written, then synced.

        :raises DiskUnusable: nothing was written.
        :raises SyncFailedError: it may be there.
        """
        await self._write(path, data)
        self.files[path] = self.files.get(path, b"") + data
        self.on_written()
        await self._take_time()
        if self._rng.random() < self._faults.disk_broken:
            self.files[path] = self.files[path][: -len(data)]
            raise SyncFailedError(f"cannot append to {path}: input/output error")
        self.synced[path] = self.files[path]
        self._watch.synced(path, data)

    def require_room(self, path: str, kinds: Iterable[str]) -> None:
        """A ledger fills up at any moment; for an end there is room."""
        if self._rng.random() < self._faults.ledger_full:
            self.full_ledgers.add(path)
        if path in self.full_ledgers and ENDING.isdisjoint(kinds):
            raise RefusedError(f"cannot append to {path}: it is full", code="ledger_full")

    async def remove(self, path: str, *, synced: bool) -> None:
        """That it is gone already is success."""
        await self._take_time()
        self.full_ledgers.discard(path)
        self.files.pop(path, None)
        if synced:
            self.synced.pop(path, None)

    async def cut(self, path: str, size_bytes: int) -> None:
        """Keep the first bytes, durably."""
        await self._take_time()
        self.files[path] = self.files[path][:size_bytes]
        self._require_sync(path)
        self.synced[path] = self.files[path]
        self._watch.synced(path, self.files[path])

    async def sync_names(self, *directories: str) -> None:
        """Which files there are is durable from here on; their content was so before."""
        await self._take_time()
        for directory in directories:
            self._require_sync(directory)
            for path in [path for path in self.synced if path.startswith(directory)]:
                if path not in self.files:
                    del self.synced[path]
            for path in [path for path in self.files if path.startswith(directory)]:
                self.synced[path] = self.files[path]

    async def read(self, path: str) -> bytes:
        """The whole file."""
        await self._take_time()
        if path not in self.files:
            raise RefusedError(f"cannot read {path}: no such file", code="file_missing")
        return self.files[path]

    def names(self, directory: str, suffix: str) -> list[str]:
        """The paths right in a directory."""
        return sorted(
            path
            for path in self.files
            if path.startswith(directory)
            and path.endswith(suffix)
            and "/" not in path.removeprefix(directory)
        )

    async def usage_now(self) -> DiskUsage:
        """What admission sees."""
        await self._take_time()
        return self.usage

    def _require_sync(self, path: str) -> None:
        if self._rng.random() < self._faults.disk_broken:
            raise DiskUnusable(f"cannot sync {path}: input/output error")

    async def _write(self, path: str, data: bytes) -> None:
        await self._take_time()
        if self._rng.random() < self._faults.disk_full:
            raise DiskUnusable(f"cannot write {path}: no space left on device")
        self._watch.wrote(path, data)

    async def _take_time(self) -> None:
        slow = self._rng.random() < self._faults.disk_slow
        duration_s = self._rng.uniform(0.5, 5.0) if slow else self._rng.uniform(0.0001, 0.004)
        with anyio.CancelScope(shield=True):
            await anyio.sleep(duration_s)


class SyncFailedError(DiskUnusable):
    """Nobody knows what the file holds now."""


class WatchedDisk:
    """:class:`forge_core.ports.Disk`."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    async def usage(self) -> DiskUsage:
        """See the port."""
        return await self._disk.usage_now()


class SimulatedLedger:
    """:class:`forge_core.ports.Ledger` over one file."""

    def __init__(
        self, disk: SimulatedDisk, path: str, sequence: int, utc: Callable[[], str]
    ) -> None:
        self._disk = disk
        self._path = path
        self._sequence = sequence
        self._utc = utc
        self._broken = False
        self._one_at_a_time = anyio.Lock()

    async def append_all(self, records: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """See the port; carried through although the caller is cancelled."""
        time = self._utc()
        bodies = [encode_body(time, kind, data) for kind, data in records]
        self._disk.require_room(self._path, [kind for kind, _ in records])
        with anyio.CancelScope(shield=True):
            async with self._one_at_a_time:
                if self._broken:
                    await self._disk.replace(self._path, self._disk.synced[self._path])
                    self._broken = False
                try:
                    lines = [
                        complete_line(number, body)
                        for number, body in enumerate(bodies, self._sequence + 1)
                    ]
                    await self._disk.append(self._path, b"".join(lines))
                except SyncFailedError:
                    self._broken = True
                    raise
                self._sequence += len(bodies)


@dataclass(frozen=True, slots=True)
class StoredLedger:
    """A ledger that an earlier life left."""

    attempt_id: str
    fence: int
    contents: LedgerContents


class SimulatedLedgers:
    """What :class:`forge_bridge.state_root.ledgers.LedgerStore` does, on the simulated disk."""

    def __init__(self, disk: SimulatedDisk, utc: Callable[[], str]) -> None:
        self._disk = disk
        self._utc = utc

    async def create(self, attempt_id: str, fence: int) -> SimulatedLedger:
        """Begin one."""
        path = ledger_path(attempt_id, fence)
        if path in self._disk.files:
            raise RefusedError(f"cannot create {path}: it is there", code="file_exists")
        try:
            await self._disk.replace(path, b"")
        except DiskUnusable:
            self._disk.files.pop(path, None)
            raise
        return SimulatedLedger(self._disk, path, 0, self._utc)

    async def reopen(self, attempt_id: str, fence: int) -> SimulatedLedger:
        """Go on with one; a torn tail is cut off."""
        path = ledger_path(attempt_id, fence)
        contents = parse_ledger(await self._disk.read(path))
        if contents.suspect is not None:
            raise RefusedError(f"cannot go on with {path}", code="ledger_suspect")
        await self._disk.cut(path, contents.good_bytes)
        return SimulatedLedger(self._disk, path, len(contents.records), self._utc)

    async def read_all(self) -> tuple[StoredLedger, ...]:
        """Every ledger there is."""
        stored = []
        for path in self._disk.names(LEDGERS, ".ledger"):
            name = path.removeprefix(LEDGERS).removesuffix(".ledger")
            attempt_id, _, fence = name.rpartition(".")
            contents = parse_ledger(await self._disk.read(path))
            stored.append(StoredLedger(attempt_id, int(fence), contents))
        return tuple(stored)

    async def remove(self, attempt_id: str, fence: int) -> None:
        """For good."""
        await self._disk.remove(ledger_path(attempt_id, fence), synced=True)

    async def mark_suspect(self, attempt_id: str, fence: int) -> None:
        """Keep it under another name."""
        path = ledger_path(attempt_id, fence)
        await self._disk.replace(path.replace(".ledger", ".suspect"), self._disk.files[path])
        await self._disk.remove(path, synced=True)


class SimulatedMessages:
    """What :class:`forge_bridge.state_root.messages.MessageStore` does, on the simulated disk."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    async def load(self) -> tuple[Entry, ...]:
        """In the order of creation."""
        entries = []
        await self._disk.sync_names(OUTBOX, REPORTS)
        for path in (*self._disk.names(OUTBOX, ".json"), *self._disk.names(REPORTS, ".json")):
            try:
                content = unseal(await self._disk.read(path))
            except BrokenSeal:
                await self._disk.remove(path, synced=True)
                continue
            entries.append(
                entry_of(content["id"], content["method"], content["payload"], content["created"])
            )
        return tuple(sorted(entries, key=lambda entry: entry.created))

    async def write(self, entry: Entry, payload: Mapping[str, Any]) -> None:
        """Durable when it returns."""
        path = message_path(entry)
        try:
            await self._disk.replace(path, _sealed(entry, payload))
        except DiskUnusable:
            self._disk.files.pop(path, None)
            raise

    async def read(self, entry: Entry) -> Mapping[str, Any]:
        """As it was written."""
        payload: Mapping[str, Any] = unseal(await self._disk.read(message_path(entry)))["payload"]
        return payload

    async def remove(self, entry: Entry) -> None:
        """Not synced."""
        await self._disk.remove(message_path(entry), synced=False)

    async def set_aside(self, entry: Entry, reason: str, detail: str) -> None:
        """For the operator."""
        path = message_path(entry)
        directory, _, name = path.rpartition("/")
        content = unseal(await self._disk.read(path))
        content["rejection"] = {"reason": reason, "detail": detail}
        await self._disk.replace(f"{directory}/{REJECTED}{name}", seal(encode(content)))
        await self._disk.remove(path, synced=False)


def ledger_path(attempt_id: str, fence: int) -> str:
    """Where the ledger of a dispatch is."""
    return f"{LEDGERS}{attempt_id}.{fence}.ledger"


def message_path(entry: Entry) -> str:
    """Where a message waits."""
    if entry.method == CLEANUP_REPORT:
        return f"{REPORTS}{entry.id}.json"
    return f"{OUTBOX}{entry.created:017d}-{entry.id}.json"


def _sealed(entry: Entry, payload: Mapping[str, Any]) -> bytes:
    content = {"id": entry.id, "method": entry.method, "created": entry.created}
    return seal(encode({**content, "payload": payload}))
