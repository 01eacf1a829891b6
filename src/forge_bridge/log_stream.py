"""What the agent prints, on its way to the hub: masked, bounded, never stored (protocol.md)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import anyio

from forge_bridge.attempt_run import AttemptRun
from forge_core.errors import ForgeError
from forge_core.wire.codes import EventType, OutputStream
from forge_core.wire.events import Log
from forge_core.wire.from_bridge import ReplayAck, SubmitDispatchEvent
from forge_core.wire.limits import MAX_LOG_TEXT_BYTES, split_text

BUFFER_BYTES: Final = 1_048_576
CHUNK_BYTES: Final = 256
"""What a waiting chunk costs besides its text: an agent can print byte by byte."""

JOINED_PIECES: Final = 64
FLUSH_MS: Final = 2_000


@dataclass(slots=True)
class _Chunk:
    stream: OutputStream
    pieces: list[str]
    size_bytes: int
    dropped_bytes: int


class LogStream:
    """A bounded queue between a container that may flood and a hub that may be away.

    What does not fit is dropped and counted in the next chunk that is sent.
    """

    def __init__(self, run: AttemptRun) -> None:
        self._run = run
        self._streams = {stream: run.masker.stream() for stream in OutputStream}
        self._waiting: deque[_Chunk] = deque()
        self._waiting_bytes = 0
        self._dropped_bytes = dict.fromkeys(OutputStream, 0)
        self._arrived = anyio.Event()
        self._drained = anyio.Event()
        self._drained.set()

    def put(self, stream: OutputStream, text: str, dropped_bytes: int = 0) -> None:
        """Take a chunk; never waits."""
        self._dropped_bytes[stream] += dropped_bytes
        self._queue(stream, self._streams[stream].feed(text))

    def end(self) -> None:
        """Nothing more will come: let go what masking held back, and say what was dropped."""
        for stream, masking in self._streams.items():
            self._queue(stream, masking.end())
            if self._dropped_bytes[stream]:
                self._append(stream, "", 0)

    async def send(self) -> None:
        """Send what is queued until cancelled; what cannot be sent now is dropped, not kept."""
        while True:
            while self._waiting:
                chunk = self._waiting.popleft()
                self._waiting_bytes -= chunk.size_bytes + CHUNK_BYTES
                await self._send(chunk)
            self._drained.set()
            self._arrived = anyio.Event()
            await self._arrived.wait()

    async def flush(self) -> None:
        """Wait until everything queued was sent or dropped, for a bounded time."""
        with anyio.move_on_after(FLUSH_MS / 1000):
            await self._drained.wait()

    async def _send(self, chunk: _Chunk) -> None:
        dropped_bytes = chunk.dropped_bytes
        for text in split_text("".join(chunk.pieces)) or ("",):
            log = Log(
                stream=chunk.stream,
                text=text,
                truncated=dropped_bytes > 0,
                dropped_bytes=dropped_bytes,
            )
            dropped_bytes = 0
            if not await self._deliver(log):
                self._dropped_bytes[chunk.stream] += len(text.encode()) + log.dropped_bytes

    async def _deliver(self, log: Log) -> bool:
        message = await self._run.stream(EventType.LOG, log)
        event = SubmitDispatchEvent.model_validate(message.payload)
        try:
            return (await self._run.runner.hub.call(event, ReplayAck)).accepted
        except ForgeError:
            return False

    def _queue(self, stream: OutputStream, text: str) -> None:
        if not text:
            return
        size_bytes = len(text.encode())
        if self._waiting_bytes + size_bytes + CHUNK_BYTES > BUFFER_BYTES:
            self._dropped_bytes[stream] += size_bytes
            return
        last = self._waiting[-1] if self._waiting else None
        if (
            last is not None
            and last.stream is stream
            and last.size_bytes + size_bytes <= MAX_LOG_TEXT_BYTES
            and not self._dropped_bytes[stream]
        ):
            last.pieces.append(text)
            if len(last.pieces) >= JOINED_PIECES:
                last.pieces = ["".join(last.pieces)]
            last.size_bytes += size_bytes
            self._waiting_bytes += size_bytes
        else:
            self._append(stream, text, size_bytes)

    def _append(self, stream: OutputStream, text: str, size_bytes: int) -> None:
        dropped, self._dropped_bytes[stream] = self._dropped_bytes[stream], 0
        self._waiting.append(_Chunk(stream, [text], size_bytes, dropped))
        self._waiting_bytes += size_bytes + CHUNK_BYTES
        if self._drained.is_set():
            self._drained = anyio.Event()
        self._arrived.set()
