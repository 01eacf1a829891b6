"""The form of a ledger: what is appended, and what is believed (storage.md, Reading a ledger).

A ledger is one sealed JSON object a line: ``sequence`` (from 1, without holes), ``time``,
``kind``, ``data``, ``checksum``.  A record exists when its whole line does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from forge_core.errors import RefusedError
from forge_core.sealed import BrokenSeal, encode, seal, unseal

MAX_RECORD_BYTES: Final = 4 * 2**20
"""The largest is a cleanup report of a thousand resources with their error texts."""

MAX_LEDGER_BYTES: Final = 64 * 2**20
ROOM_FOR_THE_END: Final = 0.25
"""The part of a ledger that only the records of an end may use (forge_core.ready.ENDING)."""

_FIELDS: Final = frozenset({"sequence", "time", "kind", "data"})


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """One line: ``time`` is the wall clock, for people."""

    sequence: int
    time: str
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LedgerContents:
    """What a ledger says.

    :ivar records: in order; of a suspect ledger, those before the first bad line.
    :ivar torn_tail: a crash during an append left part of a line, which never counted.
    :ivar suspect: why the file cannot be believed; None when it can.
    :ivar good_bytes: where the next record goes.
    """

    records: tuple[LedgerRecord, ...] = ()
    torn_tail: bool = False
    suspect: str | None = None
    good_bytes: int = 0


def encode_body(time: str, kind: str, data: Mapping[str, Any]) -> bytes:
    """A record but for its sequence, which only the moment of writing can know.

    :raises RefusedError: code ``record_invalid`` or ``record_too_large``.
    """
    try:
        body = encode({"time": time, "kind": kind, "data": data})
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError(
            f"cannot record {kind}: its data is not JSON: {error}", code="record_invalid"
        ) from error
    if len(body) > MAX_RECORD_BYTES:
        raise RefusedError(
            f"cannot record {kind}: it has {len(body)} bytes, {MAX_RECORD_BYTES} is the most",
            code="record_too_large",
        )
    return body


def complete_line(sequence: int, body: bytes) -> bytes:
    """The whole line of a body that :func:`encode_body` gave."""
    return seal(b'{"sequence":%d,' % sequence + body[1:])


def parse_ledger(raw: bytes) -> LedgerContents:
    """Read a whole ledger.

    NUL bytes at the end are room for more.  Only the last line can be torn, and it shows: it
    lacks its newline, or holds NUL bytes where blocks were never written.  Anything else that is
    bad was good once.
    """
    lines = raw.rstrip(b"\0").split(b"\n")
    tail = lines.pop()
    records: list[LedgerRecord] = []
    good_bytes = 0
    for number, line in enumerate(lines, 1):
        try:
            records.append(_record(line, number))
        except BrokenSeal as error:
            if number == len(lines) and not tail and b"\0" in line:
                return LedgerContents(tuple(records), torn_tail=True, good_bytes=good_bytes)
            reason = f"line {number}: {error}"
            return LedgerContents(tuple(records), suspect=reason, good_bytes=good_bytes)
        good_bytes += len(line) + 1
    return LedgerContents(tuple(records), torn_tail=bool(tail), good_bytes=good_bytes)


def _record(line: bytes, sequence: int) -> LedgerRecord:
    value = unseal(line)
    if value.keys() != _FIELDS or not isinstance(value["data"], dict):
        raise BrokenSeal("it is not a record")
    if value["sequence"] != sequence:
        raise BrokenSeal(f"it has sequence {value['sequence']!r}")
    return LedgerRecord(sequence, str(value["time"]), str(value["kind"]), value["data"])
