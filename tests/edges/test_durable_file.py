"""Files are replaced whole, privately and durably, or not at all."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from forge_core.errors import DiskUnusable, RefusedError
from forge_edges import durable_file
from forge_edges.durable_file import (
    MAX_SHARED,
    SharedTrips,
    create_file,
    on_disk,
    read_file,
    remove_file,
    replace_file,
    sweep_temporary_files,
)

pytestmark = pytest.mark.requirement("B-24", "B-83")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def failing(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Let one system call fail from now on."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)


def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of what makes a write durable."""
    trace: list[str] = []

    def record(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            kind = name
            if name == "fsync":
                kind += "-dir" if Path(f"/proc/self/fd/{args[0]}").is_dir() else "-file"
            trace.append(kind)
            return original(*args, **kwargs)

        return call

    for name in ("write", "fsync", "link", "unlink"):
        monkeypatch.setattr(os, name, record(name, getattr(os, name)))
    monkeypatch.setattr(os, "replace", record("rename", os.replace))
    return trace


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_file_is_private_from_the_start(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        replace_file(tmp_path / "a", b"1")
        create_file(tmp_path / "b", b"1")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_replacing_leaves_the_new_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert read_file(path, 3) == b"new"
    assert names(tmp_path) == ["a.json"]


def test_the_order_of_a_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced(monkeypatch)
    replace_file(tmp_path / "a", b"x")
    assert trace == ["write", "fsync-file", "rename", "fsync-dir"]


def test_the_order_of_an_exclusive_creation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = traced(monkeypatch)
    create_file(tmp_path / "a", b"x")
    assert trace == ["write", "fsync-file", "link", "unlink", "fsync-dir"]


def test_only_one_of_many_creates_a_file_and_all_see_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "runner.json"
    created, refusals = [], set()

    def create(n: int) -> None:
        try:
            create_file(path, b"%d" % n * 10_000)
            created.append(n)
        except RefusedError as error:
            refusals.add(error.code)
        assert len(read_file(path, 20_000)) == 10_000

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_file(path, 20_000) == b"%d" % created[0] * 10_000
    assert len(created) == 1
    assert refusals == {"file_exists"}
    assert names(tmp_path) == ["runner.json"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "fsync", "open"])
@pytest.mark.parametrize("function", [replace_file, create_file])
def test_a_disk_that_fails_is_named_and_the_old_content_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[[Path, bytes], None],
    call: str,
    number: int,
) -> None:
    path = tmp_path / "a.json"
    if function is replace_file:
        path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        failing(patch, call, number)
        with pytest.raises(DiskUnusable, match=rf"^cannot \w+ {path}: "):
            function(path, b"new")
    assert names(tmp_path) == (["a.json"] if function is replace_file else [])
    if function is replace_file:
        assert path.read_bytes() == b"old"


