"""The frames of PID 1, as a hostile container may send them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forge_core.lease import Deadline
from forge_core.supervisor_frames import (
    DEADLINE_EXIT_CODES,
    MAX_FRAME_BYTES,
    DeadlinePassed,
    Frame,
    FrameReader,
    FrameRefused,
    LogChunk,
    ProcessEnded,
    ProcessStarted,
    SupervisorReady,
    cancel_frame,
    lease_frame,
)
from forge_core.wire.base import MAX_INT
from forge_core.wire.codes import OutputStream
from forge_core.wire.from_hub import LeaseUpdate

GOOD: list[tuple[dict[str, Any], Frame]] = [
    ({"type": "ready"}, SupervisorReady()),
    ({"type": "started", "pid": 7}, ProcessStarted()),
    (
        {"type": "log", "stream": "stdout", "text": "é\n", "droppedBytes": 3},
        LogChunk(OutputStream.STDOUT, "é\n", 3),
    ),
    ({"type": "log", "stream": "stderr", "text": ""}, LogChunk(OutputStream.STDERR, "", 0)),
    ({"type": "exit", "code": 0}, ProcessEnded(0, None)),
    ({"type": "exit", "code": 255}, ProcessEnded(255, None)),
    ({"type": "exit", "signal": 9}, ProcessEnded(None, 9)),
    ({"type": "expired", "which": "lease"}, DeadlinePassed(Deadline.LEASE)),
    ({"type": "expired", "which": "hardWall"}, DeadlinePassed(Deadline.HARD_WALL)),
    ({"type": "expired", "which": "idle"}, DeadlinePassed(Deadline.IDLE)),
    ({"type": "refused", "reason": "mac", "count": 2}, FrameRefused("mac", 2)),
]
UNREADABLE: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b'"ready"',
    b"{",
    b"{}",
    b'{"type":"unknown"}',
    b'{"type":["ready"]}',
    b'{"type":"log","stream":[],"text":"x"}',
    b'{"type":"log","stream":{},"text":"x"}',
    b'{"type":"log","stream":"stdin","text":"x"}',
    b'{"type":"log","stream":"stdout","text":1}',
    b'{"type":"log","stream":"stdout","text":"x","droppedBytes":-1}',
    b'{"type":"log","stream":"stdout","text":"x","droppedBytes":true}',
    b'{"type":"log","stream":"stdout","text":"x","droppedBytes":NaN}',
    b'{"type":"log","stream":"stdout","text":"x","droppedBytes":9223372036854775808}',
    b'{"type":"log","stream":"stdout","text":"x","droppedBytes":' + b"9" * 5000 + b"}",
    b'{"type":"exit"}',
    b'{"type":"exit","code":null,"signal":null}',
    b'{"type":"exit","code":0,"signal":9}',
    b'{"type":"exit","code":256}',
    b'{"type":"exit","code":-1}',
    b'{"type":"exit","code":true}',
    b'{"type":"exit","code":0.0}',
    b'{"type":"exit","signal":0}',
    b'{"type":"exit","signal":65}',
    b'{"type":"expired","which":"wall"}',
    b'{"type":"expired","which":[]}',
    b'{"type":"refused","reason":1,"count":1}',
    b'{"type":"refused","reason":"x"}',
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b"\xff\xfe",
    b'{"type":"ready","x":"\xed\xa0\x80"}',
    json.dumps({"type": "ready"}).encode("utf-16"),
]


def read(data: bytes, cuts: list[int] | None = None) -> tuple[list[Frame], int]:
    reader, frames = FrameReader(), list[Frame]()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts or []), len(data)]
    for begin, end in pairwise(edges):
        frames += reader.feed(data[begin:end])
        assert len(reader._buffer) <= MAX_FRAME_BYTES
    return frames, reader.unreadable


@pytest.mark.requirement("B-71")
@pytest.mark.parametrize(("sent", "frame"), GOOD)
def test_each_frame(sent: dict[str, Any], frame: Frame) -> None:
    assert read(json.dumps(sent).encode() + b"\n") == ([frame], 0)


@pytest.mark.parametrize("line", UNREADABLE, ids=lambda line: line[:50].decode("latin-1"))
def test_what_is_no_frame_is_counted_and_its_neighbours_are_read(line: bytes) -> None:
    data = b'{"type":"ready"}\n' + line + b'\n{"type":"started"}\n'
    assert read(data) == ([SupervisorReady(), ProcessStarted()], 1)


lines = st.one_of(
    st.sampled_from([json.dumps(sent).encode() for sent, _ in GOOD] + UNREADABLE[:20]),
    st.binary(max_size=40),
)


@given(st.lists(lines, max_size=6), st.lists(st.integers(0, 400), max_size=8))
def test_any_split_gives_the_same_frames(parts: list[bytes], cuts: list[int]) -> None:
    data = b"\n".join(parts)
    assert read(data, cuts) == read(data)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
@example(b'{"type":"log","stream":[],"text":""}\n', [])
def test_no_bytes_make_it_raise(data: bytes, cuts: list[int]) -> None:
    frames, unreadable = read(data, cuts)
    assert len(frames) + unreadable == data.count(b"\n")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
KEYS = ["stream", "text", "droppedBytes", "code", "signal", "which", "reason", "count"]


@given(
    st.sampled_from(["ready", "started", "log", "exit", "expired", "refused"]),
    st.dictionaries(st.sampled_from(KEYS), json_values),
)
def test_no_values_make_it_raise(kind: str, values: dict[str, Any]) -> None:
    frames, unreadable = read(json.dumps({**values, "type": kind}).encode() + b"\n")
    assert len(frames) + unreadable == 1
    for frame in frames:
        for name in getattr(frame, "__slots__", ()):
            value = getattr(frame, name)
            assert not isinstance(value, str) or value.encode()
            assert type(value) is not int or 0 <= value <= MAX_INT


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES - 1, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1])
@pytest.mark.parametrize("cut", [1, 1000, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1])
def test_the_longest_line(size: int, cut: int) -> None:
    line = b'{"type":"ready","x":"' + b"x" * (size - 23) + b'"}'
    assert len(line) == size
    frames, unreadable = read(line + b'\n{"type":"started"}\n', [cut])
    fits = size <= MAX_FRAME_BYTES
    assert frames == ([SupervisorReady()] if fits else []) + [ProcessStarted()]
    assert unreadable == (0 if fits else 1)


def test_a_flood_without_a_newline_takes_no_memory() -> None:
    reader = FrameReader()
    for _ in range(64):
        assert list(reader.feed(b"x" * 65_536)) == []
        assert len(reader._buffer) <= MAX_FRAME_BYTES
    assert list(reader.feed(b'\n{"type":"ready"}\n')) == [SupervisorReady()]
    assert reader.unreadable == 1


def test_lone_surrogates_do_not_break_whoever_sends_them_on() -> None:
    sent = rb'{"type":"log","stream":"stdout","text":"a\ud800b\ud83d\ude00c"}' + b"\n"
    assert read(sent)[0] == [LogChunk(OutputStream.STDOUT, "a\ufffdb\U0001f600c", 0)]
    sent = rb'{"type":"refused","reason":"\udfff","count":1}' + b"\n"
    assert read(sent)[0] == [FrameRefused("\ufffd", 1)]


@pytest.mark.requirement("B-70")
def test_a_renewal_is_handed_on_as_it_came() -> None:
    update = LeaseUpdate(
        attempt_id="a",
        fence=1,
        sequence=3,
        ttl_ms=60_000,
        issued_at="2026-11-29T14:00:00Z",
        mac="m",
    )
    frame = lease_frame(update)
    assert frame.endswith(b"\n")
    assert frame.count(b"\n") == 1
    assert json.loads(frame) == {
        "type": "lease",
        "sequence": 3,
        "ttlMs": 60_000,
        "issuedAt": "2026-11-29T14:00:00Z",
        "mac": "m",
    }
    assert json.loads(cancel_frame(5_000)) == {"type": "cancel", "graceMs": 5_000}


@pytest.mark.requirement("B-71")
def test_each_deadline_has_an_exit_code_of_its_own() -> None:
    assert set(DEADLINE_EXIT_CODES.values()) == set(Deadline)
