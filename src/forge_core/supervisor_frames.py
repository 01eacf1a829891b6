"""The frames of PID 1 as the host reads them: claims of a hostile container.

NDJSON over the container's standard streams (sandbox.md, PID 1).  Everything is bounded and
validated; a frame that cannot be read is counted and skipped, and the host's own deadlines
decide in the end.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forge_core.lease import Deadline
from forge_core.wire.base import MAX_INT, well_formed
from forge_core.wire.codes import OutputStream
from forge_core.wire.from_hub import LeaseUpdate

MAX_FRAME_BYTES: Final = 131_072
"""A log frame carries at most 16 KiB of raw output; JSON may escape each byte sixfold."""

MAX_INIT_BYTES: Final = 1024 * 1024
"""Of the orders without their line break; PID 1 reads no longer line.  With the usual stack of
8 MiB, Linux starts programs with twice as much (execve(2), limits on the size of arguments)."""

STILL_PREPARING: Final = b"\n"
"""No frame: until it has its orders, PID 1 waits a minute more from each of these, and says again
that it is ready."""

DEADLINE_EXIT_CODES: Final = {70: Deadline.LEASE, 71: Deadline.HARD_WALL, 72: Deadline.IDLE}


@dataclass(frozen=True, slots=True)
class SupervisorReady:
    """PID 1 runs and waits for its ``init``."""


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """The agent's process runs."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Something that the agent printed, secrets not yet masked."""

    stream: OutputStream
    text: str
    dropped_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The agent's own status: exactly one of the two is set."""

    exit_code: int | None
    signal: int | None

    @property
    def in_words(self) -> str:
        """What comes after the name of who ended."""
        if self.signal is not None:
            return f"was ended by signal {self.signal}"
        return f"ended with exit code {self.exit_code}"


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """PID 1 ends everything because this deadline has passed."""

    which: Deadline


@dataclass(frozen=True, slots=True)
class FrameRefused:
    """PID 1 could not use something that the host sent."""

    reason: str
    count: int


Frame = SupervisorReady | ProcessStarted | LogChunk | ProcessEnded | DeadlinePassed | FrameRefused


class FrameReader:
    """Turns the container's stdout into frames; lines that are no frames are counted."""

    __slots__ = ("_buffer", "_overlong", "unreadable")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._overlong = False
        self.unreadable = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that ``data`` completes.  Memory stays under one frame's bound."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._append(line)
            whole, self._buffer = bytes(self._buffer), bytearray()
            overlong, self._overlong = self._overlong, False
            frame = None if overlong else _parse(whole)
            if frame is None:
                self.unreadable += 1
            else:
                yield frame
        self._append(rest)

    def _append(self, part: bytes) -> None:
        if self._overlong or len(self._buffer) + len(part) > MAX_FRAME_BYTES:
            self._overlong = True
            self._buffer.clear()
        else:
            self._buffer += part


def encode(frame: dict[str, Any]) -> bytes:
    """One line for PID 1."""
    return json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def init_frame(
    *,
    attempt_id: str,
    fence: int,
    key: bytes,
    sequence: int,
    lease_ms: int,
    hard_wall_ms: int,
    idle_ms: int,
    grace_ms: int,
    argv: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    max_output_bytes: int,
) -> bytes:
    """The orders: what to run, and the lease that it runs under.

    :param lease_ms: from when PID 1 said that it is ready.
    """
    return encode(
        {
            "type": "init",
            "attemptId": attempt_id,
            "fence": fence,
            "key": base64.b64encode(key).decode(),
            "sequence": sequence,
            "leaseMs": lease_ms,
            "hardWallMs": hard_wall_ms,
            "idleMs": idle_ms,
            "graceMs": grace_ms,
            "argv": list(argv),
            "env": dict(environment),
            "cwd": directory,
            "maxOutputBytes": max_output_bytes,
        }
    )


def lease_frame(update: LeaseUpdate) -> bytes:
    """A renewal, handed on as it came: PID 1 verifies the MAC itself."""
    return encode(
        {
            "type": "lease",
            "sequence": update.sequence,
            "ttlMs": update.ttl_ms,
            "issuedAt": update.issued_at,
            "mac": update.mac,
        }
    )


def cancel_frame(grace_ms: int) -> bytes:
    """Ask PID 1 to end the agent: TERM, the grace, KILL."""
    return encode({"type": "cancel", "graceMs": grace_ms})


def _parse(line: bytes) -> Frame | None:
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    match value.get("type"):
        case "ready":
            return SupervisorReady()
        case "started":
            return ProcessStarted()
        case "log":
            return _log(value)
        case "exit":
            return _ended(value)
        case "expired":
            which = value.get("which")
            if isinstance(which, str) and which in set(Deadline):
                return DeadlinePassed(Deadline(which))
        case "refused":
            reason, count = value.get("reason"), value.get("count")
            if isinstance(reason, str) and isinstance(count, int) and _is_count(count):
                return FrameRefused(well_formed(reason[:64]), count)
    return None


def _log(value: dict[str, Any]) -> LogChunk | None:
    stream, text, dropped = value.get("stream"), value.get("text"), value.get("droppedBytes", 0)
    if not (isinstance(stream, str) and stream in set(OutputStream)):
        return None
    if not (isinstance(text, str) and _is_count(dropped)):
        return None
    return LogChunk(OutputStream(stream), well_formed(text), dropped)


def _ended(value: dict[str, Any]) -> ProcessEnded | None:
    code, number = value.get("code"), value.get("signal")
    if (code is None) == (number is None):
        return None
    if code is not None:
        return ProcessEnded(code, None) if type(code) is int and 0 <= code <= 255 else None
    return ProcessEnded(None, number) if type(number) is int and 1 <= number <= 64 else None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT
