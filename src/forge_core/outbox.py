"""Which durable message is sent next, and what its answer means (protocol.md, What is sent again).

Each entry is in one of three states::

             on disk              taken                acknowledged, whatever the disposition
    writing ─────────▶ waiting ─────────▶ in flight ─────────────────────────────────▶ (gone)
       │ not written      ▲                  │ connection lost: at once
       ▼                  └──────────────────┘ hub error: after a backoff, boundedly often
    (gone)

* Delivery is at least once, in the order of creation, at most 32 at a time.
* Some entries form a *lane*, and of a lane only the first is ever in flight: the events of one
  dispatch go by ``sequence``, its results by ``revision``, each after the acknowledgement of the
  one before.  Results have a lane of their own, so that an event on which the hub fails does not
  hold up the outcome; in it the dispatch's publication goes first, since the hub signs off on a
  result with it.  Cleanup reports and all else wait for nobody.
* A result replaces a lower revision that is not in flight and tells the same outcome: the hub
  would let it replace that one anyway.
* An error of the hub is not an acknowledgement: the entry is tried again after 1 s … 60 s, with
  jitter.  One that has met :data:`MAX_ERRORS` of them (most of a day) is set aside, never thrown
  away.
* The backlog is bounded.  *Events yield first*: from :data:`MAX_BACKLOG` on they are refused
  when they are put, so that their sequence keeps no hole; results, publications and reports are
  refused only :data:`OUTCOME_RESERVE` entries later, and their ledgers keep them until then.
"""

from __future__ import annotations

import heapq
import re
from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from forge_core.errors import DiskUnusable, RefusedError

MAX_IN_FLIGHT: Final = 32
MAX_BACKLOG: Final = 20_000
OUTCOME_RESERVE: Final = 20_000
RETRY_MIN_MS: Final = 1_000
RETRY_MAX_MS: Final = 60_000
MAX_ERRORS: Final = 2_000

CLEANUP_REPORT: Final = "SubmitCleanupReport"
DISPATCH_EVENT: Final = "SubmitDispatchEvent"
DISPATCH_RESULT: Final = "SubmitDispatchResult"
PUBLICATION: Final = "SubmitPublication"
REPLAYED_METHODS: Final = frozenset(
    {
        CLEANUP_REPORT,
        DISPATCH_EVENT,
        DISPATCH_RESULT,
        PUBLICATION,
        "SubmitLegacyResult",
        "SubmitReapOutcome",
    }
)
_MESSAGE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")


