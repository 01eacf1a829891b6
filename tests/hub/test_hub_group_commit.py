"""Writes that share a commit: each one's own outcome, their order, and no early acknowledgement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest
from scripted_bridge import ScriptedBridge, on_stage, session
from sqlalchemy import Connection, event, select, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError

from forge_core.errors import RefusedError, RetryableError
from forge_edges.signalr import SignalRConnection, SignalRSettings
from forge_hub.store.database import open_database
from forge_hub.store.group_commit import MAX_GROUP, GroupCommit, Work
from forge_hub.store.tables import events

IN_FLIGHT = 32
INSERT = text("INSERT INTO notes (note) VALUES (:note)")
NOTES = text("SELECT note FROM notes ORDER BY note")


class Gate:
    """Stands for a database: holds each transaction until the test lets it go."""

    def __init__(self) -> None:
        self.groups: list[list[Any]] = []
        self.error: Exception | None = None
        self._entered, self._open = anyio.Event(), anyio.Event()

    async def transact(self, work: Work[list[Any]]) -> list[Any]:
        self._entered.set()
        await self._open.wait()
        self._open = anyio.Event()
        if self.error is not None:
            raise self.error
        values = work(None)  # type: ignore[arg-type]
        self.groups.append(values)
        return values

    async def entered(self) -> None:
        await self._entered.wait()
        self._entered = anyio.Event()

    def open(self) -> None:
        self._open.set()


class Writers:
    """Callers of one group commit, and what each got."""

    def __init__(self, gate: Gate, tasks: anyio.abc.TaskGroup) -> None:
        self.got: list[object] = []
        self._group = GroupCommit(gate.transact)
        self._tasks = tasks

    def write(self, work: Callable[[], Any]) -> anyio.CancelScope:
        scope = anyio.CancelScope()
        self._tasks.start_soon(self._write, work, scope)
        return scope

    async def _write(self, work: Callable[[], Any], scope: anyio.CancelScope) -> None:
        with scope:
            try:
                self.got.append(await self._group.run(lambda _connection: work()))
            except Exception as error:
                self.got.append(error)


async def test_what_waits_together_is_committed_together_and_in_order() -> None:
    gate = Gate()
    async with anyio.create_task_group() as tasks:
        writers = Writers(gate, tasks)
        writers.write(lambda: 0)
        await gate.entered()
        for number in range(1, MAX_GROUP + 2):
            writers.write(lambda number=number: number)  # type: ignore[misc]
        await anyio.wait_all_tasks_blocked()
        assert writers.got == []
        for _ in range(3):
            gate.open()
            await anyio.wait_all_tasks_blocked()
    assert [len(group) for group in gate.groups] == [1, MAX_GROUP, 1]
    assert writers.got == list(range(MAX_GROUP + 2))


async def test_a_database_that_is_away_fails_the_whole_group_once() -> None:
    gate = Gate()
    gate.error = OperationalError("BEGIN", {}, Exception("disk I/O error"))
    async with anyio.create_task_group() as tasks:
        writers = Writers(gate, tasks)
        for _ in range(3):
            writers.write(lambda: None)
        await anyio.wait_all_tasks_blocked()
        gate.open()
        await anyio.wait_all_tasks_blocked()
        gate.open()
    assert writers.got == [gate.error] * 3


async def test_a_cancelled_caller_is_carried_through_and_holds_up_nobody() -> None:
    gate = Gate()
    async with anyio.create_task_group() as tasks:
        writers = Writers(gate, tasks)
        scopes = [writers.write(lambda: 0)]
        await gate.entered()
        scopes += [writers.write(lambda n=n: n) for n in (1, 2)]  # type: ignore[misc]
        await anyio.wait_all_tasks_blocked()
        for scope in scopes[:2]:
            scope.cancel()
        gate.open()
        await anyio.wait_all_tasks_blocked()
        gate.open()
    assert gate.groups == [[0], [1, 2]]


async def test_each_write_of_a_group_succeeds_or_fails_by_itself(database_url: str) -> None:
    def refuse(connection: Connection) -> None:
        connection.execute(INSERT, {"note": "undone"})
        raise RefusedError("cannot do this", code="refused")

    def stumble(connection: Connection) -> None:
        connection.execute(text("INSERT INTO notes (nothing) VALUES (1)"))

    got: dict[int, object] = {}

    async with open_database(database_url) as store:
        await store.write(lambda c: c.execute(text("CREATE TABLE notes (note TEXT)")))

        async def write(number: int) -> None:
            special = {3: refuse, 5: stumble}
            keep: Work[Any] = lambda c: c.execute(INSERT, {"note": str(number)})  # noqa: E731
            try:
                await store.write(special.get(number, keep))
                got[number] = None
            except (RefusedError, RetryableError) as error:
                got[number] = type(error)

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(write, number)
        notes = await store.read(lambda c: c.execute(NOTES).scalars().all())
    assert notes == ["0", "1", "2", "4", "6", "7"]
    assert {n: kind for n, kind in got.items() if kind} == {3: RefusedError, 5: RetryableError}


@contextmanager
def counted_commits() -> Iterator[list[None]]:
    commits: list[None] = []

    def count(_connection: object) -> None:
        commits.append(None)

    event.listen(Engine, "commit", count)
    try:
        yield commits
    finally:
        event.remove(Engine, "commit", count)


@pytest.mark.requirement("B-83", "B-84")
async def test_messages_in_flight_share_commits_and_are_kept_once(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch()
        start = await bridge.take_attempt()
        answers: Counter[tuple[int, str]] = Counter()

        async def tell(number: int) -> None:
            answer = await bridge.event(start, f"e{number}", "agent.started", sequence=number)
            answers[number, answer["disposition"]] += 1

        with counted_commits() as commits:
            async with anyio.create_task_group() as tasks:
                for number in range(1, IN_FLIGHT + 1):
                    tasks.start_soon(tell, number)
                    tasks.start_soon(tell, number)
        assert answers == {
            (number, said): 1
            for number in range(1, IN_FLIGHT + 1)
            for said in ("persisted", "duplicate")
        }
        assert len(commits) <= IN_FLIGHT // 2
        shown = (await stage.api.get(f"/api/v1/sessions/{session_id}/diagnostics")).json()
        assert [e["sequence"] for e in shown["timeline"]] == list(range(1, IN_FLIGHT + 1))


@contextmanager
def hub_process(database_url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A hub that a test may kill; none is left."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("FORGE_")}
    command = [sys.executable, "-m", "forge_hub", "serve", "--port", "0", "--database"]
    with (
        log.open("wb") as stream,
        subprocess.Popen([*command, database_url], env=kept, stderr=stream) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


async def url_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    with anyio.fail_after(30):
        while "hub.listening" not in (written := log.read_text()):
            assert process.poll() is None, written
            await anyio.sleep(0.02)
    line = next(line for line in written.splitlines() if "hub.listening" in line)
    return str(json.loads(line)["url"])


async def _runner(url: str, tasks: anyio.abc.TaskGroup) -> ScriptedBridge:
    connection = SignalRConnection(SignalRSettings(f"{url}/hubs/runner"), tasks)
    await connection.start()
    bridge = ScriptedBridge(connection, "r1", "i1")
    await bridge.register()
    await bridge.heartbeat()
    return bridge


@pytest.mark.requirement("B-83", "B-84", "B-95")
async def test_what_a_killed_hub_has_acknowledged_is_in_its_database(
    database_url: str, tmp_path: Path
) -> None:
    acknowledged: set[int] = set()
    log = tmp_path / "hub.log"

    async def tell(bridge: ScriptedBridge, start: dict[str, Any], first: int) -> None:
        for number in range(first, 2_000, IN_FLIGHT):
            try:
                await bridge.event(start, f"e{number}", "agent.started", sequence=number)
            except RetryableError:
                return
            acknowledged.add(number)
            if len(acknowledged) == 500:
                hub.kill()

    with hub_process(database_url, log) as hub:
        async with anyio.create_task_group() as tasks:
            url = await url_in(log, hub)
            bridge = await _runner(url, tasks)
            async with httpx.AsyncClient(base_url=url) as api:
                assert (await api.post("/api/v1/sessions", json=session())).status_code == 201
            start = await bridge.take_attempt()
            async with anyio.create_task_group() as tellers:
                for first in range(1, IN_FLIGHT + 1):
                    tellers.start_soon(tell, bridge, start, first)
            tasks.cancel_scope.cancel()
    async with open_database(database_url) as store:
        kept = await store.read(lambda c: set(c.execute(select(events.c.sequence)).scalars()))
    assert acknowledged <= kept
    assert len(acknowledged) >= 500

    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        for number in sorted(acknowledged)[::50]:
            answer = await bridge.event(start, f"e{number}", "agent.started", sequence=number)
            assert answer["disposition"] == "duplicate"
