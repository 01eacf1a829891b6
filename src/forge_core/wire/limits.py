"""The size bound of the wire, and what is done to stay under it (protocol.md, Size).

An ASP.NET Core hub drops the connection, silently, on a client message over 32 KiB; so
one function measures every message, and everything that could be larger is cut or split here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from forge_core.errors import RefusedError
from forge_core.wire.base import WireModel, well_formed
from forge_core.wire.events import Inventory, SecretsRedeemed, Warning_
from forge_core.wire.from_bridge import Heartbeat, SubmitCleanupReport
from forge_core.wire.shapes import RemovedResource

MAX_MESSAGE_BYTES: Final = 30_000
MAX_INBOUND_BYTES: Final = 1_048_576
_SHORT_ESCAPES: Final = b'"\\\b\f\n\r\t'
_LONG_ESCAPES: Final = bytes(set(range(0x20)) - set(_SHORT_ESCAPES))
_ENVELOPE_BYTES: Final = 160
"""Room for the invocation around the argument: type, invocation id, target, separator."""

MAX_LOG_TEXT_BYTES: Final = 16_384
MAX_WARNING_BYTES: Final = 8_000
MAX_REMOVAL_DETAIL_BYTES: Final = 1_000
"""So that a thousand of them fit into one record of a ledger (forge_core.ledger)."""

_EVENT_BYTES: Final = 2_000
"""Room for what surrounds the payload of an event: at most two ids of 128 characters."""

Item = TypeVar("Item")


def measured_size_bytes(payload: dict[str, Any]) -> int:
    """The encoded size of one message with this argument, envelope included."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode("utf-8", "surrogatepass")) + _ENVELOPE_BYTES


def require_fits(method: str, payload: dict[str, Any]) -> None:
    """Refuse a message that an ASP.NET Core hub would drop.

    :raises RefusedError: code ``message_too_large``.
    """
    size = measured_size_bytes(payload)
    if size > MAX_MESSAGE_BYTES:
        raise RefusedError(
            f"cannot send {method}: it has {size} bytes, {MAX_MESSAGE_BYTES} is the most",
            code="message_too_large",
        )


def cut_text(text: str, max_bytes: int) -> tuple[str, bool]:
    """The longest prefix of at most ``max_bytes`` of JSON-encoded UTF-8, and whether it was cut.

    What no UTF-8 encoder accepts is replaced, so that the text can be sent.
    """
    head = well_formed(text[:max_bytes])
    if len(text) <= max_bytes and _json_bytes(head) <= max_bytes:
        return head, False
    low, high = 0, len(head)
    while low < high:
        middle = (low + high + 1) // 2
        if _json_bytes(head[:middle]) <= max_bytes:
            low = middle
        else:
            high = middle - 1
    return head[:low], True


def split_text(text: str, max_bytes: int = MAX_LOG_TEXT_BYTES) -> tuple[str, ...]:
    """``text`` in pieces that each fit; nothing is lost."""
    text = well_formed(text)
    pieces, start = [], 0
    while start < len(text):
        piece, _ = cut_text(text[start : start + max_bytes], max_bytes)
        assert piece, "max_bytes is smaller than one character"
        pieces.append(piece)
        start += len(piece)
    return tuple(pieces)


def fitting_payloads(payload: WireModel) -> tuple[WireModel, ...]:
    """The payload of an event as payloads that each fit into one; only a warning is cut."""
    match payload:
        case Inventory():
            return split_inventory(payload)
        case SecretsRedeemed(names=names):
            groups = _pack(names, MAX_MESSAGE_BYTES - _EVENT_BYTES, _name_bytes)
            return tuple(SecretsRedeemed(names=group) for group in groups)
        case Warning_(detail=detail):
            return (payload.model_copy(update={"detail": cut_text(detail, MAX_WARNING_BYTES)[0]}),)
        case _:
            return (payload,)


def cut_detail(resource: RemovedResource) -> RemovedResource:
    """The resource with a ``detail`` that leaves room for others."""
    if resource.detail is None:
        return resource
    detail, _ = cut_text(resource.detail, MAX_REMOVAL_DETAIL_BYTES)
    return resource.model_copy(update={"detail": detail})


def split_cleanup_report(report: SubmitCleanupReport) -> tuple[SubmitCleanupReport, ...]:
    """The report as numbered parts; a small one is one part of one."""
    resources = tuple(cut_detail(resource) for resource in report.resources)
    whole = report.model_copy(update={"resources": resources, "part": 1, "parts": 1})
    if measured_size_bytes(whole.to_wire()) <= MAX_MESSAGE_BYTES:
        return (whole,)
    empty = measured_size_bytes(report.model_copy(update={"resources": ()}).to_wire()) + 32
    groups = _pack(resources, MAX_MESSAGE_BYTES - empty, _model_bytes)
    return tuple(
        report.model_copy(update={"resources": group, "part": n, "parts": len(groups)})
        for n, group in enumerate(groups, 1)
    )


def split_inventory(inventory: Inventory) -> tuple[Inventory, ...]:
    """The inventory as numbered parts, each small enough for one event."""
    kinds = ("containers", "networks", "volumes", "ports")
    items = [(kind, item) for kind in kinds for item in getattr(inventory, kind)]
    groups = _pack(items, MAX_MESSAGE_BYTES - _EVENT_BYTES, lambda item: _model_bytes(item[1]))
    parts = []
    for n, group in enumerate(groups, 1):
        chosen = {kind: tuple(item for k, item in group if k == kind) for kind in kinds}
        parts.append(Inventory(**chosen, part=n, parts=len(groups)))
    return tuple(parts)


def fit_heartbeat(heartbeat: Heartbeat) -> Heartbeat:
    """Keep the newest attempts that fit (the list is oldest first) and say so."""
    room = MAX_MESSAGE_BYTES - measured_size_bytes(
        heartbeat.model_copy(update={"attempts": (), "attempts_truncated": False}).to_wire()
    )
    kept: list[Any] = []
    for attempt in reversed(heartbeat.attempts):
        room -= _model_bytes(attempt)
        if room < 0:
            break
        kept.append(attempt)
    truncated = len(kept) < len(heartbeat.attempts)
    return heartbeat.model_copy(
        update={"attempts": tuple(reversed(kept)), "attempts_truncated": truncated}
    )


def _model_bytes(item: WireModel) -> int:
    return measured_size_bytes(item.to_wire()) - _ENVELOPE_BYTES + 1


def _name_bytes(name: str) -> int:
    return _json_bytes(name) + 3


def _pack(
    items: Sequence[Item], room: int, size_of: Callable[[Item], int]
) -> list[tuple[Item, ...]]:
    """Fill groups in order; a single item is bounded by its model well below ``room``."""
    groups: list[tuple[Item, ...]] = []
    current: list[Item] = []
    used = 0
    for item in items:
        size = size_of(item)
        if current and used + size > room:
            groups.append(tuple(current))
            current, used = [], 0
        current.append(item)
        used += size
    if current or not groups:
        groups.append(tuple(current))
    return groups


def _json_bytes(text: str) -> int:
    """The size of ``text`` as a JSON string without its quotes (RFC 8259, section 7)."""
    raw = text.encode("utf-8", "surrogatepass")
    two_bytes = len(raw) - len(raw.translate(None, _SHORT_ESCAPES))
    six_bytes = len(raw) - len(raw.translate(None, _LONG_ESCAPES))
    return len(raw) + two_bytes + 5 * six_bytes
