"""Every byte of the agent is forwarded or counted, within a bound."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forge_supervisor.supervisor import LOG_BUFFER_BYTES, READ_BYTES, Logs


def frames(logs: Logs) -> list[dict[str, Any]]:
    taken = []
    while frame := logs.pop():
        taken.append(json.loads(frame))
    return taken


def text_of(taken: list[dict[str, Any]], stream: str = "stdout") -> str:
    return "".join(frame["text"] for frame in taken if frame["stream"] == stream)


def dropped_in(taken: list[dict[str, Any]]) -> int:
    return sum(frame["droppedBytes"] for frame in taken)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 5))
def test_characters_survive_any_split(text: str, size_bytes: int) -> None:
    data, logs = text.encode(), Logs(10**9)
    for at in range(0, len(data), size_bytes):
        logs.feed("stdout", data[at : at + size_bytes])
    logs.feed("stdout", b"", final=True)
    taken = frames(logs)
    assert (text_of(taken), dropped_in(taken)) == (text, 0)


@given(st.lists(st.binary(max_size=20)))
def test_what_is_not_utf8_is_replaced(chunks: list[bytes]) -> None:
    logs = Logs(10**9)
    for chunk in chunks:
        logs.feed("stderr", chunk)
    logs.feed("stderr", b"", final=True)
    assert text_of(frames(logs), "stderr") == b"".join(chunks).decode("utf-8", "replace")


@given(
    st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.text("aé€😀", max_size=9))),
    st.integers(0, 60),
)
def test_beyond_the_limit_everything_is_counted(
    chunks: list[tuple[str, str]], limit_bytes: int
) -> None:
    logs = Logs(limit_bytes)
    total_bytes = 0
    for stream, text in chunks:
        total_bytes += len(text.encode())
        logs.feed(stream, text.encode())
    for stream in ("stdout", "stderr"):
        logs.feed(stream, b"", final=True)
    taken = frames(logs)
    assert dropped_in(taken) == max(0, total_bytes - limit_bytes)


def test_the_limit_is_told_at_once_and_the_rest_at_the_end() -> None:
    logs = Logs(4)
    logs.feed("stdout", b"abcdef")
    told = frames(logs)
    assert [(f["text"], f["droppedBytes"]) for f in told] == [("abcd", 0), ("", 2)]
    for _ in range(1000):
        logs.feed("stdout", b"x" * 100)
    assert frames(logs) == []
    logs.feed("stdout", b"", final=True)
    assert [(f["text"], f["droppedBytes"]) for f in frames(logs)] == [("", 100_000)]


def test_a_full_buffer_drops_and_says_how_much() -> None:
    logs = Logs(10**12)
    chunk, fed_bytes = "é".encode() * (READ_BYTES // 2), 0
    for _ in range(200):
        logs.feed("stdout", chunk)
        fed_bytes += len(chunk)
    assert logs.full
    assert logs._size_bytes < LOG_BUFFER_BYTES + 2 * len(chunk)
    first = json.loads(logs.pop() or b"")
    logs.feed("stdout", b"after")
    taken = [first, *frames(logs)]
    assert taken[-1]["text"] == "after"
    assert taken[-1]["droppedBytes"] > 0
    assert len(text_of(taken).encode()) + dropped_in(taken) == fed_bytes + 5


def test_an_abandoned_buffer_is_counted_too() -> None:
    logs = Logs(10**12)
    for stream in ("stdout", "stderr"):
        for _ in range(200):
            logs.feed(stream, b"x" * 10_000)
    logs.abandon()
    logs.abandon()
    taken = frames(logs)
    assert sorted((f["stream"], f["text"], f["droppedBytes"]) for f in taken) == [
        ("stderr", "", 2_000_000),
        ("stdout", "", 2_000_000),
    ]


def test_a_frame_is_bounded_whatever_the_bytes_are() -> None:
    for byte in (b"\0", b"\xff", b'"', b"x"):
        logs = Logs(10**12)
        logs.feed("stdout", b"\xf0\x9f\x98")
        logs.feed("stdout", byte * READ_BYTES)
        frame = logs.pop()
        assert frame
        assert len(frame) < 128 * 1024
