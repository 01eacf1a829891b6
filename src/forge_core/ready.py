"""Effects as data, in the order in which they must happen (architecture.md, Ready).

A core step returns ``(new state, Ready)``.  ``records`` are durable before any message leaves
and before any action runs; ``messages`` are enqueued, not delivered, so that no action ever
waits for the hub.  Durable messages are a function of the records (:func:`messages_of`): what
a crash kept from being enqueued is derived again from the ledger, under the same id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class RecordKind(StrEnum):
    """What one line of a ledger says."""

    RESERVED = "reserved"
    ORPHANED = "orphaned"
    STARTED = "started"
    INTENT = "intent"
    FACT = "fact"
    PUSH_INTENT = "push_intent"
    PUBLICATION = "publication"
    EVENT = "event"
    RESULT = "result"
    REMOVAL = "removal"
    CLEANUP_REPORT = "cleanup_report"
    RELEASED = "released"


ENDING: Final = frozenset(
    {RecordKind.PUBLICATION, RecordKind.RESULT, RecordKind.REMOVAL, RecordKind.RELEASED}
)
"""What must be told of a dispatch, and can only be told once it has happened: a ledger keeps
room for it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One durable line of the attempt's ledger."""

    kind: RecordKind
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One call of a hub method.

    ``id`` is the same whenever the same message is made again, so that the hub can tell a
    duplicate; ``durable`` messages go through the outbox, the others are sent or dropped.
    """

    id: str
    method: str
    payload: Mapping[str, Any]
    durable: bool = True


class Action:
    """Base of everything that a step wants done; each action is idempotent."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What must happen now, in this order."""

    records: tuple[Record, ...] = ()
    messages: tuple[Message, ...] = ()
    actions: tuple[Action, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.records or self.messages or self.actions)

    def then(self, other: Ready) -> Ready:
        """Both, this one first."""
        return Ready(
            self.records + other.records,
            self.messages + other.messages,
            self.actions + other.actions,
        )


def recorded(*records: Record, actions: tuple[Action, ...] = ()) -> Ready:
    """A :class:`Ready` with exactly the messages that its records imply."""
    return Ready(records, messages_of(records), actions)


def messages_of(records: Iterable[Record]) -> tuple[Message, ...]:
    """The durable messages that these records imply, in order."""
    messages = []
    for record in records:
        data = record.data
        match record.kind:
            case RecordKind.EVENT:
                messages.append(Message(data["eventId"], "SubmitDispatchEvent", data))
            case RecordKind.PUBLICATION:
                key = f"{data['attemptId']}.{data['fence']}.publication"
                messages.append(Message(key, "SubmitPublication", data))
            case RecordKind.RESULT:
                key = f"{data['attemptId']}.{data['fence']}.r{data['revision']}"
                messages.append(Message(key, "SubmitDispatchResult", data))
            case RecordKind.CLEANUP_REPORT:
                messages.append(Message(data["reportId"], "SubmitCleanupReport", data))
            case _:
                pass
    return tuple(messages)
