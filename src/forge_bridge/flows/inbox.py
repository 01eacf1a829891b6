"""The receive path of one connection: validate, queue, never wait (lifecycle.md, Connection).

What is queued outlives the connection: half a decision or half a pass would be worse than one
that nobody waits for any more.  Everything about one attempt keeps its order; different attempts
never wait for one another, nor for an answer of the hub.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from forge_bridge.flows.cancel import handle_cancel
from forge_bridge.flows.legacy import LegacyDispatches
from forge_bridge.flows.offer import Decisions, handle_offer, refuse_malformed
from forge_bridge.flows.reap import Reaper, handle_reap
from forge_bridge.flows.renew import handle_lease_update
from forge_bridge.flows.settings import apply_settings
from forge_bridge.flows.start import handle_start, handle_start_without_room, refuse_start
from forge_bridge.keyed_queue import Job, KeyedQueue
from forge_bridge.runner import Runner
from forge_core.errors import RefusedError
from forge_core.ports import BridgeConnection
from forge_core.wire.base import Model, parse
from forge_core.wire.from_hub import (
    Cancel,
    Dispatch,
    LeaseUpdate,
    Offer,
    Reap,
    RunnerSettingsChanged,
    Start,
)

logger = structlog.get_logger(__name__)

QUEUE_LIMIT: Final = 4_096
MAX_QUEUED_BYTES: Final = 32 * 2**20
"""What all messages that wait may hold, as JSON; a single one has at most a mebibyte."""

NO_ROOM: Final = f"more than {MAX_QUEUED_BYTES} bytes of the hub's messages wait already"
HELD_OFFERS: Final = 1_024
"""Until the snapshot is settled; as many as a runner can have slots."""

MAX_REASON_CHARACTERS: Final = 2_000
TOO_LONG_FOR_AN_ID: Final = 129
REAPS_WAITING: Final = 16
"""Each is a look at the whole engine; the passes of every minute do the same."""

LOGGED_COMPLAINTS: Final = 20
"""A hub that sends nonsense must not fill the log."""


@dataclass(frozen=True, slots=True)
class Queues:
    """Where what has arrived waits; they outlive the connection.

    :ivar work: everything about attempts and v1 dispatches, by attempt.
    :ivar reaps: passes that the hub asks for, one after the other.
    :ivar decisions: answers to offers.
    """

    work: KeyedQueue
    reaps: KeyedQueue
    decisions: Decisions


class Inbox:
    """Takes every client target of the wire from one connection."""

    def __init__(
        self,
        runner: Runner,
        queues: Queues,
        legacy: LegacyDispatches,
        reaper: Reaper,
    ) -> None:
        self._runner = runner
        self._queues = queues
        self._legacy = legacy
        self._reaper = reaper
        self._held: list[tuple[Offer, int]] | None = []
        self._complaints = 0

    def subscribe(self, connection: BridgeConnection) -> None:
        """Listen; offers are held back until :meth:`open`."""
        connection.on_offer(self._offer)
        connection.on_start(self._start)
        connection.on_lease_update(self._lease_update)
        connection.on_cancel(self._cancel)
        connection.on_dispatch(self._dispatch)
        connection.on_reap(self._reap)
        connection.on_runner_settings(self._settings)

    def open(self) -> None:
        """The snapshot is settled: offers may be taken, those that came early first."""
        held, self._held = self._held or [], None
        for offer, received_ms in held:
            self._submit_offer(offer, received_ms)

    def _offer(self, payload: object) -> None:
        try:
            offer = parse(Offer, payload, what="Offer")
        except RefusedError as error:
            if self._may_be_for_us(payload, error):
                refuse_malformed(self._runner, self._queues.decisions, payload, str(error))
            return
        received_ms = self._runner.clock.now_ms()
        if not self._is_for_us(offer):
            return
        if self._held is None:
            self._submit_offer(offer, received_ms)
        elif len(self._held) < HELD_OFFERS:
            self._held.append((offer, received_ms))

    def _submit_offer(self, offer: Offer, received_ms: int) -> None:
        self._submit(
            offer.attempt_id,
            partial(handle_offer, self._runner, self._queues.decisions, offer, received_ms),
            size_bytes=_size_bytes(offer),
        )

    def _start(self, payload: object) -> None:
        try:
            start = parse(Start, payload, what="Start")
        except RefusedError as error:
            if isinstance(payload, dict) and self._may_be_for_us(payload, error):
                attempt_id, fence = _id_in(payload, "attemptId"), payload.get("fence")
                if type(fence) is int:
                    refuse = partial(refuse_start, self._runner, (attempt_id, fence), str(error))
                    self._submit(attempt_id, refuse)
            return
        received_ms = self._runner.clock.now_ms()
        if not self._is_for_us(start):
            return
        handle = partial(handle_start, self._runner, start, received_ms)
        if not self._submit(start.attempt_id, handle, size_bytes=_size_bytes(start)):
            key = (start.attempt_id, start.fence)
            refuse = partial(handle_start_without_room, self._runner, key, NO_ROOM)
            self._submit(start.attempt_id, refuse)

    def _lease_update(self, payload: object) -> None:
        update = self._read(LeaseUpdate, payload)
        if update is not None:
            received_ms = self._runner.clock.now_ms()
            self._submit(
                update.attempt_id, lambda: handle_lease_update(self._runner, update, received_ms)
            )

    def _cancel(self, payload: object) -> None:
        cancel = self._read(Cancel, payload)
        if cancel is None:
            return
        if cancel.fence == 0:
            self._submit(("v1", cancel.attempt_id), partial(self._legacy.cancel, cancel.attempt_id))
            return
        key = (cancel.attempt_id, cancel.fence)
        if self._held is not None:
            self._held = [o for o in self._held if (o[0].attempt_id, o[0].fence) != key]
        reason = (cancel.reason or "")[:MAX_REASON_CHARACTERS] or None
        self._submit(cancel.attempt_id, partial(handle_cancel, self._runner, key, reason))

    def _dispatch(self, payload: object) -> None:
        try:
            dispatch = parse(Dispatch, payload, what="Dispatch")
        except RefusedError as error:
            self._complain("a malformed message from the hub", reason=str(error))
            if isinstance(payload, dict):
                self._refuse_dispatch(_id_in(payload, "dispatchId"), f"malformed: {error}")
            return
        key, handle = ("v1", dispatch.dispatch_id), partial(self._legacy.handle, dispatch)
        if not self._submit(key, handle, size_bytes=_size_bytes(dispatch)):
            self._refuse_dispatch(dispatch.dispatch_id, NO_ROOM)

    def _refuse_dispatch(self, dispatch_id: str, error: str) -> None:
        self._submit(("v1", dispatch_id), partial(self._legacy.refuse, dispatch_id, error))

    def _reap(self, payload: object) -> None:
        reap, reaper = self._read(Reap, payload), self._reaper
        if reap is None or not self._is_for_us(reap):
            return
        if not self._queues.reaps.submit(None, lambda: handle_reap(self._runner, reaper, reap)):
            self._complain("too many reap actions wait; one was dropped")

    def _settings(self, payload: object) -> None:
        changed = self._read(RunnerSettingsChanged, payload)
        if changed is not None:
            apply_settings(self._runner, changed.settings)

    def _read(self, model: type[Model], payload: object) -> Model | None:
        try:
            return parse(model, payload, what=model.__name__)
        except RefusedError as error:
            self._complain("a malformed message from the hub", reason=str(error))
            return None

    def _is_for_us(self, message: Offer | Start | Reap) -> bool:
        if message.runner_instance_id == self._runner.identity.runner_instance_id:
            return True
        self._complain("a message for another instance", message=type(message).__name__)
        return False

    def _may_be_for_us(self, payload: object, error: RefusedError) -> bool:
        """Whether a malformed message does not say that it is meant for another instance."""
        self._complain("a malformed message from the hub", reason=str(error))
        if not isinstance(payload, dict):
            return False
        named = payload.get("runnerInstanceId")
        return not isinstance(named, str) or named == self._runner.identity.runner_instance_id

    def _submit(self, key: Hashable, job: Job, *, size_bytes: int = 0) -> bool:
        """Queue it; what is too much is refused by name where it would be waited for.

        What is merely lost here the hub repeats: offers expire, renewals and cancels come again.
        """
        taken = self._queues.work.submit(key, job, size_bytes=size_bytes)
        if not taken:
            self._complain("the inbox is full; a message from the hub was not taken")
        return taken

    def _complain(self, event: str, **about: str) -> None:
        self._complaints += 1
        if self._complaints <= LOGGED_COMPLAINTS:
            logger.warning(event, **{name: text[:500] for name, text in about.items()})
        if self._complaints == LOGGED_COMPLAINTS:
            logger.warning("more of the like on this connection is not logged")


def _size_bytes(message: Offer | Start | Dispatch) -> int:
    return len(message.model_dump_json())


def _id_in(payload: Mapping[str, object], name: str) -> str:
    """The id, as short as it is useful: what is too long for one names nothing here."""
    value = payload.get(name)
    return value[:TOO_LONG_FOR_AN_ID] if isinstance(value, str) else ""
