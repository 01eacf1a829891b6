"""The size bound of the wire, and what is done to stay under it (protocol.md, Size).

An ASP.NET Core hub drops the connection, silently, on a client message over 32 KiB; so
one function measures every message, and everything that could be larger is cut or split here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from forge_core.errors import RefusedError
from forge_core.wire.base import WireModel
from forge_core.wire.events import Inventory
from forge_core.wire.from_bridge import Heartbeat, SubmitCleanupReport

MAX_MESSAGE_BYTES: Final = 30_000
MAX_INBOUND_BYTES: Final = 1_048_576
_ENVELOPE_BYTES: Final = 160
"""Room for the invocation around the argument: type, invocation id, target, separator."""

MAX_LOG_TEXT_BYTES: Final = 16_384
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
    """The longest prefix of at most ``max_bytes`` of JSON-encoded UTF-8, and whether it was cut."""
    if _json_bytes(text) <= max_bytes:
        return text, False
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if _json_bytes(text[:middle]) <= max_bytes:
            low = middle
        else:
            high = middle - 1
    return text[:low], True


def split_text(text: str, max_bytes: int = MAX_LOG_TEXT_BYTES) -> tuple[str, ...]:
    """``text`` in pieces that each fit; nothing is lost."""
    pieces = []
    while text:
        piece, _ = cut_text(text, max_bytes)
        assert piece, "max_bytes is smaller than one character"
        pieces.append(piece)
        text = text[len(piece) :]
    return tuple(pieces)


def split_cleanup_report(report: SubmitCleanupReport) -> tuple[SubmitCleanupReport, ...]:
    """The report as numbered parts; a small one is one part of one."""
    empty = measured_size_bytes(report.model_copy(update={"resources": ()}).to_wire()) + 32
    groups = _pack(report.resources, MAX_MESSAGE_BYTES - empty)
    return tuple(
        report.model_copy(update={"resources": group, "part": n, "parts": len(groups)})
        for n, group in enumerate(groups, 1)
    )


def split_inventory(inventory: Inventory) -> tuple[Inventory, ...]:
    """The inventory as numbered parts, each small enough for one event."""
    kinds = ("containers", "networks", "volumes", "ports")
    tagged = [_Tagged(kind, item) for kind in kinds for item in getattr(inventory, kind)]
    groups = _pack(tagged, MAX_MESSAGE_BYTES - 2_000)
    parts = []
    for n, group in enumerate(groups, 1):
        chosen = {kind: tuple(t.item for t in group if t.kind == kind) for kind in kinds}
        parts.append(Inventory(**chosen, part=n, parts=len(groups)))
    return tuple(parts)


def fit_heartbeat(heartbeat: Heartbeat) -> Heartbeat:
    """Keep the newest attempts that fit (the list is oldest first) and say so."""
    room = MAX_MESSAGE_BYTES - measured_size_bytes(
        heartbeat.model_copy(update={"attempts": (), "attempts_truncated": False}).to_wire()
    )
    kept: list[Any] = []
    for attempt in reversed(heartbeat.attempts):
        room -= _item_bytes(attempt)
        if room < 0:
            break
        kept.append(attempt)
    truncated = len(kept) < len(heartbeat.attempts)
    return heartbeat.model_copy(
        update={"attempts": tuple(reversed(kept)), "attempts_truncated": truncated}
    )


class _Tagged(WireModel):
    kind: str
    item: Any

    def __init__(self, kind: str, item: WireModel) -> None:
        super().__init__(kind=kind, item=item)


def _item_bytes(item: object) -> int:
    value = item.item if isinstance(item, _Tagged) else item
    assert isinstance(value, WireModel)
    return measured_size_bytes(value.to_wire()) - _ENVELOPE_BYTES + 1


def _pack(items: Sequence[Item], room: int) -> list[tuple[Item, ...]]:
    """Fill groups in order; a single item is bounded by its model well below ``room``."""
    groups: list[tuple[Item, ...]] = []
    current: list[Item] = []
    used = 0
    for item in items:
        size = _item_bytes(item)
        if current and used + size > room:
            groups.append(tuple(current))
            current, used = [], 0
        current.append(item)
        used += size
    if current or not groups:
        groups.append(tuple(current))
    return groups


def _json_bytes(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")) - 2
