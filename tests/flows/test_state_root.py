"""The state root: who may use it, what survives in it, and what it refuses to be."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from forge_bridge.state_root import EngineLockHeld, StateRoot, bounds
from forge_bridge.state_root.directory import file_system_type, is_local
from forge_bridge.state_root.locks import engine_lock_name
from forge_core.errors import DiskUnusable, RefusedError
from forge_core.outbox import Entry, entry_of
from forge_edges import durable_file
from forge_edges.clock import SystemClock
from needs import require_root

pytestmark = pytest.mark.requirement("B-24")

HOLDER = """
import sys
from pathlib import Path
import anyio
from forge_bridge.state_root import StateRoot
from forge_edges.clock import SystemClock

async def main():
    root = await StateRoot.open(Path(sys.argv[1]), clock=SystemClock())
    await root.acquire_engine_lock(sys.argv[2], sys.argv[3], instance_id="holder")
    print("held", flush=True)
    sys.stdin.read()

anyio.run(main)
"""


async def opened(path: Path, runner_id: str | None = None) -> StateRoot:
    return await StateRoot.open(path, clock=SystemClock(), runner_id=runner_id)


async def refusal(path: Path) -> str:
    with pytest.raises(RefusedError) as refused:
        await opened(path)
    assert refused.value.code == "state_root_unfit"
    return str(refused.value)


async def test_what_is_made_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        root = await opened(tmp_path / "state")
        ledger = await root.ledgers.create("a1", 1)
        await ledger.close()
        (await root.acquire_engine_lock("e", "r", instance_id="i")).release()
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in [root.path, *root.path.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


async def test_the_runner_id_is_made_once_and_an_override_wins(tmp_path: Path) -> None:
    first = await opened(tmp_path / "state")
    again = await opened(tmp_path / "state")
    assert again.runner_id == first.runner_id
    assert (await opened(tmp_path / "state", "from-settings")).runner_id == "from-settings"
    assert (await opened(tmp_path / "state")).runner_id == first.runner_id


async def test_many_who_open_at_once_agree_on_the_runner_id(tmp_path: Path) -> None:
    ids = set()

    async def open_one() -> None:
        ids.add((await opened(tmp_path / "state")).runner_id)

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(open_one)
    assert len(ids) == 1


@pytest.mark.parametrize("content", [b"", b"\0" * 90, b"{}", b'{"runnerId": "../x"}', b"[1]"])
async def test_a_damaged_runner_file_is_never_replaced_silently(
    tmp_path: Path, content: bytes
) -> None:
    await opened(tmp_path / "state")
    (tmp_path / "state" / "runner.json").write_bytes(content)
    with pytest.raises(RefusedError, match="FORGE_RUNNER_ID") as refused:
        await opened(tmp_path / "state")
    assert refused.value.code == "runner_file_damaged"
    assert (await opened(tmp_path / "state", "r1")).runner_id == "r1"


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o770, 0o777])
async def test_a_root_that_others_may_enter_is_refused_until_mended(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "state root"
    path.mkdir()
    path.chmod(mode)
    remedy = (await refusal(path)).rpartition("; ")[2]
    subprocess.run(shlex.split(remedy), check=True)
    await opened(path)


async def test_a_missing_parent_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "state"
    remedy = (await refusal(path)).rpartition("; ")[2]
    assert not path.parent.exists()
    subprocess.run(shlex.split(remedy), check=True)
    await opened(path)


async def test_a_symbolic_link_or_a_file_is_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    await opened(real)
    link = tmp_path / "link"
    link.symlink_to(real)
    assert str(real) in (await refusal(link)).rpartition("; ")[2]
    file = tmp_path / "file"
    file.touch()
    assert "not a directory" in await refusal(file)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    await refusal(tmp_path / "dangling")


async def test_a_part_that_is_a_link_is_refused(tmp_path: Path) -> None:
    root = await opened(tmp_path / "state")
    (root.path / "attempts").rmdir()
    (root.path / "attempts").symlink_to(tmp_path)
    assert "attempts" in await refusal(root.path)


async def test_a_root_of_another_user_is_refused_until_mended(tmp_path: Path) -> None:
    require_root("give a directory away")
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    remedy = (await refusal(path)).rpartition("; ")[2]
    subprocess.run(shlex.split(remedy), check=True)
    await opened(path)


@pytest.mark.parametrize(
    ("file_system", "verdict"),
    [
        ("ext4", True),
        ("xfs", True),
        ("btrfs", True),
        ("overlay", True),
        ("tmpfs", True),
        ("zfs", True),
        ("nfs4", False),
        ("cifs", False),
        ("smb3", False),
        ("9p", False),
        ("fuse.sshfs", False),
        ("fuse", False),
        ("fuseblk", True),
    ],
)
def test_file_systems_across_a_network_are_refused(file_system: str, verdict: bool) -> None:
    assert is_local(file_system) is verdict


async def test_a_network_file_system_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_bridge.state_root.directory.file_system_type", lambda _: "nfs4")
    assert "FORGE_SANDBOX_STATE_ROOT" in await refusal(tmp_path / "state")


def test_the_file_system_is_the_one_that_the_mount_table_names(tmp_path: Path) -> None:
    for path in (Path("/proc"), tmp_path):
        expected = subprocess.run(
            ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[0]
        descriptor = os.open(path, os.O_RDONLY)
        try:
            assert file_system_type(descriptor) == expected
        finally:
            os.close(descriptor)


@pytest.mark.requirement("B-42")
async def test_the_locks_let_one_process_in_until_it_dies(tmp_path: Path) -> None:
    root, elsewhere = await opened(tmp_path / "a"), await opened(tmp_path / "b")
    engine_id, runner_id = f"engine-{os.getpid()}", "runner-1"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root.path), engine_id, runner_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        for which, other in ((root, "another-engine"), (elsewhere, engine_id), (root, engine_id)):
            with pytest.raises(EngineLockHeld, match=f"process {holder.pid} ") as held:
                await which.acquire_engine_lock(other, runner_id, instance_id="i")
            assert held.value.holder_pid == holder.pid
        other_runner = await elsewhere.acquire_engine_lock(engine_id, "runner-2", instance_id="i")
        other_runner.release()
    finally:
        holder.kill()
        holder.communicate()
    lock = await root.acquire_engine_lock(engine_id, runner_id, instance_id="next")
    content = json.loads((root.path / engine_lock_name(engine_id)).read_text())
    assert (content["pid"], content["instance"]) == (os.getpid(), "next")
    lock.release()
    lock.release()


@pytest.mark.requirement("B-42")
async def test_a_failed_attempt_at_the_locks_holds_none_of_them(tmp_path: Path) -> None:
    root, elsewhere = await opened(tmp_path / "a"), await opened(tmp_path / "b")
    mine = await root.acquire_engine_lock("e1", "r", instance_id="i")
    with pytest.raises(EngineLockHeld):
        await elsewhere.acquire_engine_lock("e1", "r", instance_id="i")
    (await elsewhere.acquire_engine_lock("e2", "r", instance_id="i")).release()
    mine.release()


@pytest.mark.requirement("B-42")
async def test_a_child_process_does_not_keep_the_locks(tmp_path: Path) -> None:
    root = await opened(tmp_path / "a")
    lock = await root.acquire_engine_lock("e1", "r", instance_id="i")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE):
        lock.release()
        (await root.acquire_engine_lock("e1", "r", instance_id="i")).release()


def test_an_engine_id_never_leaves_the_directory() -> None:
    assert engine_lock_name("7TSB:MF3E:AAAA") == "engine-7TSB:MF3E:AAAA.lock"
    for strange in ("../../etc/passwd", "", "a/b", "x" * 256, "ü", "."):
        name = engine_lock_name(strange)
        assert "/" not in name
        assert len(name) < 100
    assert engine_lock_name("a/b") != engine_lock_name("a/c")


async def test_unfinished_writes_are_swept_by_who_holds_the_locks(tmp_path: Path) -> None:
    root = await opened(tmp_path / "state")
    left = [root.path / part / ".tmp-0123" for part in ("outbox", "attempts", "cleanup-reports")]
    for path in left:
        path.write_bytes(b'{"half')
    young = root.path / ".tmp-4567"
    young.touch()
    assert await root.messages.load() == ()
    await opened(root.path)
    assert all(path.exists() for path in left), "opening is no ownership"
    (await root.acquire_engine_lock("e", "r", instance_id="i")).release()
    assert not any(path.exists() for path in left)
    assert young.exists()


async def test_ledgers_are_found_again_by_dispatch(tmp_path: Path) -> None:
    root = await opened(tmp_path / "state")
    for attempt_id, fence in (("a-1", 1), ("a-1", 12), ("b_2", 3)):
        ledger = await root.ledgers.create(attempt_id, fence)
        await ledger.append("reserved", {"attemptId": attempt_id})
    await root.ledgers.close()
    again = await opened(root.path)
    stored = await again.ledgers.read_all()
    assert [(each.attempt_id, each.fence) for each in stored] == [
        ("a-1", 1),
        ("a-1", 12),
        ("b_2", 3),
    ]
    ledger = await again.ledgers.reopen("a-1", 12)
    await ledger.append("released", {})
    await again.ledgers.remove("a-1", 12)
    await again.ledgers.remove("a-1", 12)
    assert len(await again.ledgers.read_all()) == 2


async def test_a_suspect_ledger_stops_nothing_and_is_kept(tmp_path: Path) -> None:
    root = await opened(tmp_path / "state")
    ledger = await root.ledgers.create("a1", 1)
    await ledger.append("reserved", {})
    await ledger.append("released", {})
    await root.ledgers.close()
    path = root.path / "attempts" / "a1.1.ledger"
    path.write_bytes(path.read_bytes().replace(b"reserved", b"deserved"))
    (root.path / "attempts" / "no ledger name.ledger").touch()
    (root.path / "attempts" / "b1.1.ledger").symlink_to("/etc/passwd")

    stored = {each.attempt_id: each for each in await root.ledgers.read_all()}

    assert stored.keys() == {"a1", "b1"}
    assert all(each.contents.suspect for each in stored.values())
    await root.ledgers.mark_suspect("a1", 1)
    assert await root.ledgers.suspects() == ("a1.1.suspect",)
    assert [each.attempt_id for each in await root.ledgers.read_all()] == ["b1"]


def entry(number: int, method: str = "SubmitReapOutcome") -> Entry:
    return entry_of(f"m{number}", method, {}, 20261129140000000 + number)


@pytest.mark.requirement("B-83")
async def test_messages_come_back_in_the_order_of_creation(tmp_path: Path) -> None:
    root = await opened(tmp_path / "state")
    entries = [
        entry(3),
        entry(1, "SubmitCleanupReport"),
        entry(2, "SubmitLegacyResult"),
    ]
    for each in entries:
        await root.messages.write(each, {"text": f"\0 {each.id}"})
    again = await opened(root.path)
    loaded = await again.messages.load()
    assert [each.id for each in loaded] == ["m1", "m2", "m3"]
    assert set(loaded) == set(entries)
    assert await again.messages.read(loaded[0]) == {"text": "\0 m1"}
    for each in loaded:
        await again.messages.remove(each)
        await again.messages.remove(each)
    assert await again.messages.load() == ()


@pytest.mark.requirement("B-83")
async def test_a_message_that_is_not_durable_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = await opened(tmp_path / "state")

    def fail(_path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(durable_file, "sync_directory", fail)
        with pytest.raises(DiskUnusable):
            await root.messages.write(entry(1), {"a": 1})
    assert await (await opened(root.path)).messages.load() == ()


@pytest.mark.parametrize("part", ["outbox", "cleanup-reports"])
async def test_damaged_messages_are_set_aside_and_the_others_are_loaded(
    tmp_path: Path, part: str
) -> None:
    root = await opened(tmp_path / "state")
    method = "SubmitCleanupReport" if part == "cleanup-reports" else "SubmitReapOutcome"
    await root.messages.write(entry(1, method), {"a": 1})
    directory = root.path / part
    (whole,) = directory.glob("*.json")
    good = whole.read_bytes()
    for name, content in {
        "zeros.json": b"\0" * 300,
        "empty.json": b"",
        "torn.json": good[:-5],
        "flipped.json": good.replace(b'"a":1', b'"a":2'),
        "copy-of-another.json": good,
    }.items():
        (directory / name).write_bytes(content)
    (directory / "link.json").symlink_to(whole)
    (directory / "a-directory.json").mkdir()

    assert [each.id for each in await root.messages.load()] == ["m1"]
    assert [path.name for path in directory.glob("*.json")] == [whole.name]
    assert len(list(directory.glob("*.suspect"))) == 7


async def test_what_was_set_aside_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "forge_bridge.state_root.messages.REJECTED", bounds.Bound(max_files=3, max_age_days=30)
    )
    root = await opened(tmp_path / "state")
    for n in range(6):
        await root.messages.write(entry(n), {})
        await root.messages.set_aside(entry(n), "stale_fence", "an old one")
    kept = sorted((root.path / "outbox" / "rejected").iterdir())
    assert [path.name.rpartition("-")[2] for path in kept] == ["m3.json", "m4.json", "m5.json"]
    assert json.loads(kept[0].read_text())["rejection"]["reason"] == "stale_fence"

    os.utime(kept[0], (1, 1))
    (await root.acquire_engine_lock("e", "r", instance_id="i")).release()
    assert len(list((root.path / "outbox" / "rejected").iterdir())) == 2
