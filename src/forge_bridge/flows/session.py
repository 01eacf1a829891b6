"""The life of the connection to the hub (lifecycle.md, Connection; B-01).

``connect → register → snapshot → reconcile → replay and heartbeat → offers``, then the same
again after a backoff, for ever.  The receive path only validates and queues; every dispatch has
a queue of its own, so that none waits for another and each keeps its order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import anyio.abc
import structlog

from forge_bridge.flows.cancel import handle_cancel
from forge_bridge.flows.heartbeat import beat
from forge_bridge.flows.legacy import LegacyDispatches
from forge_bridge.flows.offer import handle_offer, refuse_malformed
from forge_bridge.flows.reap import Reaper, handle_reap
from forge_bridge.flows.reconcile import reconcile
from forge_bridge.flows.register import register
from forge_bridge.flows.renew import handle_lease_update
from forge_bridge.flows.replay import Invoke
from forge_bridge.flows.settings import apply_settings
from forge_bridge.flows.start import handle_malformed_start, handle_start
from forge_bridge.groups import first_error
from forge_bridge.keyed_queue import Job, KeyedQueue
from forge_bridge.runner import Runner
from forge_bridge.waiting import until
from forge_core.backoff import Backoff, ConnectionPhase
from forge_core.errors import ForgeError, HubRefused, RefusedError
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

QUEUE_LIMIT = 4_096
AUTHENTICATION_STATUSES = frozenset({401, 403})


class ConnectionFactory(Protocol):
    """Makes one connection per attempt to connect, so that another transport can stand in."""

    def create(self, task_group: anyio.abc.TaskGroup) -> BridgeConnection: ...


class Replay(Protocol):
    """Sends what the outbox holds, for the lifetime of one connection."""

    async def run(self, invoke: Invoke) -> None: ...


@dataclass(slots=True)
class Session:
    """What outlives a single connection: the queue of work and the backoff."""

    runner: Runner
    connections: ConnectionFactory
    replay: Replay
    legacy: LegacyDispatches
    reaper: Reaper | None = None
    phase: ConnectionPhase = ConnectionPhase.DISCONNECTED
    last_error: str | None = None
    missed: dict[tuple[str, int], int] = field(default_factory=dict)

    async def run(self, stop: anyio.Event) -> None:
        """Keep a connection until ``stop`` is set."""
        clock, backoff = self.runner.clock, Backoff()
        while not stop.is_set():
            began_ms, retry_after_ms = clock.now_ms(), None
            try:
                online_since_ms = await self.connect_once(stop)
                backoff = backoff.online_for(clock.now_ms() - (online_since_ms or began_ms))
            except ForgeError as error:
                for_good = isinstance(error, RefusedError) or (
                    isinstance(error, HubRefused) and error.status in AUTHENTICATION_STATUSES
                )
                backoff = backoff.failed(for_good=for_good)
                retry_after_ms = getattr(error, "retry_after_ms", None)
                self.last_error = str(error)
            if stop.is_set():
                return
            delay_ms = backoff.delay_ms(clock.jitter(), retry_after_ms)
            logger.warning("hub not connected", retry_in_ms=delay_ms, reason=self.last_error)
            await until(clock, clock.now_ms() + delay_ms, stop)

    async def connect_once(self, stop: anyio.Event | None = None) -> int | None:
        """One connection from negotiate to close; returns when it came online.

        :raises HubRefused: the hub did not let us in.
        :raises HubUnavailable: there is no hub.
        :raises RefusedError: the hub refused the registration.
        """
        try:
            with first_error():
                return await self._serve(stop or anyio.Event())
        finally:
            self.phase = ConnectionPhase.DISCONNECTED

    async def _serve(self, stop: anyio.Event) -> int | None:
        runner = self.runner
        closed = anyio.Event()
        online_since_ms: int | None = None
        async with anyio.create_task_group() as tasks:
            connection = self.connections.create(tasks)
            inbox = _Inbox(self, KeyedQueue(tasks, limit=QUEUE_LIMIT), connection)
            inbox.subscribe()
            connection.on_close(lambda error: self._closed(error, closed))
            self.phase = ConnectionPhase.CONNECTING
            await connection.start()
            try:
                self.phase = ConnectionPhase.REGISTERING
                interval_ms = await register(runner, connection)
                runner.hub.online(connection)
                await reconcile(runner, connection, self.missed)
                tasks.start_soon(self.replay.run, connection.invoke)
                tasks.start_soon(beat, runner, interval_ms)
                tasks.start_soon(_set_when, stop, closed)
                self.phase, self.last_error = ConnectionPhase.ONLINE, None
                online_since_ms = runner.clock.now_ms()
                logger.info("online", runner_id=runner.identity.runner_id)
                inbox.open.set()
                await closed.wait()
            finally:
                runner.hub.offline(connection)
                with anyio.CancelScope(shield=True):
                    await connection.stop()
            tasks.cancel_scope.cancel()
        return online_since_ms

    def _closed(self, error: ForgeError | None, closed: anyio.Event) -> None:
        if error is not None:
            self.last_error = str(error)
        closed.set()


class _Inbox:
    """The receive path of one connection: validate, queue, never wait."""

    def __init__(self, session: Session, queue: KeyedQueue, connection: BridgeConnection) -> None:
        self._session = session
        self._runner = session.runner
        self._queue = queue
        self._connection = connection
        self.open = anyio.Event()

    def subscribe(self) -> None:
        """Every client target of the wire."""
        connection = self._connection
        connection.on_offer(self._offer)
        connection.on_start(self._start)
        connection.on_lease_update(self._lease_update)
        connection.on_cancel(self._cancel)
        connection.on_dispatch(self._dispatch)
        connection.on_reap(self._reap)
        connection.on_runner_settings(self._settings)

    def _offer(self, payload: object) -> None:
        try:
            offer = parse(Offer, payload, what="Offer")
        except RefusedError as error:
            detail = str(error)
            self._log_malformed(error)
            self._submit("offers", lambda: refuse_malformed(self._runner, payload, detail))
            return
        if self._is_for_us(offer):
            self._submit("offers", lambda: self._when_open(offer))

    async def _when_open(self, offer: Offer) -> None:
        await self.open.wait()
        await handle_offer(self._runner, offer)

    def _start(self, payload: object) -> None:
        try:
            start = parse(Start, payload, what="Start")
        except RefusedError as error:
            detail = str(error)
            self._log_malformed(error)
            self._submit("offers", lambda: handle_malformed_start(self._runner, payload, detail))
            return
        if self._is_for_us(start):
            # Behind the decisions: a start may overtake the answer to its own offer.
            self._submit("offers", lambda: handle_start(self._runner, start))

    def _lease_update(self, payload: object) -> None:
        update = self._read(LeaseUpdate, payload)
        if update is not None:
            key = (update.attempt_id, update.fence)
            self._submit(key, lambda: handle_lease_update(self._runner, update))

    def _cancel(self, payload: object) -> None:
        cancel = self._read(Cancel, payload)
        if cancel is not None:
            key = (cancel.attempt_id, cancel.fence)
            legacy = self._session.legacy
            self._submit(key, lambda: handle_cancel(self._runner, legacy, cancel))

    def _dispatch(self, payload: object) -> None:
        legacy = self._session.legacy
        try:
            dispatch = parse(Dispatch, payload, what="Dispatch")
        except RefusedError as error:
            detail = str(error)
            self._log_malformed(error)
            self._submit("dispatches", lambda: legacy.refuse_malformed(payload, detail))
            return
        self._submit("dispatches", lambda: legacy.handle(dispatch))

    def _reap(self, payload: object) -> None:
        reap, reaper = self._read(Reap, payload), self._session.reaper
        if reap is not None and self._is_for_us(reap):
            self._submit("reap", lambda: handle_reap(self._runner, reaper, reap))

    def _settings(self, payload: object) -> None:
        changed = self._read(RunnerSettingsChanged, payload)
        if changed is not None:
            apply_settings(self._runner, changed.settings)

    def _read(self, model: type[Model], payload: object) -> Model | None:
        try:
            return parse(model, payload, what=model.__name__)
        except RefusedError as error:
            self._log_malformed(error)
            return None

    def _is_for_us(self, message: Offer | Start | Reap) -> bool:
        ours = self._runner.identity.runner_instance_id
        if message.runner_instance_id == ours:
            return True
        logger.warning("a message for another instance", message=type(message).__name__)
        return False

    def _log_malformed(self, error: RefusedError) -> None:
        logger.warning("a malformed message from the hub", reason=str(error)[:500])

    def _submit(self, key: Hashable, job: Job) -> None:
        if not self._queue.submit(key, job):
            # What is lost here the hub repeats: offers expire, renewals and cancels come again.
            logger.error("the inbox is full; a message from the hub was dropped", key=str(key))


async def _set_when(condition: anyio.Event, target: anyio.Event) -> None:
    await condition.wait()
    target.set()
