"""What is said with PID 1 of a service's container; every frame is a claim of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio

from forge_core.errors import EngineUnreachable
from forge_core.lease import Deadline
from forge_core.ports import Attachment
from forge_core.redaction import Masker
from forge_core.services import MAX_LINE_CHARACTERS
from forge_core.supervisor_frames import (
    DeadlinePassed,
    Frame,
    FrameReader,
    LogChunk,
    ProcessEnded,
    SupervisorReady,
)
from forge_core.wire.codes import OutputStream

TAIL_CHARACTERS: Final = 4_096
LAST_WORDS: Final = 1_000
STDOUT: Final = 1


class ServiceProcess:
    """The child of PID 1, from its orders to its end.

    :param orders: makes the ``init`` frame, once PID 1 is ready for it.
    :param masker: of the secrets that are in the orders.
    :ivar ended: the child's own status.
    :ivar claimed: a deadline that PID 1 says has passed.
    """

    def __init__(self, stream: Attachment, orders: Callable[[], bytes], masker: Masker) -> None:
        self.ended: ProcessEnded | None = None
        self.claimed: Deadline | None = None
        self._tail = ""
        self._masking = masker.stream()
        self._stream = stream
        self._orders: Callable[[], bytes] | None = orders
        self._reader = FrameReader()
        self._sending = anyio.Lock()
        self._line = ""
        self._is_over = False

    @property
    def last_words(self) -> str:
        """The end of what was printed on stderr, in one line."""
        return " ".join(self._tail.split())[-LAST_WORDS:] or "none"

    async def first_line(self) -> str | None:
        """What the child has to say; None: it ended, or said too much, before it was said."""
        while await self._read():
            line, found, _ = self._line.partition("\n")
            if found:
                return line
            if len(self._line) > MAX_LINE_CHARACTERS:
                return None
        return None

    async def until_end(self) -> None:
        """Read on, so that nothing is held up and the last words are the last."""
        while await self._read():
            continue

    async def send(self, frame: bytes) -> None:
        """Waits while PID 1 does not read.

        :raises EngineUnreachable: PID 1 is gone, or the engine.
        """
        async with self._sending:
            await self._stream.send(frame)

    async def _read(self) -> bool:
        """Whether there was something to read."""
        if self._is_over:
            return False
        piece = await self._stream.receive()
        if piece is None:
            self._is_over = True
            self._tail += self._masking.end()
            return False
        channel, data = piece
        if channel != STDOUT:
            self._keep(data.decode("utf-8", "replace"))
            return True
        for frame in self._reader.feed(data):
            await self._handle(frame)
        return True

    async def _handle(self, frame: Frame) -> None:
        match frame:
            case SupervisorReady() if self._orders is not None:
                given, self._orders = self._orders(), None
                try:
                    await self.send(given)
                except EngineUnreachable as error:
                    self._keep(f"{error}\n")  # whose fault it is, its end tells
            case LogChunk(OutputStream.STDOUT, text):
                # Nobody asked for more than a line; what follows it is never looked at.
                if "\n" not in self._line and len(self._line) <= MAX_LINE_CHARACTERS:
                    self._line += text
            case LogChunk(OutputStream.STDERR, text):
                self._keep(text)
            case ProcessEnded():
                self.ended = self.ended or frame
            case DeadlinePassed(which):
                self.claimed = self.claimed or which

    def _keep(self, text: str) -> None:
        # Masked before it is cut: of half a secret nobody knows that it is one.
        self._tail = (self._tail + self._masking.feed(text))[-TAIL_CHARACTERS:]
