"""Log chunks between a container that floods and a hub that is slow: joined, bounded, counted."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from forge_bridge.log_stream import BUFFER_BYTES, LogStream
from forge_core.errors import HubUnavailable
from forge_core.ready import Message
from forge_core.redaction import Masker
from forge_core.wire.base import WireModel
from forge_core.wire.codes import EventType, OutputStream
from forge_core.wire.events import Log
from forge_core.wire.from_bridge import ReplayAck, SubmitDispatchEvent

OUT, ERR = OutputStream.STDOUT, OutputStream.STDERR


class Hub:
    """Takes log events, once it is let."""

    def __init__(self) -> None:
        self.logs: list[Log] = []
        self.open = anyio.Event()
        self.away = False

    async def call(self, event: SubmitDispatchEvent, _answer: object) -> ReplayAck:
        await self.open.wait()
        if self.away:
            raise HubUnavailable("away")
        self.logs.append(Log.model_validate(event.payload))
        return ReplayAck.model_validate({"accepted": True, "disposition": "persisted"})

    def text(self, stream: OutputStream) -> str:
        return "".join(log.text for log in self.logs if log.stream is stream)


def stream_to(hub: Hub) -> LogStream:
    async def message(event_type: EventType, payload: WireModel) -> Message:
        body = {
            "eventId": "e",
            "attemptId": "a",
            "fence": 1,
            "resourceRunnerInstanceId": "i",
            "streamSequence": 1,
            "at": "2026-11-29T14:00:00.000Z",
            "type": event_type,
            "payload": payload.to_wire(),
        }
        return Message("e", "SubmitDispatchEvent", body, durable=False)

    run = SimpleNamespace(masker=Masker(()), stream=message, runner=SimpleNamespace(hub=hub))
    return LogStream(cast("Any", run))


async def sent(logs: LogStream, hub: Hub) -> None:
    """Let the hub have everything."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(logs.send)
        hub.open.set()
        logs.end()
        await logs.flush()
        tasks.cancel_scope.cancel()


@pytest.mark.requirement("B-84")
async def test_what_is_printed_byte_by_byte_goes_in_chunks_and_in_order() -> None:
    hub = Hub()
    logs = stream_to(hub)
    for number in range(50_000):
        logs.put(OUT, str(number % 10))
    await sent(logs, hub)
    assert hub.text(OUT) == "0123456789" * 5_000
    assert len(hub.logs) < 10
    assert not any(log.truncated for log in hub.logs)


@pytest.mark.requirement("B-84")
@pytest.mark.parametrize("streams", [(OUT, OUT), (OUT, ERR)], ids=["one stream", "both in turn"])
async def test_a_flood_of_bytes_stays_small_and_every_byte_is_counted(
    streams: tuple[OutputStream, ...],
) -> None:
    hub = Hub()
    logs = stream_to(hub)
    tracemalloc.start()
    for number in range(100_000):
        logs.put(streams[number % 2], f"{number:016}")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * BUFFER_BYTES
    for stream in set(streams):
        logs.put(stream, "", dropped_bytes=7)
    await sent(logs, hub)
    counted = sum(len(log.text) + log.dropped_bytes for log in hub.logs)
    assert counted == 100_000 * 16 + 7 * len(set(streams))
    assert all(log.truncated == (log.dropped_bytes > 0) for log in hub.logs)
    assert hub.logs[-1].truncated


@pytest.mark.requirement("B-84")
async def test_what_a_hub_does_not_take_is_counted_in_the_next_chunk() -> None:
    hub = Hub()
    logs = stream_to(hub)
    hub.away = True
    logs.put(OUT, "lost \u00e9")
    await sent(logs, hub)
    hub.away = False
    logs.put(OUT, "kept")
    await sent(logs, hub)
    (log,) = hub.logs
    assert (log.text, log.truncated, log.dropped_bytes) == ("kept", True, 7)
