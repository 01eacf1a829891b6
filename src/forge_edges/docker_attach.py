"""A container's standard streams over one upgraded connection (Engine API, ContainerAttach).

After the answer ``101`` the connection is raw: what is written is the container's stdin; what
is read is a sequence of frames, each with an eight-byte header of the stream's number, three
zeros and the payload's length, big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import quote

from forge_core.errors import EngineUnreachable
from forge_edges.docker_context import DockerEndpoint
from forge_edges.docker_errors import short
from forge_edges.docker_stream import Exchange, exchange

STDOUT: Final = 1
STDERR: Final = 2
SYSTEM_ERROR: Final = 3
MAX_PIECE_BYTES: Final = 64 * 1024
_HEADER = struct.Struct(">B3xI")


class DockerAttachment:
    """Keeps :class:`forge_core.ports.Attachment`."""

    def __init__(self, container: str, raw: Exchange) -> None:
        self._container = short(container)
        self._raw = raw
        self._stream = 0
        self._remaining = 0

    async def send(self, data: bytes) -> None:
        """Write to stdin; waits while the container does not read.

        :raises EngineUnreachable: the connection is gone.
        """
        await self._raw.send(data)

    async def receive(self) -> tuple[int, bytes] | None:
        """The next piece of at most 64 KiB, whatever the frame announces; None at the end.

        An engine that is killed ends the stream as a container that ends does:
        the end alone proves nothing about the container.

        :raises EngineUnreachable: the connection broke, or ended inside a frame.
        """
        while self._remaining == 0:
            first = await self._raw.read_some(1)
            if not first:
                return None
            header = first + await self._raw.read_exactly(_HEADER.size - 1)
            self._stream, self._remaining = _HEADER.unpack(header)
            if self._stream not in {STDOUT, STDERR, SYSTEM_ERROR}:
                raise EngineUnreachable(
                    f"cannot read the output of container {self._container}: "
                    f"frame of unknown stream {self._stream}"
                )
        piece = await self._raw.read_some(min(self._remaining, MAX_PIECE_BYTES))
        if not piece:
            raise EngineUnreachable(
                f"cannot read the output of container {self._container}: "
                "the connection ended inside a frame"
            )
        self._remaining -= len(piece)
        if self._stream == SYSTEM_ERROR:
            raise EngineUnreachable(
                f"cannot read the output of container {self._container}: the engine says "
                + " ".join(piece[:500].decode(errors="replace").split())
            )
        return self._stream, piece


@asynccontextmanager
async def attach(
    endpoint: DockerEndpoint, api_version: str, container: str, *, timeout_ms: int
) -> AsyncIterator[DockerAttachment]:
    """Attach to stdin, stdout and stderr; leaving the block, or cancelling it, detaches.

    :param timeout_ms: for the upgrade; afterwards the streams have no limit of their own.
    :raises EngineNotFound: no such container.
    """
    what = f"attach to container {short(container)}"
    target = (
        f"/v{api_version}/containers/{quote(container, safe='')}/attach"
        "?stream=1&stdin=1&stdout=1&stderr=1"
    )
    async with exchange(endpoint, what, timeout_ms=timeout_ms) as raw:
        headers = {"Connection": "Upgrade", "Upgrade": "tcp", "Content-Length": "0"}
        await raw.send_head("POST", target, headers)
        head = await raw.read_head()
        await raw.raise_for_error(head)
        if head.status != 101:
            raise EngineUnreachable(f"cannot {what}: no upgrade, the answer is {head.status}")
        yield DockerAttachment(container, raw)
