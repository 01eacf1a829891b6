"""Directories and programs of dispatches on the host: theirs alone, and gone when they are."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from forge_core.errors import (
    DiskUnusable,
    EngineConflict,
    EngineNotFound,
    EngineTimedOut,
    EngineUnreachable,
    RefusedError,
)
from forge_core.labels import Owner, attempt_filter, runner_filter
from forge_core.ports import EngineResource, HostProgram
from forge_core.wire.codes import ResourceKind
from forge_edges.clock import SystemClock
from forge_edges.host_runtime import LocalHost
from needs import tmpfs

pytestmark = pytest.mark.requirement("B-53")

DAEMON = "setsid sh -c 'trap \"\" TERM; sleep 600 & sleep 600' >/dev/null 2>&1 &"


@pytest.fixture
def owner() -> Owner:
    """A dispatch of its own for each test: the process table is everybody's."""
    return Owner(f"runner-{uuid.uuid4().hex}", "instance-1", "attempt-1", 3, "project", "domain")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "host"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
async def host(directory: Path, owner: Owner) -> AsyncIterator[LocalHost]:
    """Nothing of the dispatch may be left."""
    async with LocalHost.open(directory, SystemClock()) as host:
        yield host
    assert [r for r in await host.list_resources(attempt_filter(owner)) if "helper" in r.name] == []


def program(owner: Owner, script: str, role: str = "host-agent", **more: Any) -> HostProgram:
    options: dict[str, Any] = {
        "argv": ("sh", "-c", script),
        "directory": "/",
        "environment": {"PATH": os.environ["PATH"]},
        "labels": owner.labels(role),
    }
    return HostProgram(**(options | more))


async def start(host: LocalHost, owner: Owner, script: str, **more: Any) -> str:
    asked = program(owner, script, **more)
    return await host.create_container(owner.name(asked.labels["dev.forge.role"]), asked)


async def output(host: LocalHost, container: str) -> dict[int, bytes]:
    """Everything that it writes, by channel, until it has closed both."""
    found = {1: b"", 2: b""}
    async with host.attach(container) as stream:
        with anyio.fail_after(20):
            while (piece := await stream.receive()) is not None:
                found[piece[0]] += piece[1]
    return found


async def names(host: LocalHost, owner: Owner) -> list[tuple[ResourceKind, str]]:
    listed = await host.list_resources(attempt_filter(owner))
    return sorted((found.kind, found.name) for found in listed)


# -- directories ----------------------------------------------------------------------------


