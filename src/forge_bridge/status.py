"""What the running bridge says about itself to ``forge-bridge status``.

The bridge rewrites ``<state root>/status.json`` while it runs; readers work without it.  The
file is a convenience, not a record: it is replaced atomically and never synced, and a reader
believes it only while the process that wrote it is provably still there.
"""

from __future__ import annotations

import json
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from forge_core.connection import ConnectionPhase
from forge_core.errors import RefusedError
from forge_core.resources import ResourceCapacity, ResourceVector
from forge_core.wire.base import Count, Id, Name, Text, Timestamp, WireModel, parse
from forge_core.wire.codes import ReservationState, RunnerState
from forge_core.wire.shapes import DiskState, HeartbeatAttempt
from forge_edges.durable_file import read_file

STATUS_FILE: Final = "status.json"
STALE_AFTER_MS: Final = 30_000
MAX_STATUS_BYTES: Final = 1_048_576
MAX_ATTEMPTS: Final = 1024


class Liveness(StrEnum):
    """How much a status is worth."""

    RUNNING = "running"
    STALE = "stale"
    """The process is there and has not written for :data:`STALE_AFTER_MS`."""
    NOT_RUNNING = "not_running"


class Side(StrEnum):
    """Who drains a runner (B-87)."""

    HOST = "host"
    """The operator, with ``forge-bridge drain``."""
    HUB = "hub"
    """Whoever changed the Profile Settings."""


class BridgeStatus(WireModel):
    """The bridge as it saw itself when it wrote this; times as the wire has them.

    ``process`` identifies the writer beyond its pid, which the system uses again;
    ``written_boot_ms`` is CLOCK_BOOTTIME in milliseconds.
    """

    version: Name
    pid: Annotated[int, Field(strict=True, ge=1)]
    process: Name
    runner_id: Id
    runner_instance_id: Id
    state: RunnerState
    drained_by: tuple[Side, ...] = ()
    connection: ConnectionPhase
    connection_since: Timestamp
    started_at: Timestamp
    reserved_count: Count
    starting_count: Count
    active_count: Count
    degraded_reservation_count: Count
    used_resources: ResourceVector
    resource_capacity: ResourceCapacity
    disk: DiskState | None = None
    pending_reports: Count
    attempts: Annotated[tuple[HeartbeatAttempt, ...], Field(max_length=MAX_ATTEMPTS)] = ()
    ended: dict[str, Count] = Field(default_factory=dict)
    engine_away: Text | None = None
    parts_unseen: dict[str, Text] = Field(default_factory=dict)
    last_error: Text | None = None
    written_at: Timestamp
    written_boot_ms: Count

    @property
    def is_drained(self) -> bool:
        """The bridge knows that its host drains, and holds nothing that will still run (B-87).

        What resists its removal is no reason to wait: a restart tries again as well.
        """
        held = self.reserved_count + self.starting_count + self.active_count
        releasing = any(a.state is ReservationState.RELEASING for a in self.attempts)
        return Side.HOST in self.drained_by and held == 0 and not releasing


def process_identity(pid: int) -> str | None:
    """Boot id and start time of a process (proc(5)); None when there is no such process.

    A pid alone may belong to another process by now; this pair never comes again.
    """
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses.
    after_name = line.rpartition(b")")[2].split()
    if after_name[0] in {b"Z", b"X"}:
        return None
    return f"{boot_id}:{after_name[19].decode()}"


def write_status(state_root: Path, status: BridgeStatus) -> None:
    """Replace the status file; blocks for one small write.

    The name of the draft is fixed, so that a crash leaves at most one behind: the state root has
    one bridge, and that is the only writer.

    :raises OSError: the state root is not writable or full; the old file stays as it was.
    """
    draft = state_root / f".{STATUS_FILE}.draft"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(draft, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(status.model_dump_json(by_alias=True, exclude_none=True))
    draft.replace(state_root / STATUS_FILE)


def read_status(state_root: Path) -> BridgeStatus | None:
    """The last status that was written; None when there is none.

    :raises RefusedError: it is unreadable (``path_refused``) or not a status (``malformed``).
    :raises DiskUnusable: the disk did not answer.
    """
    path = state_root / STATUS_FILE
    try:
        content = read_file(path, MAX_STATUS_BYTES)
        payload = json.loads(content)
    except RefusedError as error:
        if error.code == "file_missing":
            return None
        raise
    except (ValueError, RecursionError):
        raise RefusedError(f"cannot read {path}: it is not JSON", code="malformed") from None
    return parse(BridgeStatus, payload, what=str(path))


def liveness(status: BridgeStatus, now_boot_ms: int | None = None) -> tuple[Liveness, int]:
    """Whether the writer still runs, and the age of what it wrote in milliseconds."""
    now_ms = boot_ms() if now_boot_ms is None else now_boot_ms
    age_ms = max(0, now_ms - status.written_boot_ms)
    if process_identity(status.pid) != status.process:
        return Liveness.NOT_RUNNING, age_ms
    return (Liveness.STALE if age_ms > STALE_AFTER_MS else Liveness.RUNNING), age_ms


def boot_ms() -> int:
    """CLOCK_BOOTTIME in milliseconds; also right across a suspend."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
