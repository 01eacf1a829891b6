"""A ledger holds what it said it holds, whatever is killed, torn, flipped or full."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import DiskUnusable, RefusedError
from forge_core.ledger import (
    MAX_RECORD_BYTES,
    LedgerContents,
    complete_line,
    encode_body,
    parse_ledger,
)
from forge_core.ready import RecordKind
from forge_edges import ledger_file
from forge_edges.ledger_file import ROOM_BYTES, LedgerFile, read_ledger

pytestmark = pytest.mark.requirement("B-24")

TIME = "2026-11-29T14:00:00.000Z"
WRITER = """
import sys
from pathlib import Path
import anyio
from forge_edges.ledger_file import LedgerFile

async def main():
    ledger = await LedgerFile.create(Path(sys.argv[1]), utc=lambda: "now")
    async def write(n):
        for k in range(10_000):
            await ledger.append("fact", {"writer": n, "k": k})
            print(n, k, flush=True)
    async with anyio.create_task_group() as tasks:
        for n in range(4):
            tasks.start_soon(write, n)

anyio.run(main)
"""


async def begin(path: Path) -> LedgerFile:
    return await LedgerFile.create(path, utc=lambda: TIME)


def said(contents: LedgerContents) -> list[object]:
    return [dict(record.data)["n"] for record in contents.records]


def example_ledger(count: int = 4) -> bytes:
    return b"".join(
        complete_line(n, encode_body(TIME, "fact", {"n": n, "text": "x" * 20 * n}))
        for n in range(1, count + 1)
    )


async def test_what_cannot_begin_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ledger_file, "sync_directory", broken)
    with pytest.raises(DiskUnusable):
        await begin(tmp_path / "a")
    monkeypatch.undo()
    ledger = await begin(tmp_path / "a")
    await ledger.close()


async def test_records_come_back_in_order_with_time_and_kind(tmp_path: Path) -> None:
    path = tmp_path / "a1.1.ledger"
    ledger = await begin(path)
    await ledger.append(RecordKind.INTENT, {"name": "böse\n\0zeile", "n": 1})
    await ledger.append("fact", {"n": 2})
    await ledger.close()
    contents = read_ledger(path)
    assert (contents.torn_tail, contents.suspect) == (False, None)
    assert [(r.sequence, r.time, r.kind) for r in contents.records] == [
        (1, TIME, "intent"),
        (2, TIME, "fact"),
    ]
    assert contents.records[0].data == {"name": "böse\n\0zeile", "n": 1}
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes().splitlines()) == 2


async def test_a_ledger_begins_once(tmp_path: Path) -> None:
    ledger = await begin(tmp_path / "a")
    with pytest.raises(RefusedError) as refused:
        await begin(tmp_path / "a")
    assert refused.value.code == "file_exists"
    await ledger.close()
    await ledger.close()
    with pytest.raises(RefusedError) as closed:
        await ledger.append("fact", {})
    assert closed.value.code == "ledger_closed"


async def test_concurrent_appends_share_syncs_and_keep_the_order_of_the_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[int] = []
    go_on = threading.Event()
    fdatasync = os.fdatasync

    def sync(descriptor: int) -> None:
        if not syncs:
            assert go_on.wait(30)
        syncs.append(descriptor)
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    ledger = await begin(tmp_path / "a")
    async with anyio.create_task_group() as tasks:
        for n in range(64):
            tasks.start_soon(ledger.append, "fact", {"n": n})
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    await ledger.close()
    assert len(syncs) <= 3
    assert said(read_ledger(tmp_path / "a")) == list(range(64))


async def test_an_append_returns_after_its_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def sync(_descriptor: int) -> None:
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(os, "fdatasync", sync)
    ledger = await begin(tmp_path / "a")
    returned = anyio.Event()

    async def append() -> None:
        await ledger.append("intent", {"n": 1})
        returned.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(append)
        await anyio.to_thread.run_sync(begun.wait, 30)
        assert not returned.is_set()
        go_on.set()
    assert returned.is_set()
    await ledger.close()


async def test_a_cancelled_append_is_carried_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    fdatasync = os.fdatasync

    def sync(descriptor: int) -> None:
        begun.set()
        assert go_on.wait(30)
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    ledger = await begin(tmp_path / "a")
    scope, ended = anyio.CancelScope(), anyio.Event()

    async def append() -> None:
        with scope:
            await ledger.append("fact", {"n": 1})
            await anyio.lowlevel.checkpoint()
            pytest.fail("the cancellation was swallowed")
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(append)
        await anyio.to_thread.run_sync(begun.wait, 30)
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not ended.is_set(), "nobody goes on while the disk does"
        go_on.set()
    await ledger.append("fact", {"n": 2})
    await ledger.close()
    assert said(read_ledger(tmp_path / "a")) == [1, 2]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_a_write_that_fails_half_way_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "a"
    ledger = await begin(path)
    await ledger.append("fact", {"n": 1})
    write = os.write
    answers = iter([20])

    def write_a_little(descriptor: int, data: memoryview) -> int:
        for size in answers:
            return write(descriptor, data[:size])
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_a_little)
        async with anyio.create_task_group() as tasks:
            for n in (2, 3):
                tasks.start_soon(expect_failure, ledger, n)
    assert read_ledger(path) == parse_ledger(path.read_bytes())
    assert said(read_ledger(path)) == [1]
    await ledger.append("fact", {"n": 4})
    await ledger.close()
    contents = read_ledger(path)
    assert (said(contents), contents.torn_tail, contents.suspect) == ([1, 4], False, None)


async def expect_failure(ledger: LedgerFile, n: int) -> None:
    with pytest.raises(DiskUnusable, match=f"^cannot append to {ledger.path}: "):
        await ledger.append("fact", {"n": n})


async def test_after_a_failed_sync_the_ledger_goes_on_in_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    ledger = await begin(path)
    await ledger.append("fact", {"n": 1})
    first = path.stat().st_ino

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        await expect_failure(ledger, 2)
        patch.setattr(os, "fsync", fail)
        await expect_failure(ledger, 3)
    assert path.stat().st_ino == first
    await ledger.append("fact", {"n": 4})
    assert path.stat().st_ino != first
    await ledger.append("fact", {"n": 5})
    await ledger.close()
    assert said(read_ledger(path)) == [1, 4, 5]
    again = await LedgerFile.open(path, utc=lambda: TIME)
    await again.append("fact", {"n": 6})
    await again.close()
    assert said(read_ledger(path)) == [1, 4, 5, 6]


async def test_what_was_durable_must_read_back_before_a_new_file_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    ledger = await begin(path)
    await ledger.append("fact", {"n": 1})

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        await expect_failure(ledger, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] + b"x" * 20)
    with pytest.raises(DiskUnusable, match="cannot be read back"):
        await ledger.append("fact", {"n": 3})
    path.write_bytes(whole)
    await ledger.append("fact", {"n": 4})
    await ledger.close()
    assert said(read_ledger(path)) == [1, 4]


async def test_a_ledger_that_is_being_closed_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncing, go_on = threading.Event(), threading.Event()

    def sync(_descriptor: int) -> None:
        syncing.set()
        go_on.wait(10)

    ledger = await begin(tmp_path / "a.1.ledger")
    monkeypatch.setattr(os, "fdatasync", sync)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.append, "fact", {"n": 1})
        await anyio.to_thread.run_sync(syncing.wait, 10)
        tasks.start_soon(ledger.close)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RefusedError, match="it is closed"):
            await ledger.append("fact", {"n": 2})
        go_on.set()
    await ledger.close()
    assert said(read_ledger(tmp_path / "a.1.ledger")) == [1]


async def test_whatever_goes_wrong_somebody_hears_of_it_and_the_ledger_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(_sequence: int, _body: bytes) -> bytes:
        raise MemoryError

    ledger = await begin(tmp_path / "a")
    await ledger.append("fact", {"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "complete_line", run_out)
        with pytest.raises(DiskUnusable, match="MemoryError"):
            await ledger.append("fact", {"n": 2})
    await ledger.append("fact", {"n": 3})
    await ledger.close()
    assert said(read_ledger(tmp_path / "a")) == [1, 3]


async def test_what_cannot_be_recorded_is_refused_alone(tmp_path: Path) -> None:
    ledger = await begin(tmp_path / "a")
    codes = []
    for data in ({"n": float("nan")}, {"n": object()}, {"n": "x" * MAX_RECORD_BYTES}):
        with pytest.raises(RefusedError) as refused:
            await ledger.append("fact", data)
        codes.append(refused.value.code)
    await ledger.append("fact", {"n": 1})
    await ledger.close()
    assert codes == ["record_invalid", "record_invalid", "record_too_large"]
    assert said(read_ledger(tmp_path / "a")) == [1]


async def test_a_full_ledger_takes_no_more_but_an_end_finds_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "MAX_LEDGER_BYTES", 2_000)
    ledger = await begin(tmp_path / "a")
    await ledger.append("fact", {"n": 1})
    long = {"n": "x" * 1_400}
    with pytest.raises(RefusedError, match="1500 bytes") as refused:
        await ledger.append("fact", long)
    assert refused.value.code == "ledger_full"
    await ledger.append("fact", {"n": 2})
    await ledger.append_all([("event", {"n": 3}), ("result", long)])
    with pytest.raises(RefusedError, match="1500 bytes"):
        await ledger.append("event", {"n": 4})
    with pytest.raises(RefusedError, match="2000 bytes") as refused:
        await ledger.append("removal", long)
    assert refused.value.code == "ledger_full"
    await ledger.append("released", {"n": 5})
    await ledger.close()
    assert said(read_ledger(tmp_path / "a")) == [1, 2, 3, long["n"], 5]


async def test_a_torn_tail_is_cut_off_before_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(example_ledger(3)[:-30])
    assert read_ledger(path).torn_tail
    ledger = await LedgerFile.open(path, utc=lambda: TIME)
    await ledger.append("fact", {"n": "next"})
    await ledger.close()
    contents = read_ledger(path)
    assert (said(contents), contents.torn_tail, contents.suspect) == ([1, 2, "next"], False, None)


async def test_nobody_goes_on_with_a_suspect_ledger(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(example_ledger().replace(b'"n":2', b'"n":7'))
    with pytest.raises(RefusedError) as refused:
        await LedgerFile.open(path, utc=lambda: TIME)
    assert refused.value.code == "ledger_suspect"


def test_a_ledger_beyond_its_bound_is_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "MAX_LEDGER_BYTES", 50)
    (tmp_path / "a").write_bytes(example_ledger())
    contents = read_ledger(tmp_path / "a")
    assert contents.records == ()
    assert contents.suspect is not None


@given(st.integers(0, len(example_ledger())))
def test_cut_anywhere_the_whole_lines_before_remain(size: int) -> None:
    raw = example_ledger()[:size]
    contents = parse_ledger(raw)
    assert contents.suspect is None
    assert said(contents) == list(range(1, raw.count(b"\n") + 1))
    assert contents.torn_tail == (size > 0 and not raw.endswith(b"\n"))
    assert raw[: contents.good_bytes].endswith(b"\n") or contents.good_bytes == 0


@given(st.integers(0, len(example_ledger()) - 1), st.integers(1, 255))
def test_a_changed_byte_is_never_believed(position: int, change: int) -> None:
    raw = bytearray(example_ledger())
    raw[position] ^= change
    contents = parse_ledger(bytes(raw))
    before = bytes(raw[:position]).count(b"\n")
    assert said(contents) == list(range(1, before + 1))
    assert contents.suspect is not None or contents.torn_tail
    if contents.torn_tail:
        assert before == 3, "only the last line can be torn"


@pytest.mark.parametrize("torn", [b"\0" * 100 + b"\n", b'{"sequence":5', b"\0" * 512 + b'"}\n'])
@pytest.mark.parametrize("room", [b"", b"\0" * 4096])
def test_blocks_that_were_never_written_are_a_torn_tail(torn: bytes, room: bytes) -> None:
    contents = parse_ledger(example_ledger() + torn + room)
    assert (said(contents), contents.torn_tail, contents.suspect) == ([1, 2, 3, 4], True, None)
    assert contents.good_bytes == len(example_ledger())


def test_a_hole_before_the_last_line_is_suspect() -> None:
    raw = bytearray(example_ledger())
    raw[100:140] = bytes(40)
    assert parse_ledger(bytes(raw)).suspect is not None


def test_room_for_more_is_no_record_and_no_fault() -> None:
    assert parse_ledger(b"\0" * 4096) == parse_ledger(b"") == LedgerContents()
    assert parse_ledger(example_ledger() + b"\0" * 100) == parse_ledger(example_ledger())


async def test_the_file_grows_in_steps_and_ends_with_its_last_record(tmp_path: Path) -> None:
    path = tmp_path / "a"
    ledger = await begin(path)
    sizes = set()
    for n in range(2 * ROOM_BYTES // 1000):
        await ledger.append("fact", {"n": n, "text": "x" * 1000})
        sizes.add(path.stat().st_size)
    assert len(sizes) == 3
    assert read_ledger(path) == parse_ledger(path.read_bytes().rstrip(b"\0"))
    await ledger.close()
    assert path.read_bytes().endswith(b"}\n")
    assert said(read_ledger(path)) == list(range(2 * ROOM_BYTES // 1000))


async def test_what_a_killed_process_left_free_is_used(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(example_ledger(2) + bytes(ROOM_BYTES))
    ledger = await LedgerFile.open(path, utc=lambda: TIME)
    await ledger.append("fact", {"n": 3})
    await ledger.close()
    contents = read_ledger(path)
    assert (said(contents), contents.torn_tail, contents.suspect) == ([1, 2, 3], False, None)


@pytest.mark.parametrize("change", ["missing", "twice", "swapped"])
def test_lines_that_are_whole_but_not_where_they_were_are_suspect(change: str) -> None:
    lines = example_ledger().splitlines(keepends=True)
    if change == "missing":
        del lines[1]
    elif change == "twice":
        lines.insert(1, lines[1])
    else:
        lines[1], lines[2] = lines[2], lines[1]
    assert parse_ledger(b"".join(lines)).suspect is not None


async def test_what_was_acknowledged_before_a_kill_is_there_after_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    seen += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    contents = read_ledger(path)
    assert contents.suspect is None
    written = {(record.data["writer"], record.data["k"]) for record in contents.records}
    acknowledged = {tuple(map(int, line.split())) for line in seen if line.endswith("\n")}
    assert len(acknowledged) >= 200
    assert acknowledged <= written


@pytest.mark.requirement("B-24")
async def test_records_of_one_step_are_there_together_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = await LedgerFile.create(path, utc=lambda: "2026-11-29T00:00:00.000Z")
    await ledger.append_all([("event", {"n": 1}), ("result", {"n": 2})])
    with pytest.raises(RefusedError, match="not JSON"):
        await ledger.append_all([("event", {"n": 3}), ("result", {"n": object()})])
    await ledger.close()
    assert [record.kind for record in read_ledger(path).records] == ["event", "result"]