class OutboxFull(DiskUnusable):
    """Too many messages wait for the hub; this one is not kept."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Entries that go one after the other."""

    kind: str
    attempt_id: str
    fence: int


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a durable message without its payload, which stays on disk.

    :ivar created: grows with each message of this state root, also across restarts.
    :ivar position: the place in its lane.
    :ivar verdict: of a result, what no later revision may change.
    """

    id: str
    method: str
    created: int
    lane: Lane | None = None
    position: int = 0
    verdict: tuple[str, str | None] | None = None


def entry_of(message_id: str, method: str, payload: Mapping[str, Any], created: int) -> Entry:
    """Read the order of a message out of its payload.

    :raises RefusedError: code ``malformed``; the message is none that is replayed.
    """
    if method not in REPLAYED_METHODS or _MESSAGE_ID.match(message_id) is None:
        raise RefusedError(f"cannot keep {method} {message_id!r} for replay", code="malformed")
    try:
        if method == DISPATCH_EVENT:
            lane = Lane("event", str(payload["attemptId"]), int(payload["fence"]))
            return Entry(message_id, method, created, lane, int(payload["sequence"]))
        if method == PUBLICATION:
            lane = Lane("result", str(payload["attemptId"]), int(payload["fence"]))
            return Entry(message_id, method, created, lane)
        if method == DISPATCH_RESULT:
            lane = Lane("result", str(payload["attemptId"]), int(payload["fence"]))
            failure = payload.get("failureCode")
            verdict = (str(payload["outcome"]), None if failure is None else str(failure))
            return Entry(message_id, method, created, lane, int(payload["revision"]), verdict)
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(
            f"cannot keep {method} {message_id} for replay: {error!r}", code="malformed"
        ) from error
    return Entry(message_id, method, created)


class _State(Enum):
    WRITING = "writing"
    WAITING = "waiting"
    IN_FLIGHT = "in flight"


@dataclass(slots=True, eq=False)
class _Slot:
    entry: Entry
    state: _State = _State.WRITING
    errors: int = 0
    retry_at_ms: int | None = None


def _place_in_lane(slot: _Slot) -> tuple[int, int]:
    return slot.entry.position, slot.entry.created


@dataclass(slots=True, eq=False)
class Outbox:
    """The messages that the hub has not acknowledged; performs nothing."""

    _slots: dict[str, _Slot] = field(default_factory=dict)
    _lanes: dict[Lane, list[_Slot]] = field(default_factory=dict)
    _busy_lanes: set[Lane] = field(default_factory=set)
    _ready: list[tuple[int, str]] = field(default_factory=list)
    _backing_off: list[tuple[int, str]] = field(default_factory=list)
    _superfluous: list[Entry] = field(default_factory=list)
    _in_flight: set[str] = field(default_factory=set)
    _reports: int = 0
    _last_created: int = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._slots

    @property
    def pending_reports(self) -> int:
        """Cleanup reports without their acknowledgement, as heartbeats tell it."""
        return self._reports

    def holds_result(self, attempt_id: str, fence: int) -> bool:
        """Whether a result of this dispatch waits for its acknowledgement."""
        return bool(self._lanes.get(Lane("result", attempt_id, fence)))

    @property
    def is_full(self) -> bool:
        """Whether events are refused: new work should not be taken on."""
        return len(self._slots) >= MAX_BACKLOG

    @property
    def wake_at_ms(self) -> int | None:
        """When :meth:`take` may have more to give, if nothing else happens before."""
        return self._backing_off[0][0] if self._backing_off else None

    def next_created(self, wall_clock: int) -> int:
        """``wall_clock``, or the least number that is greater than all before."""
        return max(wall_clock, self._last_created + 1)

    def load(self, entries: Iterable[Entry]) -> None:
        """Take over what an earlier process left on disk."""
        for entry in entries:
            if entry.id in self._slots:
                self._superfluous.append(entry)
            else:
                self._place(entry)
                self.written(entry.id)

    def add(self, entry: Entry) -> None:
        """Keep a place for an entry whose file is about to be written.

        :raises OutboxFull: nothing has changed.
        """
        assert entry.id not in self._slots, entry.id
        is_event = entry.method == DISPATCH_EVENT
        if len(self._slots) >= MAX_BACKLOG + (0 if is_event else OUTCOME_RESERVE):
            raise OutboxFull(
                f"cannot keep {entry.method} {entry.id}: {len(self._slots)} messages wait for the"
                " hub already"
            )
        self._place(entry)

    def written(self, message_id: str) -> None:
        """The file is durable."""
        slot = self._slots[message_id]
        assert slot.state is _State.WRITING, slot
        slot.state = _State.WAITING
        self._queue(slot)

    def not_written(self, message_id: str) -> None:
        """The file could not be made durable: the message was never put."""
        assert self._slots[message_id].state is _State.WRITING
        self._drop(message_id)

    def take(self, now_ms: int) -> tuple[Entry, ...]:
        """What is to be sent now; all of it is in flight from here on."""
        while self._backing_off and self._backing_off[0][0] <= now_ms:
            _, message_id = heapq.heappop(self._backing_off)
            slot = self._slots.get(message_id)
            if slot is not None and slot.retry_at_ms is not None and slot.retry_at_ms <= now_ms:
                slot.retry_at_ms = None
                self._queue(slot)
        taken = []
        while self._ready and len(self._in_flight) < MAX_IN_FLIGHT:
            _, message_id = heapq.heappop(self._ready)
            slot = self._slots.get(message_id)
            if slot is not None and self._may_go(slot):
                self._launch(slot)
                taken.append(slot.entry)
        return tuple(taken)

    def acknowledged(self, message_id: str) -> None:
        """The hub has it or has refused it for good; or the message cannot be sent at all."""
        self._land(message_id)
        self._drop(message_id)

    def lost(self, message_id: str) -> None:
        """Sent, outcome unknown: it goes again when its turn comes."""
        self._queue(self._land(message_id))

    def failed(self, message_id: str, now_ms: int, jitter: float) -> bool:
        """The hub answered with an error, which is no acknowledgement.

        :param jitter: uniform in [0, 1).
        :returns: whether the entry is to be set aside; it is gone from here then.
        """
        slot = self._land(message_id)
        slot.errors += 1
        if slot.errors >= MAX_ERRORS:
            self._drop(message_id)
            return True
        ceiling_ms = min(RETRY_MAX_MS, RETRY_MIN_MS << min(slot.errors, 16))
        slot.retry_at_ms = now_ms + RETRY_MIN_MS + int(jitter * (ceiling_ms - RETRY_MIN_MS))
        self._queue(slot)
        return False

    def connection_lost(self) -> None:
        """Whatever is in flight is lost."""
        for message_id in tuple(self._in_flight):
            self.lost(message_id)

    def take_superfluous(self) -> tuple[Entry, ...]:
        """Entries that others have replaced since the last call: their files can go."""
        superfluous = tuple(self._superfluous)
        self._superfluous.clear()
        return superfluous

    def _place(self, entry: Entry) -> None:
        slot = self._slots[entry.id] = _Slot(entry)
        self._last_created = max(self._last_created, entry.created)
        self._reports += entry.method == CLEANUP_REPORT
        if entry.lane is not None:
            insort(self._lanes.setdefault(entry.lane, []), slot, key=_place_in_lane)

    def _may_go(self, slot: _Slot) -> bool:
        if slot.state is not _State.WAITING or slot.retry_at_ms is not None:
            return False
        lane = slot.entry.lane
        return lane is None or (lane not in self._busy_lanes and self._lanes[lane][0] is slot)

    def _launch(self, slot: _Slot) -> None:
        slot.state = _State.IN_FLIGHT
        self._in_flight.add(slot.entry.id)
        if slot.entry.lane is not None:
            self._busy_lanes.add(slot.entry.lane)

    def _land(self, message_id: str) -> _Slot:
        slot = self._slots[message_id]
        assert slot.state is _State.IN_FLIGHT, slot
        slot.state = _State.WAITING
        self._in_flight.remove(message_id)
        if slot.entry.lane is not None:
            self._busy_lanes.remove(slot.entry.lane)
        return slot

    def _queue(self, slot: _Slot) -> None:
        """Something about this slot has changed: put what can go where :meth:`take` looks.

        An entry that may not go when it is taken is forgotten there, and comes back here when
        the head of its lane changes.
        """
        lane = slot.entry.lane
        if lane is not None:
            self._supersede(lane)
            slot = self._lanes[lane][0]
        if slot.state is _State.WAITING:
            if slot.retry_at_ms is None:
                heapq.heappush(self._ready, (slot.entry.created, slot.entry.id))
            else:
                heapq.heappush(self._backing_off, (slot.retry_at_ms, slot.entry.id))

    def _drop(self, message_id: str) -> None:
        slot = self._slots.pop(message_id)
        self._reports -= slot.entry.method == CLEANUP_REPORT
        lane = slot.entry.lane
        if lane is None:
            return
        self._lanes[lane].remove(slot)
        if self._lanes[lane]:
            self._queue(self._lanes[lane][0])
        else:
            del self._lanes[lane]

    def _supersede(self, lane: Lane) -> None:
        """Drop the results before the last durable one that tell the same and are not in flight."""
        if lane.kind != "result":
            return
        durable = [slot for slot in self._lanes[lane] if slot.state is not _State.WRITING]
        for slot in durable[:-1]:
            if slot.state is _State.WAITING and slot.entry.verdict == durable[-1].entry.verdict:
                self._superfluous.append(slot.entry)
                del self._slots[slot.entry.id]
                self._lanes[lane].remove(slot)
