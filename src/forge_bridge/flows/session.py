"""The life of the connection to the hub (lifecycle.md, Connection; B-01).

``connect → register → snapshot → reconcile → replay and heartbeat → offers``, then the same
again after a backoff, for ever.  The receive path is ``flows/inbox.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

import anyio
import anyio.abc
import structlog

from forge_bridge.flows.heartbeat import beat
from forge_bridge.flows.inbox import (
    MAX_QUEUED_BYTES,
    QUEUE_LIMIT,
    REAPS_WAITING,
    Inbox,
    Queues,
)
from forge_bridge.flows.legacy import LegacyDispatches
from forge_bridge.flows.offer import Decisions
from forge_bridge.flows.reap import Reaper
from forge_bridge.flows.reconcile import reconcile
from forge_bridge.flows.register import register
from forge_bridge.flows.replay import Invoke
from forge_bridge.groups import first_error
from forge_bridge.keyed_queue import KeyedQueue
from forge_bridge.runner import Runner
from forge_bridge.waiting import until
from forge_core.backoff import Backoff
from forge_core.connection import ConnectionPhase
from forge_core.errors import ForgeError, HubConnectionLost, HubError, HubRefused, RefusedError
from forge_core.ports import BridgeConnection
from forge_core.wire.limits import cut_text

logger = structlog.get_logger(__name__)

AUTHENTICATION_STATUSES: Final = frozenset({401, 403})
MAX_ERROR_BYTES: Final = 2_000
UNHURRIED_MS: Final = 10_000
"""The least wait after a hub that closed without inviting us back (``allowReconnect`` false)."""


class ConnectionFactory(Protocol):
    """Makes one connection per attempt to connect, so that another transport can stand in."""

    def create(self, task_group: anyio.abc.TaskGroup) -> BridgeConnection: ...


class Replay(Protocol):
    """Sends what the outbox holds, for the lifetime of one connection."""

    async def run(self, invoke: Invoke) -> None: ...


@dataclass(frozen=True, slots=True)
class Ended:
    """How a connection ended that had been established.

    :ivar online_for_ms: from the settled snapshot to the end; 0: it never got so far.
    :ivar retry_after_ms: the least that the hub asks to wait; None: it did not say.
    """

    online_for_ms: int
    retry_after_ms: int | None


@dataclass(slots=True)
class Session:
    """What outlives a single connection: the queue of work and the backoff."""

    runner: Runner
    connections: ConnectionFactory
    replay: Replay
    legacy: LegacyDispatches
    reaper: Reaper
    phase: ConnectionPhase = ConnectionPhase.DISCONNECTED
    last_error: str | None = None
    missed: dict[tuple[str, int], int] = field(default_factory=dict)
    _queue: KeyedQueue = field(init=False)
    _reaps: KeyedQueue = field(init=False)
    _decisions: Decisions = field(init=False)

    def __post_init__(self) -> None:
        self._queue = KeyedQueue(self.runner.tasks, limit=QUEUE_LIMIT, max_bytes=MAX_QUEUED_BYTES)
        self._reaps = KeyedQueue(self.runner.tasks, limit=REAPS_WAITING)
        self._decisions = Decisions(self.runner)

    async def run(self, stop: anyio.Event) -> None:
        """Keep a connection until ``stop`` is set."""
        clock, backoff = self.runner.clock, Backoff()
        while not stop.is_set():
            try:
                ended = await self.connect_once(stop)
                backoff = backoff.online_for(ended.online_for_ms)
                retry_after_ms = ended.retry_after_ms
            except ForgeError as error:
                backoff = backoff.failed(for_good=_needs_a_person(error))
                retry_after_ms = getattr(error, "retry_after_ms", None)
                self.last_error = _brief(error)
            if stop.is_set():
                return
            delay_ms = backoff.delay_ms(clock.jitter(), retry_after_ms)
            logger.warning("hub not connected", retry_in_ms=delay_ms, reason=self.last_error)
            await until(clock, clock.now_ms() + delay_ms, stop)

    async def connect_once(self, stop: anyio.Event | None = None) -> Ended:
        """One connection from negotiate to close.

        :param stop: ends it, in order, wherever it stands.
        :raises HubRefused: the hub did not let us in.
        :raises HubUnavailable: there is no hub.
        :raises HubConnectionLost: it was lost before the snapshot was settled.
        :raises RefusedError: the hub refused the registration.
        """
        try:
            with first_error():
                return await self._hold(stop or anyio.Event())
        finally:
            self._enter(ConnectionPhase.DISCONNECTED)

    async def _hold(self, stop: anyio.Event) -> Ended:
        """Own one connection; whatever ends the conversation, it is closed in order."""
        ended = Ended(0, None)
        async with anyio.create_task_group() as owner:
            connection = self.connections.create(owner)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_cancel_when, stop, tasks.cancel_scope)
                    ended = await self._converse(connection, tasks)
                    tasks.cancel_scope.cancel()
            finally:
                self.runner.hub.offline(connection)
                with anyio.CancelScope(shield=True):
                    await connection.stop()
        return ended

    async def _converse(self, connection: BridgeConnection, tasks: anyio.abc.TaskGroup) -> Ended:
        runner = self.runner
        closed = anyio.Event()
        reasons: list[ForgeError | None] = []

        def on_close(error: ForgeError | None) -> None:
            reasons.append(error)
            closed.set()

        async def beat_until_unheard() -> None:
            on_close(await beat(runner, interval_ms))

        queues = Queues(self._queue, self._reaps, self._decisions)
        inbox = Inbox(runner, queues, self.legacy, self.reaper)
        inbox.subscribe(connection)
        connection.on_close(on_close)
        self._enter(ConnectionPhase.CONNECTING)
        await connection.start()
        self._enter(ConnectionPhase.REGISTERING)
        interval_ms = await register(runner, connection)
        await reconcile(runner, connection, self.missed)
        runner.hub.online(connection)
        tasks.start_soon(self.replay.run, connection.invoke)
        tasks.start_soon(beat_until_unheard)
        self.last_error = None
        self._enter(ConnectionPhase.ONLINE)
        online_since_ms = runner.clock.now_ms()
        logger.info("online", runner_id=runner.identity.runner_id)
        inbox.open()
        await closed.wait()
        reason = reasons[0]
        self.last_error = None if reason is None else _brief(reason)
        hurried = not isinstance(reason, HubConnectionLost) or reason.allow_reconnect
        return Ended(runner.clock.now_ms() - online_since_ms, None if hurried else UNHURRIED_MS)

    def _enter(self, phase: ConnectionPhase) -> None:
        """The status shows it at once."""
        self.phase = phase
        self.runner.notify()


def _needs_a_person(error: ForgeError) -> bool:
    """Whether trying again soon is pointless: the hub knows us, and says no."""
    if isinstance(error, HubRefused):
        return error.status in AUTHENTICATION_STATUSES
    return isinstance(error, RefusedError) and not isinstance(error, HubError)


def _brief(error: ForgeError) -> str:
    """For people, and bounded: a hub may say as much as it likes."""
    return cut_text(str(error), MAX_ERROR_BYTES)[0]


async def _cancel_when(condition: anyio.Event, scope: anyio.CancelScope) -> None:
    await condition.wait()
    scope.cancel()
