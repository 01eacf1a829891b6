"""SignalR's JSON hub protocol: one record in, one typed message out, for both ends.

The message classes and their field mapping are pysignalr's; around them stands what a daemon
needs that talks to a peer of another version, or to one that lies: unknown fields and unknown
record types are set aside, ill-typed ones are named, only a broken framing is an error.
Encoding is strict: UTF-8 without escapes, no NaN, no infinity.

Protocol: https://github.com/dotnet/aspnetcore/blob/main/src/SignalR/docs/specs/HubProtocol.md
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any

import orjson
from pysignalr.messages import CloseMessage, HandshakeResponseMessage, Message, MessageType
from pysignalr.protocol.json import JSONProtocol

from forge_core.errors import RefusedError

_PROTOCOL = JSONProtocol()
SEPARATOR = _PROTOCOL.record_separator.encode()

_STRICT = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
_ID = (str,)
_OPTIONAL_TEXT = (str, NoneType)
# Record type → the fields that we read and what they may hold; absent counts as null.
_FIELDS: dict[int, dict[str, tuple[type, ...]]] = {
    1: {"invocationId": _OPTIONAL_TEXT, "target": (str,), "arguments": (list,)},
    2: {"invocationId": _ID, "item": (object,)},
    3: {"invocationId": _ID, "result": (object,), "error": _OPTIONAL_TEXT},
    4: {"invocationId": _ID, "target": (str,), "arguments": (list,)},
    5: {"invocationId": _ID},
    6: {},
    7: {"error": _OPTIONAL_TEXT, "allowReconnect": (bool, NoneType)},
}


class FramingError(Exception):
    """The bytes cannot be cut into records: nothing after them can be trusted."""


@dataclass(frozen=True, slots=True)
class MalformedRecord:
    """One record that is no message; its neighbours are unharmed."""

    reason: str


@dataclass(frozen=True, slots=True)
class UnknownRecord:
    """A record of a type that a later version of the protocol may define."""

    type: int


Decoded = Message | MalformedRecord | UnknownRecord


def encode(message: Message) -> bytes:
    """Return a message as one record, separator included.

    :raises RefusedError: code ``not_encodable``: NaN or infinity, an integer beyond 64 bits, a
        lone surrogate, or a type that JSON does not know.
    """
    fields = _close_fields(message) if isinstance(message, CloseMessage) else message.dump()
    try:
        record = orjson.dumps(fields, option=_STRICT)
    except orjson.JSONEncodeError as error:
        raise RefusedError(
            f"cannot encode a SignalR message: {error}", code="not_encodable"
        ) from error
    # orjson writes NaN and infinity as null: a wrong value instead of an error.
    if b"null" in record:
        _refuse_non_finite(fields)
    return record + SEPARATOR


def _close_fields(message: CloseMessage) -> dict[str, Any]:
    # pysignalr's own dump writes the attribute's name, allow_reconnect, which no client reads.
    fields: dict[str, Any] = {"type": MessageType.close}
    if message.error is not None:
        fields["error"] = message.error
    if message.allow_reconnect:
        fields["allowReconnect"] = True
    return fields


def _refuse_non_finite(fields: dict[str, Any]) -> None:
    rest: list[Any] = [fields]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list | tuple):
            rest.extend(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise RefusedError(
                f"cannot encode a SignalR message: {value} is no JSON number", code="not_encodable"
            )


def split_records(frame: bytes, *, max_record_bytes: int) -> list[bytes]:
    """Cut one WebSocket message into records, separators removed.

    A record never spans WebSocket messages; one message may hold several records.

    :raises FramingError: the last record is not terminated, or one is longer than
        ``max_record_bytes`` with its separator.
    """
    if not frame.endswith(SEPARATOR):
        raise FramingError("a record is not terminated by its separator")
    records = frame[:-1].split(SEPARATOR)
    longest = max(map(len, records)) + len(SEPARATOR)
    if longest > max_record_bytes:
        raise FramingError(f"a message of {longest} bytes is over the {max_record_bytes} accepted")
    return records


def decode(record: bytes) -> Decoded:
    """Return what one record says; never raises on what a peer may send."""
    try:
        fields = orjson.loads(record)
    except orjson.JSONDecodeError as error:
        return MalformedRecord(f"not JSON: {error.msg}")
    if not isinstance(fields, dict):
        return MalformedRecord("not a JSON object")
    kind = fields.get("type")
    if type(kind) is not int:
        return MalformedRecord("without an integer type")
    known = _FIELDS.get(kind)
    if known is None:
        return UnknownRecord(kind)
    values: dict[str, Any] = {"type": kind}
    for name, types in known.items():
        value = fields.get(name)
        if not isinstance(value, types):
            return MalformedRecord(f"{name} of a record of type {kind} is missing or ill-typed")
        if name in fields or object in types:
            values[name] = value
    return _PROTOCOL.parse_message(values)


def decode_frame(frame: bytes, *, max_record_bytes: int) -> Iterator[Decoded]:
    """Yield what each record of one WebSocket message says; see :func:`split_records`."""
    return map(decode, split_records(frame, max_record_bytes=max_record_bytes))


def handshake_request() -> bytes:
    """The first record that a client sends."""
    return _PROTOCOL.encode(_PROTOCOL.handshake_message()).encode()


def is_handshake_request(record: bytes) -> bool:
    """Whether a client asks for the protocol that we speak: JSON, version 1."""
    try:
        fields = orjson.loads(record)
    except orjson.JSONDecodeError:
        return False
    return (
        isinstance(fields, dict)
        and fields.get("protocol") == _PROTOCOL.protocol
        and fields.get("version") == _PROTOCOL.version
    )


def handshake_response(error: str | None = None) -> bytes:
    """The first record that a server sends; an error ends the connection."""
    return orjson.dumps({} if error is None else {"error": error}) + SEPARATOR


def decode_handshake_response(record: bytes) -> HandshakeResponseMessage:
    """Read the server's first record.

    :raises FramingError: the record is no handshake response.
    """
    try:
        fields = orjson.loads(record)
    except orjson.JSONDecodeError as error:
        raise FramingError(f"the handshake response is not JSON: {error.msg}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("error"), str | NoneType):
        raise FramingError("the handshake response is no JSON object with an error text")
    if "type" in fields:
        raise FramingError("a message came before the handshake response")
    return HandshakeResponseMessage(error=fields.get("error"))
