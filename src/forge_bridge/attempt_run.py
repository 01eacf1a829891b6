"""One dispatch as it runs: feeds what happened to the core and carries out what it answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import anyio
import structlog

from forge_bridge.perform import carry_out, record
from forge_bridge.runner import Runner
from forge_bridge.waiting import until
from forge_core import attempt as core
from forge_core.attempt import Attempt, Phase
from forge_core.attempt_events import (
    DegradeReservation,
    EndRequested,
    Event,
    ForwardRenewal,
    FreeReservation,
    StopStages,
    TearDown,
    Tick,
)
from forge_core.errors import DiskUnusable, RefusedError
from forge_core.ports import Ledger
from forge_core.ready import ENDING, Action, Message, Ready, Record
from forge_core.redaction import Masker
from forge_core.wire.base import WireModel
from forge_core.wire.codes import EventType, FailureCode, ReservationState
from forge_core.wire.from_hub import LeaseUpdate, Offer

logger = structlog.get_logger(__name__)

TakeRenewal = Callable[[LeaseUpdate], None]

OWED_RETRY_MS: Final = 5_000
SUCCEEDED: Final = "succeeded"


class AttemptRun:
    """The state of one dispatch, its ledger, and the scope in which its stages run.

    :param offer: what was agreed on; None: not in this life of the bridge.
    """

    def __init__(
        self, runner: Runner, attempt: Attempt, ledger: Ledger, offer: Offer | None = None
    ) -> None:
        self.runner = runner
        self.state = attempt
        self.offer = offer
        self.masker = Masker(())
        self.stages = anyio.CancelScope()
        self.renewal_takers: list[TakeRenewal] = []
        self.records: list[Record] = []
        self.log = logger.bind(attempt_id=attempt.owner.attempt_id, fence=attempt.owner.fence)
        self._ledger = ledger
        self._owed: deque[Message] = deque()
        self._lock = anyio.Lock()
        self._deadlines_moved = anyio.Event()

    async def feed(self, event: Event) -> None:
        """Something happened: record, then tell, then act.

        Shielded once begun, since half a step must not be: it only writes to the local disk
        and starts what the actions name.

        :raises DiskUnusable: the ledger could not be written; nothing has changed.
        :raises RefusedError: ``ledger_full`` or ``record_too_large``, likewise; never of an end.
        """
        async with self._lock:
            state, ready = core.step(self.state, event, self.runner.now())
            await self._carry_out(state, ready)

    async def end(self, failure: FailureCode, detail: str | None = None) -> None:
        """Something wants the dispatch to end; the first reason wins.

        What was never started ends on disk at once; where that cannot be written, it stays
        reserved until its offer runs out.
        """
        try:
            await self.feed(EndRequested(failure, detail))
        except DiskUnusable as error:
            self.log.error("cannot record an end", code=failure, error=str(error))

    async def begin(self, ready: Ready) -> None:
        """Carry out what the reservation itself implies."""
        async with self._lock:
            await self._carry_out(self.state, ready)

    async def put(self, message: Message) -> None:
        """Enqueue a message that the ledger holds, or owe it.

        What the outbox cannot take now goes later, in order, and the ledger stays until then:
        neither a full disk nor a full outbox may keep a dispatch from being torn down.
        """
        self._owed.append(message)
        await self._pay()

    async def stream(self, event_type: EventType, payload: WireModel) -> Message:
        """The next event that is sent or dropped, never stored."""
        async with self._lock:
            self.state, message = core.stream_event(
                self.state, event_type, payload, self.runner.now()
            )
        return message

    async def keep_deadlines(self) -> None:
        """The host-side watchdog: expires the lease even when the container does not (B-72)."""
        clock = self.runner.clock
        while self.state.phase is Phase.RUNNING:
            wake_at_ms = core.next_wake_ms(self.state)
            moved = self._deadlines_moved
            if wake_at_ms is not None and clock.now_ms() >= wake_at_ms:
                await self.feed(Tick())
                wake_at_ms = None
            await until(clock, wake_at_ms, moved)

    def degrade(self) -> None:
        """Keep the capacity taken until a pass has removed and recorded what is left."""
        self.runner.admission.transition(self.state.key, ReservationState.DEGRADED)
        self.runner.notify()

    async def retire(self) -> None:
        """Give the capacity back and let the ledger go; it says RELEASED by now."""
        runner, key = self.runner, self.state.key
        runner.admission.free(key)
        if runner.attempts.pop(key, None) is not None and self.state.cleanup_id is None:
            runner.ended[self.state.failure or SUCCEEDED] += 1
        runner.notify()
        if not await self._is_settled():
            runner.tasks.start_soon(self._settle)

    async def _settle(self) -> None:
        """Try again, however long it takes; the next start would do the same."""
        clock, settled = self.runner.clock, False
        while not settled:
            await clock.sleep_until_ms(clock.now_ms() + OWED_RETRY_MS)
            await self._pay()
            settled = await self._is_settled()

    async def _is_settled(self) -> bool:
        """Nothing is owed, and the ledger is gone."""
        if self._owed:
            return False
        try:
            await self.runner.ledgers.remove(*self.state.key)
        except DiskUnusable as error:
            self.log.warning("cannot remove a finished ledger", error=str(error))
            return False
        return True

    async def _pay(self) -> None:
        while self._owed:
            try:
                await self.runner.outbox.put(self._owed[0])
            except DiskUnusable as error:
                self.log.error("cannot enqueue a message; it stays in the ledger", error=str(error))
                return
            except RefusedError as error:
                # A bug, and no reason to hold up whatever follows: a teardown, perhaps.
                self.log.error("cannot send a message at all", error=str(error))
            self._owed.popleft()

    async def _carry_out(self, state: Attempt, ready: Ready) -> None:
        earlier_ms, next_ms = core.next_wake_ms(self.state), core.next_wake_ms(state)
        if ready:
            with anyio.CancelScope(shield=True):
                await self._record(ready)
                self.records.extend(ready.records)
                self.state = state
                await carry_out(ready, self.put, self._act, self.runner.reach)
        else:
            self.state = state
        if earlier_ms is None or next_ms is None or next_ms < earlier_ms:
            self._deadlines_moved.set()
            self._deadlines_moved = anyio.Event()

    async def _record(self, ready: Ready) -> None:
        """Make the records durable; an end does without them where the ledger will never take them.

        Its messages are durable in the outbox, and the next start would derive the same ids.
        """
        try:
            await record(ready, self._ledger, self.runner.reach)
        except RefusedError as error:
            if ENDING.isdisjoint(line.kind for line in ready.records):
                raise
            self.log.error("cannot record the end; only the outbox has it", error=str(error))

    async def _act(self, action: Action) -> None:
        runner, key = self.runner, self.state.key
        match action:
            case StopStages():
                self.log.info("ending", code=self.state.failure)
                self.stages.cancel()
            case ForwardRenewal(update):
                for take in tuple(self.renewal_takers):
                    take(update)
            case TearDown():
                runner.admission.transition(key, ReservationState.RELEASING)
                runner.notify()
            case DegradeReservation():
                self.degrade()
            case FreeReservation():
                await self.retire()
            case _:
                raise AssertionError(action)