async def test_a_directory_is_its_owners_alone_and_found_by_its_labels(
    host: LocalHost, directory: Path, owner: Owner
) -> None:
    name = owner.name("host-workspace")
    assert await host.create_volume(name, owner.labels("host-workspace")) == name
    path = Path(host.path(name))
    assert path.parent == directory
    assert sorted(os.listdir(path)) == ["home", "scratch"]
    for made in (path, path / "home", path / "scratch"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    another_life = LocalHost(directory, SystemClock())
    (found,) = await another_life.list_resources(runner_filter(owner.runner_id))
    assert isinstance(found, EngineResource)
    assert (found.kind, found.id, found.name) == (ResourceKind.VOLUME, name, name)
    assert Owner.from_labels(found.labels) == owner
    assert await host.list_resources(runner_filter("somebody-else")) == []


async def test_a_directory_is_made_once_and_removed_once(host: LocalHost, owner: Owner) -> None:
    name, labels = owner.name("host-workspace"), owner.labels("host-workspace")
    await host.create_volume(name, labels)
    with pytest.raises(EngineConflict):
        await host.create_volume(name, labels)
    (Path(host.path(name)) / "home" / "left").write_text("x")
    await host.remove_volume(name)
    assert await names(host, owner) == []
    assert not Path(host.path(name)).exists()
    with pytest.raises(EngineNotFound):
        await host.remove_volume(name)


async def test_a_directory_that_was_never_finished_is_removed_all_the_same(
    host: LocalHost, directory: Path, owner: Owner
) -> None:
    name = owner.name("host-workspace")
    await host.create_volume(name, owner.labels("host-workspace"))
    for inner in ("home", "scratch", ""):
        (directory / name / inner).rmdir()
    assert await names(host, owner) == [(ResourceKind.VOLUME, name)]
    await host.remove_volume(name)
    assert await names(host, owner) == []


@pytest.mark.parametrize(
    "name", ["..", "../forge-x-" + "0" * 24, "forge-host-workspace-1", "", "a/b"]
)
async def test_no_other_name_is_touched(host: LocalHost, directory: Path, name: str) -> None:
    for call in (host.remove_volume(name), host.create_volume(name, {})):
        with pytest.raises(RefusedError) as refused:
            await call
        assert refused.value.code == "malformed"
    assert list(directory.iterdir()) == []


async def test_a_file_that_says_nothing_is_nobodys(
    host: LocalHost, directory: Path, owner: Owner
) -> None:
    (directory / "forge-a.json").write_text("[]")
    (directory / "forge-b.json").write_text("{" * 100_000)
    (directory / "forge-c.json").write_text(json.dumps({"labels": {"dev.forge.fence": 3}}))
    assert await host.list_resources(runner_filter(owner.runner_id)) == []


# -- unpacking ---------------------------------------------------------------------------


async def archived(*entries: tuple[tarfile.TarInfo, bytes]) -> AsyncGenerator[bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for info, content in entries:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data = buffer.getvalue()
    for at in range(0, len(data), 4_096):
        yield data[at : at + 4_096]


def entry(
    name: str,
    content: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    to: str = "",
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname = kind, mode, to
    info.uid = info.gid = 12_345
    return info, content


@pytest.fixture
async def volume(host: LocalHost, owner: Owner) -> AsyncIterator[str]:
    name = owner.name("host-workspace")
    await host.create_volume(name, owner.labels("host-workspace"))
    yield name
    await host.remove_volume(name)


async def test_files_arrive_as_they_are_and_belong_to_the_account(
    host: LocalHost, volume: str
) -> None:
    await host.unpack(
        volume,
        archived(
            entry("tree/", kind=tarfile.DIRTYPE, mode=0o755),
            entry("tree/run", b"#!/bin/sh\n", mode=0o755),
            entry("tree/f\udcff\n", b"x" * 100_000),
            entry("tree/link", kind=tarfile.SYMTYPE, to="run"),
        ),
    )
    tree = Path(host.path(volume)) / "tree"
    assert (tree / "f\udcff\n").read_bytes() == b"x" * 100_000
    assert (tree / "link").readlink() == Path("run")
    assert (tree / "run").stat().st_mode & 0o700 == 0o700
    assert (tree / "run").stat().st_uid == os.geteuid()


@pytest.mark.parametrize(
    "hostile",
    [
        [entry("tree", kind=tarfile.SYMTYPE, to="OUTSIDE"), entry("tree/written", b"x")],
        [entry("home/../../escaped", b"x")],
        [entry("/tmp/escaped-absolutely", b"x")],
        [entry("tree/./a", b"x")],
        [entry("a", b"x"), entry("a", b"y")],
        [entry("a", kind=tarfile.SYMTYPE, to="OUTSIDE/written"), entry("a", b"y")],
        [entry("a", kind=tarfile.LNKTYPE, to="/etc/passwd")],
        [entry("a", kind=tarfile.FIFOTYPE)],
        [entry("a", kind=tarfile.CHRTYPE)],
    ],
    ids=["link", "up", "absolute", "dot", "twice", "through", "hard", "pipe", "device"],
)
async def test_nothing_is_written_outside(
    host: LocalHost, volume: str, tmp_path: Path, hostile: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    """Our archives have nothing like it; should one ever have, it goes no further."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for info, _ in hostile:
        info.linkname = info.linkname.replace("OUTSIDE", str(outside))
    with pytest.raises(RefusedError) as refused:
        await host.unpack(volume, archived(*hostile))
    assert refused.value.code == "workspace_invalid"
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "host" / "escaped").exists()
    assert not Path("/tmp/escaped-absolutely").exists()


async def test_what_is_no_archive_is_refused(host: LocalHost, volume: str) -> None:
    async def cut() -> AsyncGenerator[bytes]:
        whole = b"".join([piece async for piece in archived(entry("a", b"x" * 10_000))])
        yield whole[:5_000]

    async def noise() -> AsyncGenerator[bytes]:
        yield b"x" * 2_000

    for archive in (cut(), noise()):
        with pytest.raises(RefusedError) as refused:
            await host.unpack(volume, archive)
        assert refused.value.code == "workspace_invalid"


async def test_what_comes_after_the_end_holds_nothing_up(host: LocalHost, volume: str) -> None:
    async def long() -> AsyncGenerator[bytes]:
        async for piece in archived(entry("a", b"x")):
            yield piece
        for _ in range(100):
            yield bytes(65_536)

    with anyio.fail_after(10):
        await host.unpack(volume, long())
    assert (Path(host.path(volume)) / "a").read_bytes() == b"x"


async def test_a_cancelled_unpacking_ends_and_says_nothing(host: LocalHost, volume: str) -> None:
    begun, closed = anyio.Event(), anyio.Event()

    async def endless() -> AsyncGenerator[bytes]:
        try:
            async for piece in archived(entry("a", b"x" * 50_000)):
                yield piece[:512]
                begun.set()
                await anyio.sleep_forever()
        finally:
            closed.set()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.unpack, volume, endless())
            await begun.wait()
            tasks.cancel_scope.cancel()
    assert closed.is_set()


async def test_what_goes_wrong_with_the_archive_is_passed_on(host: LocalHost, volume: str) -> None:
    async def broken() -> AsyncGenerator[bytes]:
        yield b"\0" * 512
        raise RefusedError("cannot read a blob", code="workspace_invalid")

    with pytest.raises(RefusedError, match="cannot read a blob"):
        await host.unpack(volume, broken())


async def test_a_full_disk_is_a_full_disk(tmp_path: Path, owner: Owner) -> None:
    with tmpfs(tmp_path / "small", "size=128k,mode=0700") as small:
        host, name = LocalHost(small, SystemClock()), owner.name("host-workspace")
        await host.create_volume(name, owner.labels("host-workspace"))
        with pytest.raises(DiskUnusable):
            await host.unpack(name, archived(entry("big", b"x" * 1_000_000)))
        await host.remove_volume(name)


# -- programs ----------------------------------------------------------------------------


async def test_both_streams_and_the_status_come_back(host: LocalHost, owner: Owner) -> None:
    container = await start(host, owner, "echo out; echo err >&2; exit 7")
    assert await output(host, container) == {1: b"out\n", 2: b"err\n"}
    assert (await host.wait_container(container, timeout_ms=10_000)).exit_code == 7
    assert await host.inspect_container(container) == {"State": {"Running": False}}
    await host.remove_container(container)
    with pytest.raises(EngineNotFound):
        await host.inspect_container(container)


async def test_a_signal_is_told_as_the_engine_does(host: LocalHost, owner: Owner) -> None:
    container = await start(host, owner, "kill -9 $$")
    assert (await host.wait_container(container, timeout_ms=10_000)).exit_code == 137
    await host.remove_container(container)


async def test_input_of_any_size_goes_in_while_output_comes_out(
    host: LocalHost, owner: Owner
) -> None:
    container = await start(host, owner, "head -c 3000000 | tee /dev/stderr")
    found = {1: 0, 2: 0}
    async with host.attach(container) as stream, anyio.create_task_group() as tasks:
        tasks.start_soon(stream.send, b"x" * 3_000_000)
        with anyio.fail_after(20):
            while (piece := await stream.receive()) is not None:
                found[piece[0]] += len(piece[1])
    assert found == {1: 3_000_000, 2: 3_000_000}
    await host.wait_container(container, timeout_ms=10_000)
    with pytest.raises(EngineUnreachable):
        async with host.attach(container) as stream:
            await stream.send(b"too late")
    await host.remove_container(container)


async def test_waiting_ends_in_time(host: LocalHost, owner: Owner) -> None:
    container = await start(host, owner, "exec sleep 600")
    with pytest.raises(EngineTimedOut):
        await host.wait_container(container, timeout_ms=50)
    assert await host.inspect_container(container) == {"State": {"Running": True}}
    await host.remove_container(container)


async def test_a_program_that_is_not_there_is_refused(host: LocalHost, owner: Owner) -> None:
    with pytest.raises(RefusedError) as refused:
        await start(host, owner, "", argv=("/no/such/program",))
    assert refused.value.code == "host_not_started"


async def test_the_environment_is_what_is_given_and_the_mark(
    host: LocalHost, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_API_TOKEN", "canary-7f3a")
    given = {"PATH": os.environ["PATH"], "SECRET": "value"}
    container = await start(host, owner, "exec env", environment=given)
    lines = (await output(host, container))[1].decode().splitlines()
    await host.remove_container(container)
    said = dict(line.split("=", 1) for line in lines)
    assert json.loads(said.pop("FORGE_HOST_RESOURCE"))[1] == owner.labels("host-agent")
    assert {n: v for n, v in said.items() if n not in ("PWD", "_", "SHLVL")} == given
    assert "canary" not in repr(host.environment())
    assert {"PATH", "LANG"} <= host.environment().keys()


async def test_a_memory_limit_is_one(host: LocalHost, owner: Owner) -> None:
    argv = (sys.executable, "-I", "-S", "-c", "input(); bytearray(1 << 30)")
    container = await start(host, owner, "", argv=argv, memory_bytes=512 << 20)
    async with host.attach(container) as stream:
        await stream.send(b"\n")
    assert b"MemoryError" in (await output(host, container))[2]
    await host.remove_container(container)


# -- what is left ------------------------------------------------------------------------


async def test_another_life_finds_what_runs_and_ends_it(
    host: LocalHost, directory: Path, owner: Owner
) -> None:
    """The daemon's parents have ended: only its environment says whose it is."""
    container = await start(host, owner, f"{DAEMON} echo up; exit")
    assert (await output(host, container))[1] == b"up\n"
    another_life = LocalHost(directory, SystemClock())
    assert await names(another_life, owner) == [(ResourceKind.CONTAINER, container)]
    await another_life.remove_container(container)
    assert await names(another_life, owner) == []
    with pytest.raises(EngineNotFound):
        await another_life.remove_container(container)
    await host.remove_container(container)


async def test_only_the_one_that_is_named_is_ended(host: LocalHost, owner: Owner) -> None:
    agent = await start(host, owner, "exec sleep 600")
    helper = await start(host, owner, "exec sleep 600", role="host-helper")
    await host.remove_container(agent)
    assert await names(host, owner) == [(ResourceKind.CONTAINER, helper)]
    await host.remove_container(helper)


async def test_a_name_runs_once(host: LocalHost, owner: Owner) -> None:
    container = await start(host, owner, "exec sleep 600")
    with pytest.raises(EngineConflict):
        await start(host, owner, "true")
    await host.remove_container(container)


async def test_a_mark_of_somebody_else_is_nobodys(
    host: LocalHost, directory: Path, owner: Owner
) -> None:
    labels = owner.labels("host-agent")
    foreign = {**labels, "dev.forge.managed": "somebody"}
    forged = [
        json.dumps([str(directory), foreign]),
        json.dumps(["/another/state/root/host", labels]),
        json.dumps([str(directory), {"dev.forge.role": 1}]),
        *("{", "[1]", "", "[" * 100_000),
    ]
    others = [
        subprocess.Popen(["sleep", "600"], env={"FORGE_HOST_RESOURCE": mark}) for mark in forged
    ]
    try:
        assert await names(host, owner) == []
        with pytest.raises(EngineNotFound):
            await host.remove_container(owner.name("host-agent"))
        assert all(other.poll() is None for other in others)
    finally:
        for other in others:
            other.kill()
            other.wait()


async def test_no_program_outlives_the_bridge(directory: Path, owner: Owner) -> None:
    async with LocalHost.open(directory, SystemClock()) as host:
        await start(host, owner, f"{DAEMON} exec sleep 600")
    assert await names(host, owner) == []
