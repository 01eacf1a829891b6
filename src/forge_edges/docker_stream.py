"""One HTTP/1.1 request on a connection of its own, without a thread (RFC 9112).

The SDK answers short requests in worker threads.  What may take hours or carry gigabytes
(attach, wait, archives) goes through here instead: awaiting costs no thread, cancelling closes
the socket at once, and memory stays flat.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio
from anyio.abc import ByteStream

from forge_core.errors import EngineUnreachable
from forge_edges.docker_context import DockerEndpoint
from forge_edges.docker_errors import from_status, timed_out, translated

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_BODY_BYTES: Final = 1 << 20
CHUNK_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]


class Exchange:
    """A request being sent and its answer being read; made by :func:`exchange`."""

    def __init__(self, what: str, stream: ByteStream, timeout_ms: int) -> None:
        self.what = what
        self._stream = stream
        self._buffer = bytearray()
        self._timeout_s = timeout_ms / 1000

    async def send(self, data: bytes) -> None:
        """Raw bytes; waits as long as the other side does not read."""
        with translated(self.what):
            await self._stream.send(data)

    async def send_head(self, method: str, target: str, headers: Mapping[str, str]) -> None:
        """Request line and headers."""
        lines = [f"{method} {target} HTTP/1.1", "Host: docker"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))

    async def send_chunk(self, data: bytes) -> None:
        """One piece of a chunked body (RFC 9112, 7.1); bounded in time, empty ends the body.

        :raises EngineTimedOut: the engine has not taken it in time.
        """
        with anyio.move_on_after(self._timeout_s):
            await self.send(b"%x\r\n%b\r\n" % (len(data), data))
            return
        raise timed_out(self.what)

    async def read_head(self) -> Head:
        """Status line and headers.

        :raises EngineTimedOut: they did not come in time.
        """
        with anyio.move_on_after(self._timeout_s), translated(self.what):
            raw = await self._read_until(b"\r\n\r\n", MAX_HEAD_BYTES)
            status_line, *lines = raw.decode("latin-1").split("\r\n")
            version, status = status_line.split(" ", 2)[:2]
            if not version.startswith("HTTP/1."):
                raise ValueError(f"it speaks {version[:20]!r}")
            pairs = (line.partition(":") for line in lines)
            return Head(int(status), {n.strip().lower(): v.strip() for n, _, v in pairs})
        raise timed_out(self.what)

    async def read_json(self, head: Head) -> dict[str, Any]:
        """The whole body as a JSON object; not bounded in time, the caller's scope is."""
        with translated(self.what):
            value = json.loads(await self._read_body(head) or b"{}")
        return value if isinstance(value, dict) else {}

    async def raise_for_error(self, head: Head) -> None:
        """Raise what an answer other than 1xx and 2xx means, with the engine's own words."""
        if head.status < 300:
            return
        body = b""
        with anyio.move_on_after(self._timeout_s), translated(self.what):
            body = await self._read_body(head)
        raise from_status(self.what, head.status, _message_of(body))

    async def read_exactly(self, count: int) -> bytes:
        """``count`` raw bytes.

        :raises EngineUnreachable: the stream ends before.
        """
        with translated(self.what):
            while len(self._buffer) < count:
                await self._fill()
            return self._take(count)

    async def read_some(self, limit: int) -> bytes:
        """At least one raw byte, at most ``limit``; empty at the end of the stream."""
        if not self._buffer:
            with translated(self.what):
                try:
                    await self._fill()
                except anyio.EndOfStream:
                    return b""
        return self._take(limit)

    async def _fill(self) -> None:
        self._buffer += await self._stream.receive(MAX_HEAD_BYTES)

    def _take(self, count: int) -> bytes:
        piece = bytes(memoryview(self._buffer)[:count])
        del self._buffer[:count]
        return piece

    async def _read_until(self, delimiter: bytes, limit: int) -> bytes:
        while (index := self._buffer.find(delimiter)) < 0:
            self._bounded(len(self._buffer), limit)
            await self._fill()
        line = self._take(index)
        self._take(len(delimiter))
        return line

    async def _read_body(self, head: Head) -> bytes:
        if "chunked" in head.headers.get("transfer-encoding", ""):
            return await self._read_chunks()
        if (length := head.headers.get("content-length")) is not None:
            return await self.read_exactly(self._bounded(int(length)))
        body = bytearray()
        while piece := await self.read_some(CHUNK_BYTES):
            body += piece
            self._bounded(len(body))
        return bytes(body)

    async def _read_chunks(self) -> bytes:
        body = bytearray()
        while True:
            line = await self._read_until(b"\r\n", 1024)
            size = int(line.partition(b";")[0], 16)
            self._bounded(len(body) + size)
            if size == 0:
                return bytes(body)
            body += await self.read_exactly(size)
            await self.read_exactly(2)

    def _bounded(self, size_bytes: int, limit: int = MAX_BODY_BYTES) -> int:
        if not 0 <= size_bytes <= limit:
            raise EngineUnreachable(
                f"cannot {self.what}: a part of the answer is larger than {limit} bytes"
            )
        return size_bytes


def _message_of(body: bytes) -> str:
    """The engine's ``message``; a refused attach is told as plain text (20.10, 26.1)."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return body.decode(errors="replace")


@asynccontextmanager
async def exchange(
    endpoint: DockerEndpoint, what: str, *, timeout_ms: int
) -> AsyncIterator[Exchange]:
    """A connection for one request; closed, also by cancellation, when the block ends.

    :param what: what is being done, as in "cannot <what>".
    :param timeout_ms: for connecting, for each chunk sent, and for the answer's head.
    :raises EngineUnreachable: nothing listens there.
    :raises EngineTimedOut: it does not accept in time.
    """
    stream: ByteStream | None = None
    with anyio.move_on_after(timeout_ms / 1000), translated(what):
        stream = await _connect(endpoint)
    if stream is None:
        raise timed_out(what)
    try:
        yield Exchange(what, stream, timeout_ms)
    finally:
        # Nothing is owed to the engine any more: no TLS farewell, no waiting.
        await anyio.aclose_forcefully(stream)


async def _connect(endpoint: DockerEndpoint) -> ByteStream:
    if (path := endpoint.socket_path) is not None:
        return await anyio.connect_unix(path)
    host, port = endpoint.address
    if endpoint.tls is None:
        return await anyio.connect_tcp(host, port)
    context = await anyio.to_thread.run_sync(endpoint.tls.context)
    return await anyio.connect_tcp(
        host, port, tls=True, ssl_context=context, tls_standard_compatible=False
    )