def test_a_write_that_comes_back_short_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:3])))
    replace_file(tmp_path / "a", b"0123456789")
    assert read_file(tmp_path / "a", 10) == b"0123456789"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_real_full_device_is_a_disk_that_is_unusable() -> None:
    with (
        pytest.raises(DiskUnusable, match="No space left"),
        durable_file.disk_errors("write", Path("/dev/full")),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        durable_file.write_all(full.fileno(), b"x")


def test_removing_twice_is_success(tmp_path: Path) -> None:
    path = tmp_path / "a"
    replace_file(path, b"x")
    remove_file(path)
    remove_file(path)
    assert names(tmp_path) == []


def test_reading_is_bounded_and_follows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    replace_file(path, b"12345")
    with pytest.raises(RefusedError) as too_large:
        read_file(path, 4)
    assert too_large.value.code == "file_too_large"
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo")
    codes = {}
    for name in ("link", "fifo", "missing", "."):
        with pytest.raises(RefusedError) as refused:
            read_file(tmp_path / name, 10)
        codes[name] = refused.value.code
    assert codes == {
        "link": "path_refused",
        "fifo": "path_refused",
        "missing": "file_missing",
        ".": "path_refused",
    }


def test_the_sweep_takes_unfinished_writes_only(tmp_path: Path) -> None:
    replace_file(tmp_path / "a", b"x")
    (tmp_path / ".tmp-1234").write_bytes(b"half")
    (tmp_path / ".hidden").write_bytes(b"of somebody")
    assert sweep_temporary_files(tmp_path, min_age_s=60) == 0
    assert sweep_temporary_files(tmp_path) == 1
    assert names(tmp_path) == [".hidden", "a"]


async def test_a_cancelled_write_is_through_when_the_await_ends(tmp_path: Path) -> None:
    path = tmp_path / "a"
    begun, go_on = threading.Event(), threading.Event()

    def slow_write() -> None:
        begun.set()
        assert go_on.wait(30)
        replace_file(path, b"whole")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(on_disk, slow_write)
        await anyio.to_thread.run_sync(begun.wait, 30)
        tasks.cancel_scope.cancel()
        go_on.set()
    assert path.read_bytes() == b"whole"
    assert names(tmp_path) == ["a"]


async def test_an_event_loop_goes_on_while_the_disk_hangs() -> None:
    hung, go_on = threading.Event(), threading.Event()
    ticked = anyio.Event()

    def hang() -> None:
        hung.set()
        assert go_on.wait(30)

    async def tick() -> None:
        await anyio.to_thread.run_sync(hung.wait, 30)
        ticked.set()

    async with anyio.create_task_group() as tasks:
        for _ in range(durable_file.DISK_THREADS):
            tasks.start_soon(on_disk, hang)
        tasks.start_soon(tick)
        await ticked.wait()
        go_on.set()


class Doubler:
    """Doubles numbers on a disk that does not move until it may."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def double(self, number: int) -> int:
        self.begun.set()
        assert self.go_on.wait(30)
        self.done.append(number)
        if number == 3:
            raise DiskUnusable("cannot double 3")
        return 2 * number


async def test_calls_that_meet_take_one_trip_and_each_hears_its_own_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trips = 0
    doubler = Doubler()
    shared = SharedTrips(doubler.double)
    outcomes: dict[int, object] = {}

    async def counted(function: Callable[..., object], *arguments: object) -> object:
        nonlocal trips
        trips += 1
        return await on_disk(function, *arguments)

    async def call(number: int) -> None:
        try:
            outcomes[number] = await shared.call(number)
        except DiskUnusable as error:
            outcomes[number] = str(error)

    monkeypatch.setattr(durable_file, "on_disk", counted)
    async with anyio.create_task_group() as tasks:
        for number in range(MAX_SHARED + 5):
            tasks.start_soon(call, number)
        await anyio.to_thread.run_sync(doubler.begun.wait, 30)
        await anyio.wait_all_tasks_blocked()
        doubler.go_on.set()
    expected: dict[int, object] = {number: 2 * number for number in range(MAX_SHARED + 5)}
    assert outcomes == expected | {3: "cannot double 3"}
    assert doubler.done == list(range(MAX_SHARED + 5))
    assert trips == 3, "the first alone, as many as fit, and the rest"
    assert await shared.call(100) == 200


async def test_a_cancelled_call_is_carried_through_and_holds_up_nobody() -> None:
    doubler = Doubler()
    shared = SharedTrips(doubler.double)
    outcomes: dict[int, int] = {}
    impatient = anyio.CancelScope()

    async def call(number: int, scope: anyio.CancelScope) -> None:
        with scope:
            outcomes[number] = await shared.call(number)
            await anyio.lowlevel.checkpoint()
            assert not scope.cancel_called, "the cancellation was swallowed"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, 1, anyio.CancelScope())
        await anyio.to_thread.run_sync(doubler.begun.wait, 30)
        tasks.start_soon(call, 2, impatient)
        tasks.start_soon(call, 4, anyio.CancelScope())
        await anyio.wait_all_tasks_blocked()
        impatient.cancel()
        await anyio.wait_all_tasks_blocked()
        assert outcomes == {}
        doubler.go_on.set()
    assert outcomes == {1: 2, 2: 4, 4: 8}


async def test_where_there_is_no_thread_every_caller_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_thread(*_arguments: object) -> None:
        await anyio.lowlevel.checkpoint()
        raise RuntimeError("can't start new thread")

    shared = SharedTrips(str)
    failed = 0

    async def call(number: int) -> None:
        nonlocal failed
        with pytest.raises(RuntimeError, match="new thread"):
            await shared.call(number)
        failed += 1

    with monkeypatch.context() as patch:
        patch.setattr(durable_file, "on_disk", no_thread)
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(call, number)
    assert failed == 5
    assert await shared.call(7) == "7"
