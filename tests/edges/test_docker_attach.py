"""The attached streams against a scripted engine: fragments, lies, silence and cancellation."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import EngineNotFound, EngineTimedOut, EngineUnreachable, ForgeError
from forge_edges.docker_attach import MAX_PIECE_BYTES, attach
from forge_edges.docker_context import DockerEndpoint

UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
TIMEOUT_MS = 5_000


def frame(stream: int, payload: bytes, announced: int | None = None) -> bytes:
    length = len(payload) if announced is None else announced
    return struct.pack(">BxxxI", stream, length) + payload


class ScriptedEngine:
    """Answers one attach with given packets, then ends the connection or keeps it open."""

    def __init__(self, packets: Sequence[bytes], *, keep_open: bool = False) -> None:
        self._packets = packets
        self._keep_open = keep_open
        self.received = b""
        self.gone = anyio.Event()

    async def serve(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            while b"\r\n\r\n" not in self.received:
                self.received += await stream.receive()
            for packet in self._packets:
                await stream.send(packet)
            if self._keep_open:
                await self._read_to_the_end(stream)
        self.gone.set()

    async def _read_to_the_end(self, stream: anyio.abc.SocketStream) -> None:
        try:
            while True:
                self.received += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return


@asynccontextmanager
async def listening(engine: ScriptedEngine, folder: Path) -> AsyncIterator[DockerEndpoint]:
    path = folder / "engine.sock"
    async with await anyio.create_unix_listener(path) as door, anyio.create_task_group() as tasks:
        tasks.start_soon(door.serve, engine.serve)
        yield DockerEndpoint(f"unix://{path}", "test")
        tasks.cancel_scope.cancel()


async def collect(engine: ScriptedEngine, folder: Path) -> list[tuple[int, bytes]]:
    pieces: list[tuple[int, bytes]] = []
    failure: ForgeError | None = None
    async with listening(engine, folder) as endpoint:
        try:
            async with attach(endpoint, "1.45", "c1", timeout_ms=TIMEOUT_MS) as attachment:
                while (piece := await attachment.receive()) is not None:
                    pieces.append(piece)
        except ForgeError as error:
            failure = error
    if failure is not None:
        raise failure
    return pieces


def joined(pieces: Sequence[tuple[int, bytes]]) -> dict[int, bytes]:
    return {n: b"".join(data for stream, data in pieces if stream == n) for n in (1, 2)}


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=50)), max_size=8),
    st.integers(1, 60),
)
async def test_frames_survive_any_fragmentation(
    tmp_path_factory: pytest.TempPathFactory, frames: list[tuple[int, bytes]], size: int
) -> None:
    wire = UPGRADED + b"".join(frame(stream, payload) for stream, payload in frames)
    packets = [wire[start : start + size] for start in range(0, len(wire), size)]
    folder = tmp_path_factory.mktemp("engine")
    assert joined(await collect(ScriptedEngine(packets), folder)) == joined(frames)


async def test_a_frame_is_handed_on_in_bounded_pieces(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 1024
    pieces = await collect(ScriptedEngine([UPGRADED, frame(1, payload)]), tmp_path)
    assert max(len(data) for _, data in pieces) <= MAX_PIECE_BYTES
    assert joined(pieces)[1] == payload


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (frame(1, b"some", announced=2**32 - 1), "inside a frame"),
        (frame(1, b"ok") + b"\x01\x00\x00", "connection to the engine broke"),
        (frame(9, b"x"), "unknown stream 9"),
        (frame(0, b"x"), "unknown stream 0"),
        (frame(3, b"log\nbroke"), "the engine says log broke"),
    ],
)
async def test_a_stream_that_makes_no_sense_is_an_error(
    tmp_path: Path, rest: bytes, words: str
) -> None:
    with pytest.raises(EngineUnreachable, match=words):
        await collect(ScriptedEngine([UPGRADED, rest]), tmp_path)


def answer(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


@pytest.mark.parametrize(
    ("packets", "kind", "words"),
    [
        (
            [answer("404 Not Found", b'{"message": "No such container: c1"}')],
            EngineNotFound,
            "No such",
        ),
        ([answer("404 Not Found", b"No such container: c1")], EngineNotFound, "No such"),
        ([answer("404 Not Found", b"")], EngineNotFound, "404"),
        (
            [b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ngone!\r\n0\r\n\r\n"],
            EngineNotFound,
            "gone!",
        ),
        ([answer("200 OK", b"")], EngineUnreachable, "no upgrade"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], EngineUnreachable, "not the Docker Engine API"),
        ([b"\r\n\r\n"], EngineUnreachable, "not the Docker Engine API"),
        ([b"HTTP/1.1 abc\r\n\r\n"], EngineUnreachable, "not the Docker Engine API"),
        ([b"HTTP/1.1 101 X\r\nA: " + b"a" * 200_000], EngineUnreachable, "larger than"),
        ([b"HTTP/1.1 404 X\r\nContent-Length: 999999999\r\n\r\n"], EngineUnreachable, "larger"),
        ([], EngineUnreachable, "broke"),
    ],
)
async def test_a_refusal_is_told_by_kind(
    tmp_path: Path, packets: list[bytes], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as error:
        await collect(ScriptedEngine(packets), tmp_path)
    assert str(error.value).startswith("cannot attach to container c1: ")


@pytest.mark.parametrize("packets", [[], [UPGRADED[:-3]]])
async def test_an_engine_that_falls_silent_is_not_waited_for(
    tmp_path: Path, packets: list[bytes]
) -> None:
    engine = ScriptedEngine(packets, keep_open=True)
    with anyio.fail_after(TIMEOUT_MS / 1000):
        async with listening(engine, tmp_path) as endpoint:
            with pytest.raises(EngineTimedOut):
                async with attach(endpoint, "1.45", "c1", timeout_ms=100):
                    pytest.fail("attached to silence")


async def test_nothing_listens(tmp_path: Path) -> None:
    endpoint = DockerEndpoint(f"unix://{tmp_path}/none.sock", "test")
    with pytest.raises(EngineUnreachable, match="nothing listens"):
        async with attach(endpoint, "1.45", "c1", timeout_ms=TIMEOUT_MS):
            pytest.fail("attached to nothing")


async def test_the_name_of_a_container_stays_one_path_segment(tmp_path: Path) -> None:
    engine = ScriptedEngine([UPGRADED])
    async with (
        listening(engine, tmp_path) as endpoint,
        attach(endpoint, "1.45", "../images/x?y", timeout_ms=TIMEOUT_MS),
    ):
        pass
    assert engine.received.startswith(b"POST /v1.45/containers/..%2Fimages%2Fx%3Fy/attach?")


@pytest.mark.parametrize("cancelled", [True, False])
async def test_leaving_and_cancelling_close_the_socket(tmp_path: Path, cancelled: bool) -> None:
    engine = ScriptedEngine([UPGRADED], keep_open=True)
    async with listening(engine, tmp_path) as endpoint:
        with anyio.CancelScope() as scope:
            async with attach(endpoint, "1.45", "c1", timeout_ms=TIMEOUT_MS) as attachment:
                await attachment.send(b"last words")
                if cancelled:
                    scope.cancel()
                    await attachment.receive()
        with anyio.fail_after(TIMEOUT_MS / 1000):
            await engine.gone.wait()
    assert engine.received.endswith(b"last words")
