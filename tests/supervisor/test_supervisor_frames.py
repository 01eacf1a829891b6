"""What the supervisor lets in, and what it makes of it: the pure part."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pid1 import SOURCE, init_frame

from forge_supervisor.supervisor import Init, Lines, Outbox, Refused, decode_frame, encode_frame


@given(st.lists(st.binary(max_size=40)), st.integers(1, 30))
def test_lines_are_the_same_however_they_arrive(lines: list[bytes], size_bytes: int) -> None:
    lines = [line.replace(b"\n", b"") for line in lines]
    wire = b"".join(line + b"\n" for line in lines)
    reader = Lines(limit_bytes=20)
    got = [
        line
        for at in range(0, len(wire), size_bytes)
        for line in reader.feed(wire[at : at + size_bytes])
    ]
    assert got == [line if len(line) <= 20 else None for line in lines]


def test_an_endless_line_takes_no_memory() -> None:
    reader = Lines(limit_bytes=1024)
    for _ in range(1000):
        assert reader.feed(b"x" * 1024) == []
        assert len(reader._line) <= 1024
    assert reader.feed(b"\nshort\n") == [None, b"short"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b'"init"',
        b"{}",
        b'{"type":1}',
        b'{"type":["lease"]}',
        b'{"type":"lease"',
        b'{"type":"lease"} {}',
        b'{"type":"lease","ttlMs":NaN}',
        b'{"type":"lease","ttlMs":-Infinity}',
        b'{"type":"lease","ttlMs":+1}',
        b'{"type":"lease","ttlMs":007}',
        b'{"type":"lease","ttlMs":' + b"9" * 500_000 + b"}",
        b'\xef\xbb\xbf{"type":"lease"}',
        b'{"type":"lease\xff"}',
        '{"type":"lease"}'.encode("utf-16"),
        b'{"type":"lease","a":' + b"[" * 500_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda line: repr(line[:30]),
)
def test_a_line_that_is_no_frame_is_malformed(line: bytes) -> None:
    with pytest.raises(Refused) as refusal:
        decode_frame(line)
    assert refusal.value.reason == "malformed"


def test_a_line_that_was_too_long_is_oversized() -> None:
    with pytest.raises(Refused) as refusal:
        decode_frame(None)
    assert refusal.value.reason == "oversized"


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(line: bytes) -> None:
    try:
        frame = decode_frame(line)
    except Refused:
        return
    assert isinstance(frame["type"], str)


def test_init_is_read_whole_and_unknown_properties_are_ignored() -> None:
    init = Init(init_frame("a", "ü", env={"A": "ä", "B": ""}, cwd="/tmp", later="x"))
    assert (init.argv, init.env, init.cwd) == (
        [b"a", "ü".encode()],
        {b"A": "ä".encode(), b"B": b""},
        b"/tmp",
    )
    assert (init.fence, init.sequence, init.lease_ms, init.grace_ms) == (7, 2, 60_000, 200)
    assert init.key == bytes(range(32))


NOT_INTEGERS = (None, True, 1.0, "1", -1, -0.0, 2**63, [1])


NO_ENVIRONMENTS: tuple[object, ...] = (
    *(None, [], {"": "x"}, {"A=B": "x"}, {"A": 1}, {"A": None}),
    *({"A\0": "x"}, {"A": "x\0"}, {"A": "\udfff"}, {"\ud83d": "x"}),
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, v) for name in ("fence", "sequence", "leaseMs") for v in NOT_INTEGERS),
        *((name, v) for name in ("hardWallMs", "idleMs", "graceMs") for v in NOT_INTEGERS),
        *(("maxOutputBytes", v) for v in NOT_INTEGERS),
        *((name, 8 * 3_600_000 + 1) for name in ("leaseMs", "hardWallMs", "idleMs")),
        *((name, 0) for name in ("fence", "hardWallMs", "idleMs")),
        *(("attemptId", v) for v in (None, 1, "", "-a", "_a", "a\nb", "ä", "a/b", "a" * 129)),
        ("key", None),
        ("key", ""),
        ("key", "AAAA"),
        ("key", "é" * 44),
        ("key", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"),  # no padding
        ("key", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh9="),  # stray bits
        ("key", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh\n="),
        *(("argv", v) for v in (None, [], "ls", [""], [1], ["a\0b"], ["\ud800"], [["a"]])),
        *(("env", v) for v in NO_ENVIRONMENTS),
        *(("cwd", v) for v in (None, 1, "a\0b", "\ud800")),
    ],
    ids=lambda v: repr(v)[:24],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    frame = init_frame()
    frame[field] = value
    with pytest.raises(Refused) as refusal:
        Init(frame)
    assert (refusal.value.reason, str(refusal.value)) == ("malformed", f"malformed: {field}")
    del frame[field]
    with pytest.raises(Refused):
        Init(frame)


def test_the_first_frame_is_init() -> None:
    with pytest.raises(Refused) as refusal:
        Init(init_frame(type="lease"))
    assert refusal.value.reason == "unexpected"


def test_control_frames_go_before_logs_and_a_begun_frame_is_finished() -> None:
    outbox = Outbox()
    outbox.logs.__init__(1000)  # type: ignore[misc]
    outbox.logs.feed("stdout", b"one")
    first = outbox.head()
    outbox.wrote(5)
    outbox.logs.feed("stdout", b"two")
    outbox.last(type="exit", code=0)
    for _ in range(1000):
        outbox.refuse("bad_mac")
    outbox.control(type="expired", which="lease")
    wire = first[:5]
    while outbox.head():
        wire += outbox.head()
        outbox.wrote(len(outbox.head()))
    frames = [json.loads(line) for line in wire.splitlines()]
    assert [frame["type"] for frame in frames] == ["log", "expired", "refused", "log", "exit"]
    assert frames[2] == {"type": "refused", "reason": "bad_mac", "count": 1000}


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text("\n\r\0é\u2028")))
def test_a_frame_is_one_line(frame: dict[str, Any]) -> None:
    line = encode_frame(frame)
    assert line.count(b"\n") == 1
    assert json.loads(line) == frame


def test_the_source_fits_into_one_argument() -> None:
    assert len(SOURCE.encode()) < 60_000  # the kernel takes 128 KiB (MAX_ARG_STRLEN)
