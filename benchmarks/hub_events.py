"""Durable events and replayed reports that a real hub acknowledges in a second, over loopback.

    python benchmarks/hub_events.py [--events 4000] [--reports 10000] [--database URL] [--json]

``forge-hub serve`` runs as a process of its own on a fresh SQLite file; this process is the
runner: 32 running attempts, the events of each in order, so 32 calls in flight, and then the
cleanup reports as a bridge replays them.  The floor is one row of the same content and one commit
of a bare ``sqlite3`` connection in WAL mode with ``synchronous=FULL``, which is what the hub would
pay at least if each acknowledgement waited for a commit of its own; its rounds come before, between
and after.  Goal: 2,000 events a second with 32 in flight, 10,000 reports in well under 10 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import anyio

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "hub")]

from scripted_bridge import ScriptedBridge, capabilities, removed, session

from forge_edges.signalr import SignalRConnection, SignalRSettings

AT_ONCE = 32
FLOOR_ROWS = 400
CAPACITY = {"slots": 1_000}
PERSISTED = {"accepted": True, "disposition": "persisted"}
ITEM = {
    "kind": "container",
    "id": "c" * 64,
    "name": "forge-agent-0123456789abcdef01234567",
    "role": "agent",
    "createdAt": "2026-11-29T14:00:00.000Z",
}
Call = Callable[[int], Awaitable[Any]]


def floor_per_second(directory: Path) -> float:
    """Rows a second when each is committed by itself."""
    connection = sqlite3.connect(directory / "floor.sqlite3", isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE IF NOT EXISTS floor (key INTEGER PRIMARY KEY, row TEXT)")
        row = json.dumps({"eventId": "e" * 32, "payload": {"containers": [ITEM]}})
        began = time.perf_counter()
        for _ in range(FLOOR_ROWS):
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO floor (row) VALUES (?)", (row,))
            connection.execute("COMMIT")
        return FLOOR_ROWS / (time.perf_counter() - began)
    finally:
        connection.close()


@contextmanager
def serving(database: str, directory: Path) -> Iterator[str]:
    """A hub in a process of its own; yields its URL."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith("FORGE_")}
    command = [sys.executable, "-m", "forge_hub", "serve", "--port", "0", "--database", database]
    log = directory / "hub.log"
    with log.open("wb") as stream, subprocess.Popen(command, env=kept, stderr=stream) as hub:
        try:
            while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
                assert hub.poll() is None, log.read_text()
                time.sleep(0.05)
            yield found.group()
        finally:
            hub.send_signal(signal.SIGTERM)


@asynccontextmanager
async def runner_with(url: str, attempts: int) -> AsyncIterator[tuple[ScriptedBridge, list[Any]]]:
    """A registered runner and the starts of its running attempts."""
    async with aiohttp.ClientSession(url) as api, anyio.create_task_group() as tasks:
        connection = SignalRConnection(SignalRSettings(f"{url}/hubs/runner"), tasks)
        await connection.start()
        bridge = ScriptedBridge(connection, "r1", "i1")
        await bridge.register(capabilities=capabilities(resourceCapacity=CAPACITY))
        await bridge.heartbeat(resourceCapacity=CAPACITY)
        starts = []
        for _ in range(attempts):
            async with api.post("/api/v1/sessions", json=session(leaseTtlMs=600_000)) as answer:
                assert answer.status == 201, await answer.text()
            offer = await bridge.next("Offer")
            more = {"resourceCapacity": CAPACITY, "runtime": "docker"}
            assert (await bridge.decide(offer, "accepted", **more))["accepted"]
            starts.append(await bridge.next("Start"))
        yield bridge, starts
        await bridge.stop()
        tasks.cancel_scope.cancel()


async def rate(call: Call, count: int, workers: int) -> float:
    """Calls a second when each of ``workers`` waits for its own answer."""

    async def work(first: int) -> None:
        for number in range(first, count, workers):
            answer = await call(number)
            assert answer == PERSISTED, answer

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for first in range(workers):
            tasks.start_soon(work, first)
    return count / (time.perf_counter() - began)


async def measure(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Events alone and with 32 in flight, reports, and the floor around them."""
    floor = [floor_per_second(directory)]
    database = options.database or f"sqlite:///{directory}/hub.sqlite3"
    with serving(database, directory) as url:
        async with runner_with(url, AT_ONCE) as (bridge, starts):

            async def event(number: int) -> Any:
                sequence, which = divmod(number, AT_ONCE)
                inventory = {"containers": [ITEM]}
                more = {"sequence": sequence + 1}
                return await bridge.event(
                    starts[which], f"e-{number}", "inventory", inventory, **more
                )

            async def alone(number: int) -> Any:
                more = {"sequence": 1_000_000 + number}
                return await bridge.event(starts[0], f"a-{number}", "agent.started", **more)

            async def report(number: int) -> Any:
                items = [removed(f"{number}-{role}") for role in ("agent", "helper", "workspace")]
                more = {"reportId": f"r-{number}", "resources": items}
                return await bridge.cleanup_report(starts[number % AT_ONCE], **more)

            one = await rate(alone, options.events // 8, 1)
            floor.append(floor_per_second(directory))
            many = await rate(event, options.events, AT_ONCE)
            floor.append(floor_per_second(directory))
            reports = await rate(report, options.reports, AT_ONCE)
            floor.append(floor_per_second(directory))
    commits = median(floor)
    return {
        "floorPerSecond": round(commits),
        "eventsAlonePerSecond": round(one),
        "eventsPerSecond": round(many),
        "eventsToFloor": round(many / commits, 2),
        "reports": options.reports,
        "reportsSeconds": round(options.reports / reports, 2),
        "reportsPerSecond": round(reports),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--events", type=int, default=4_000)
    parser.add_argument("--reports", type=int, default=10_000)
    parser.add_argument("--database", help="another database than a fresh SQLite file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        found = anyio.run(measure, options, Path(directory).resolve())
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"{found['eventsPerSecond']} events a second with {AT_ONCE} in flight,"
        f" {found['eventsAlonePerSecond']} one by one; {found['eventsToFloor']} x the"
        f" {found['floorPerSecond']} bare commits a second; {found['reports']} reports in"
        f" {found['reportsSeconds']} s"
    )


if __name__ == "__main__":
    main()
