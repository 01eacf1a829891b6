"""Durable messages to the hub: on disk first, then sent until the hub has acknowledged them.

Which goes next is decided by :mod:`forge_core.outbox`; here it is done.  Heartbeats and offer
decisions never pass through here and never wait behind it (protocol.md, What is sent again).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import anyio
import structlog

from forge_core.errors import ForgeError, HubConnectionLost, HubUnavailable, RefusedError
from forge_core.outbox import CLEANUP_REPORT, Entry, Outbox, entry_of
from forge_core.ports import Clock
from forge_core.ready import Message
from forge_core.wire.base import parse
from forge_core.wire.codes import Disposition
from forge_core.wire.from_bridge import ReplayAck, SubmitCleanupReport
from forge_core.wire.limits import require_fits, split_cleanup_report

Invoke = Callable[[str, Mapping[str, object]], Awaitable[object]]
"""One call of a hub method over one connection (:class:`forge_core.ports.BridgeConnection`)."""

Call = tuple[str, Mapping[str, Any]]

_STAMPED: Final = ("runnerId", "runnerInstanceId", "part", "parts")
"""Who reports, and in how many parts, is known when a report is sent (protocol.md)."""

logger = structlog.get_logger(__name__)


class MessageStore(Protocol):
    """The files of the outbox (:class:`forge_bridge.state_root.messages.MessageStore`)."""

    async def load(self) -> Iterable[Entry]: ...
    async def write(self, entry: Entry, payload: Mapping[str, Any]) -> None: ...
    async def read(self, entry: Entry) -> Mapping[str, Any]: ...
    async def remove(self, entry: Entry) -> None: ...
    async def set_aside(self, entry: Entry, reason: str, detail: str) -> None: ...


class Replay:
    """The outbox of one bridge process (:class:`forge_core.ports.Outbox`).

    :param runner_id: stamped, with the instance id, into cleanup reports at each send.
    """

    def __init__(
        self, store: MessageStore, clock: Clock, *, runner_id: str, runner_instance_id: str
    ) -> None:
        self._store = store
        self._clock = clock
        self._stamp = {"runnerId": runner_id, "runnerInstanceId": runner_instance_id}
        self._outbox = Outbox()
        self._changed = anyio.Event()
        self._writing: dict[str, anyio.Event] = {}

    @property
    def pending_reports(self) -> int:
        """Cleanup reports that the hub has not acknowledged, for heartbeats."""
        return self._outbox.pending_reports

    @property
    def pending(self) -> int:
        """All messages that the hub has not acknowledged."""
        return len(self._outbox)

    def holds_result(self, attempt_id: str, fence: int) -> bool:
        """Whether a result of this dispatch waits for its acknowledgement."""
        return self._outbox.holds_result(attempt_id, fence)

    @property
    def is_full(self) -> bool:
        """Whether so much waits for the hub that no new work should be taken on."""
        return self._outbox.is_full

    async def load(self) -> None:
        """Take over what an earlier process left; once, before anything is put.

        :raises DiskUnusable: the directories cannot be listed.
        """
        self._outbox.load(await self._store.load())
        await self._remove_superfluous()

    async def put(self, message: Message) -> None:
        """Make a message durable, then due; it is on disk when this returns.

        A message with the id of one that waits already is that one.  Once begun, this is carried
        through although the caller is cancelled.

        :raises DiskUnusable: it is not on disk and will not be sent.
        :raises OutboxFull: likewise; an event must not use up its sequence then.
        :raises RefusedError: code ``malformed`` or ``message_too_large``: a bug of the caller.
        """
        assert message.durable, message.id
        while (other := self._writing.get(message.id)) is not None:
            await other.wait()
        if message.id in self._outbox:
            return
        created = self._outbox.next_created(_as_number(self._clock.utc()))
        entry = entry_of(message.id, message.method, message.payload, created)
        payload = self._payload_to_keep(entry, message.payload)
        self._outbox.add(entry)
        with anyio.CancelScope(shield=True):
            await self._write(entry, payload)
            await self._remove_superfluous()

    async def run(self, invoke: Invoke) -> None:
        """Send what is due over one connection, until it is gone or this is cancelled."""
        try:
            async with anyio.create_task_group() as sends:
                while True:
                    changed = self._changed
                    for entry in self._outbox.take(self._clock.now_ms()):
                        sends.start_soon(self._send, entry, invoke, sends.cancel_scope)
                    await self._wait(changed, self._outbox.wake_at_ms)
        finally:
            self._outbox.connection_lost()
            self._notify()

    async def wait_empty(self) -> None:
        """Return once the hub has acknowledged everything; the caller bounds the wait."""
        while self._outbox:
            await self._changed.wait()

    def _payload_to_keep(self, entry: Entry, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        if entry.method != CLEANUP_REPORT:
            require_fits(entry.method, dict(payload))
            return payload
        kept = self._stamped(payload).to_wire()
        return {name: value for name, value in kept.items() if name not in _STAMPED}

    async def _write(self, entry: Entry, payload: Mapping[str, Any]) -> None:
        written = self._writing[entry.id] = anyio.Event()
        try:
            await self._store.write(entry, payload)
        except BaseException:
            self._outbox.not_written(entry.id)
            raise
        else:
            self._outbox.written(entry.id)
        finally:
            del self._writing[entry.id]
            written.set()
            self._notify()

    async def _wait(self, changed: anyio.Event, wake_at_ms: int | None) -> None:
        if wake_at_ms is None:
            await changed.wait()
            return
        async with anyio.create_task_group() as waits:
            waits.start_soon(self._cancel_at, wake_at_ms, waits.cancel_scope)
            await changed.wait()
            waits.cancel_scope.cancel()

    async def _cancel_at(self, wake_at_ms: int, scope: anyio.CancelScope) -> None:
        await self._clock.sleep_until_ms(wake_at_ms)
        scope.cancel()

    async def _send(self, entry: Entry, invoke: Invoke, connection: anyio.CancelScope) -> None:
        """Send one entry and act on what came of it."""
        try:
            calls = await self._calls(entry)
            ack = None if calls is None else await _deliver(calls, invoke)
        except HubUnavailable:
            connection.cancel()
        except HubConnectionLost:
            self._outbox.lost(entry.id)
            self._notify()
        except ForgeError as error:
            await self._retry_later(entry, error)
        else:
            await self._finish(entry, ack)

    async def _calls(self, entry: Entry) -> Sequence[Call] | None:
        """What is sent for an entry; None when its file is no such message and was set aside.

        :raises DiskUnusable: the file cannot be read now.
        """
        try:
            payload = await self._store.read(entry)
            if entry.method != CLEANUP_REPORT:
                return [(entry.method, payload)]
            report = self._stamped(payload)
        except RefusedError as error:
            logger.error("cannot send a stored message", message_id=entry.id, error=str(error))
            if error.code != "message_damaged":
                await self._set_aside(entry, error.code, str(error))
            return None
        return [(entry.method, part.to_wire()) for part in split_cleanup_report(report)]

    def _stamped(self, payload: Mapping[str, Any]) -> SubmitCleanupReport:
        whole = {**payload, **self._stamp, "part": 1, "parts": 1}
        return parse(SubmitCleanupReport, whole, what="a cleanup report")

    async def _finish(self, entry: Entry, ack: ReplayAck | None) -> None:
        """This entry is not sent again, whatever the hub has said of it."""
        with anyio.CancelScope(shield=True):
            self._outbox.acknowledged(entry.id)
            if ack is not None and ack.disposition is Disposition.REJECTED:
                await self._set_aside(entry, ack.reason or "rejected", ack.detail or "")
            elif ack is not None:
                await self._remove(entry)
            await self._remove_superfluous()
            self._notify()

    async def _retry_later(self, entry: Entry, error: ForgeError) -> None:
        with anyio.CancelScope(shield=True):
            if self._outbox.failed(entry.id, self._clock.now_ms(), self._clock.jitter()):
                await self._set_aside(entry, "hub_error", str(error))
            else:
                logger.warning("will send again", message_id=entry.id, error=str(error))
            await self._remove_superfluous()
            self._notify()

    async def _set_aside(self, entry: Entry, reason: str, detail: str) -> None:
        logger.warning(
            "setting a message aside",
            method=entry.method,
            message_id=entry.id,
            reason=reason,
            detail=detail,
        )
        try:
            await self._store.set_aside(entry, reason, detail)
        except ForgeError as error:
            logger.warning("cannot set a message aside", message_id=entry.id, error=str(error))

    async def _remove(self, entry: Entry) -> None:
        try:
            await self._store.remove(entry)
        except ForgeError as error:
            # Sent again after the next start, where it is a duplicate.
            logger.warning("cannot forget a message", message_id=entry.id, error=str(error))

    async def _remove_superfluous(self) -> None:
        for entry in self._outbox.take_superfluous():
            await self._remove(entry)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


async def _deliver(calls: Sequence[Call], invoke: Invoke) -> ReplayAck:
    """Send the parts of a message one after the other; the first that is rejected decides.

    :raises RetryableError: the hub is out of reach.
    :raises RefusedError: the hub has answered with an error, or with no acknowledgement.
    """
    for method, payload in calls:
        answer = await invoke(method, payload)
        ack = parse(ReplayAck, answer, what=f"the acknowledgement of {method}")
        if ack.disposition is Disposition.REJECTED:
            break
    return ack


def _as_number(utc: str) -> int:
    """The wall clock as a number that people can read: yyyymmddhhmmssmmm."""
    return int("".join(filter(str.isdigit, utc)))
