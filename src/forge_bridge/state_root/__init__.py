"""Everything durable of a runner: the tree on disk, and the order of writes.

::

    <state root>/                        mode 0700, owned by the service account
      runner.json                        the stable runner id, created once
      state-root.lock                    flock: who uses this tree; content: pid, instance, since
      engine-<engine id>.lock            flock: who owns the Docker engine; content likewise
      attempts/
        <attempt id>.<fence>.ledger      one sealed JSON record a line, appended and synced
        <attempt id>.<fence>.suspect     a ledger that cannot be believed; 200 files, 30 days
      outbox/
        <created>-<id>.json              results, publications, events, … not acknowledged yet
        *.suspect                        a damaged message; 200 files, 30 days
        rejected/                        what the hub has refused for good; 500 files, 30 days
      cleanup-reports/
        <report id>.json                 reports not acknowledged yet
        *.suspect  rejected/             as in outbox/
      repositories/                      bare stores of commits
      images/
        <image key>.json                 an image that has passed its gates; sealed
        *.suspect                        a damaged record; 200 files, 30 days
      build-logs/<image key>/
        <stage>.log                      why a stage failed; masked, 1 MiB
      attestations/<image key>/          bill of materials, scan, signed provenance: a set
      host/                              directories of attempts on the host, and whose they are
      build-work/                        of builder and gate tools; wiped at each start

Order: the ledger's record is durable before the effect that it announces, and what was found
without a ledger gets one before it is removed; a message is durable before it is sent; a report
is durable before the hub hears of it; the ledger of a dispatch goes last, after everything of it
was observed gone and its messages are in the outbox.  The attestations of an image are durable
before its record, and without its record no image is used.

Files are 0600 and are replaced whole (:mod:`forge_edges.durable_file`).  ``.tmp-*`` files are
writes that a crash cut short; whoever takes the locks sweeps them away.  Ledgers are bounded by
the runner's slots, the outbox by :mod:`forge_core.outbox`, logs and attestations by
:mod:`forge_core.image_retention`, and the records of images by the images themselves.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final, Self

import structlog

from forge_bridge.state_root.directory import prepare_part, prepare_root
from forge_bridge.state_root.drain import is_drained
from forge_bridge.state_root.evidence import EvidenceStore
from forge_bridge.state_root.images import ImageIndex
from forge_bridge.state_root.ledgers import LedgerStore
from forge_bridge.state_root.locks import EngineLock, EngineLockHeld, probe_locks, take_locks
from forge_bridge.state_root.messages import MessageStore
from forge_core.errors import RefusedError
from forge_core.ports import Clock
from forge_core.wire.base import ID_PATTERN
from forge_edges.durable_file import create_file, on_disk, read_file, sweep_temporary_files

__all__ = ["EngineLock", "EngineLockHeld", "StateRoot"]

_WRITTEN_HERE: Final = (
    "attempts",
    "outbox",
    "outbox/rejected",
    "cleanup-reports",
    "cleanup-reports/rejected",
    "images",
    "host",
)
_OTHERS: Final = ("build-logs", "attestations", "build-work", "repositories")
_COMMAND_S: Final = 60
_MAX_RUNNER_FILE_BYTES: Final = 4_096

logger = structlog.get_logger(__name__)


class StateRoot:
    """An opened state root.

    :ivar runner_id: the stable identity of this host towards the hub.
    :ivar ledgers: ``attempts/``.
    :ivar messages: ``outbox/`` and ``cleanup-reports/``.
    :ivar repositories: the directory of the bare stores.
    :ivar images: ``images/``; ``build_logs`` and ``attestations`` likewise.
    :ivar build_work: the directory in which builder and gate tools work.
    :ivar host: that of attempts on the host.
    """

    def __init__(self, path: Path, runner_id: str, clock: Clock) -> None:
        self.path = path
        self.runner_id = runner_id
        self.ledgers = LedgerStore(path / "attempts", clock.utc)
        self.messages = MessageStore(path / "outbox", path / "cleanup-reports")
        self.repositories = path / "repositories"
        self.images = ImageIndex(path / "images")
        self.build_logs = EvidenceStore(path / "build-logs")
        self.attestations = EvidenceStore(path / "attestations")
        self.build_work = path / "build-work"
        self.host = path / "host"
        self._clock = clock

    @classmethod
    async def open(cls, path: Path, *, clock: Clock, runner_id: str | None = None) -> Self:
        """Make what is missing and check what is there; takes no lock.

        :param runner_id: ``FORGE_RUNNER_ID``; it wins over ``runner.json``.
        :raises RefusedError: ``state_root_unfit`` or ``runner_file_damaged``, with the remedy.
        :raises DiskUnusable: the disk is full, read-only or broken.
        """
        stable_id = await on_disk(_open, path, clock, runner_id)
        return cls(path, stable_id, clock)

    @classmethod
    async def find(cls, path: Path, *, clock: Clock, runner_id: str | None = None) -> Self | None:
        """What is there, for a reader: makes nothing; None when no runner ever lived there.

        :raises RefusedError: code ``runner_file_damaged``.
        """
        try:
            raw = await on_disk(read_file, path / "runner.json", _MAX_RUNNER_FILE_BYTES)
        except RefusedError as error:
            if error.code != "file_missing":
                raise
            return None if runner_id is None else cls(path, runner_id, clock)
        return cls(path, runner_id or _runner_id_in(raw, path / "runner.json"), clock)

    async def acquire_engine_lock(
        self, engine_id: str, runner_id: str, *, instance_id: str
    ) -> EngineLock:
        """Become the only process that acts for this runner id on this engine; does not wait.

        What a crash left half-written is swept away, and the bounds on what was set aside are
        held: only the owner may do either.

        :raises EngineLockHeld: another process has it (exit status 75).
        """
        lock = await on_disk(
            take_locks,
            self.path,
            engine_id=engine_id,
            runner_id=runner_id,
            instance_id=instance_id,
            since=self._clock.utc(),
        )
        try:
            await on_disk(self._tidy)
        except BaseException:
            lock.release()
            raise
        return lock

    async def require_unowned(self, engine_id: str | None = None) -> None:
        """Find out whether somebody owns this state root or, where named, the engine or runner id.

        Leaves nothing behind, and promises nothing for later: that is what the lock is for.

        :raises EngineLockHeld: a process does.
        """
        await on_disk(probe_locks, self.path, engine_id=engine_id, runner_id=self.runner_id)

    async def is_drained(self) -> bool:
        """Whether the operator drains this host (:mod:`forge_bridge.state_root.drain`)."""
        return await on_disk(is_drained, self.path)

    def _tidy(self) -> None:
        swept = sum(sweep_temporary_files(self.path / part) for part in _WRITTEN_HERE)
        # Commands that take no lock write here too (B-40), and never for as long as this.
        swept += sweep_temporary_files(self.path, min_age_s=_COMMAND_S)
        if swept:
            logger.info("swept away unfinished writes of an earlier process", files=swept)
        for part in (self.ledgers, self.messages, self.images, self.build_logs, self.attestations):
            part.tidy()


def _open(path: Path, clock: Clock, override: str | None) -> str:
    prepare_root(path)
    for part in (*_WRITTEN_HERE, *_OTHERS):
        prepare_part(path / part)
    return override or _stable_runner_id(path / "runner.json", clock)


def _stable_runner_id(path: Path, clock: Clock) -> str:
    try:
        raw = read_file(path, _MAX_RUNNER_FILE_BYTES)
    except RefusedError as error:
        if error.code != "file_missing":
            raise
        fresh = {"runnerId": clock.new_id(), "createdAt": clock.utc()}
        raw = json.dumps(fresh).encode() + b"\n"
        try:
            create_file(path, raw)
        except RefusedError as lost_race:
            if lost_race.code != "file_exists":
                raise
            raw = read_file(path, _MAX_RUNNER_FILE_BYTES)
    return _runner_id_in(raw, path)


def _runner_id_in(raw: bytes, path: Path) -> str:
    try:
        runner_id = json.loads(raw)["runnerId"]
        if re.match(ID_PATTERN, runner_id):
            return str(runner_id)
    except (ValueError, KeyError, TypeError):
        pass
    raise RefusedError(
        f"cannot read the runner id in {path}: what it labelled would never be cleaned up under"
        " another one; set FORGE_RUNNER_ID to the id that the hub shows for this host, or remove"
        " the file to become a new runner",
        code="runner_file_damaged",
    )
