"""A backlog of cleanup reports drains over a real loopback socket, heartbeats on time meanwhile.

    python benchmarks/replay_backlog.py [--reports 10000] [--rounds 3] [--json]

The reports are on disk before the bridge connects, as after a long partition.  The hub is in the
same process, answers at once and asks for a heartbeat every second.  The floor is the same number
of bare invocations over the same connection, as many at once as replay has in flight; each round
measures both.  Goal: 10,000 in under 10 s, no heartbeat late by more than one interval.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import anyio

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "flows")]

from bridge_parts import Bridge, memory_bridge
from scripted_hub import PERSISTED, ScriptedHub

from forge_core.outbox import MAX_IN_FLIGHT
from forge_core.ready import Message
from offers_over_socket import floor_per_second

INTERVAL_MS = 1_000


def report(number: int, bridge: Bridge) -> Message:
    """A report like that of an ordinary teardown: two containers and a volume."""
    identity = bridge.runner.identity
    resources = [
        {"kind": kind, "id": f"{number}-{role}", "name": f"forge-{role}-{number}", "role": role}
        | {"outcome": "removed"}
        for kind, role in (
            ("container", "agent"),
            ("container", "helper"),
            ("volume", "workspace"),
        )
    ]
    payload = {
        "reportId": f"report-{number}",
        "attemptId": f"attempt-{number}",
        "fence": 1,
        "resourceRunnerInstanceId": "earlier",
        "runnerId": identity.runner_id,
        "runnerInstanceId": identity.runner_instance_id,
        "part": 1,
        "parts": 1,
        "createdAt": "2026-11-29T14:00:00.000Z",
        "trigger": "startup",
        "resources": resources,
    }
    return Message(f"report-{number}", "SubmitCleanupReport", payload)


async def one_round(count: int) -> dict[str, float]:
    """Fill the outbox, connect, and watch both streams."""
    beats: list[float] = []

    def beat(_payload: dict[str, Any]) -> object:
        beats.append(time.perf_counter())
        return {"accepted": True}

    hub = ScriptedHub(heartbeat_interval_ms=INTERVAL_MS, answers={"Heartbeat": beat})
    hub.answers["SubmitCleanupReport"] = PERSISTED
    with tempfile.TemporaryDirectory() as directory:
        async with memory_bridge(Path(directory), hub, attend=False) as bridge:
            for number in range(count):
                await bridge.runner.outbox.put(report(number, bridge))
            stop = anyio.Event()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(bridge.service.run, stop)
                await hub.online()
                began = time.perf_counter()
                await bridge.runner.outbox.wait_empty()
                took = time.perf_counter() - began
                floor = await floor_per_second(bridge, count, MAX_IN_FLIGHT)
                stop.set()
    during = [at for at in beats if began <= at <= began + took]
    gaps = [b - a for a, b in zip([began, *during], [*during, began + took], strict=True)]
    return {
        "seconds": took,
        "perSecond": count / took,
        "ratio": floor * took / count,
        "heartbeats": len(during),
        "longestGapMs": max(gaps) * 1000,
    }


def measure(count: int, rounds: int) -> dict[str, Any]:
    """The medians of the rounds; of the gaps between heartbeats, the longest of all."""
    found = [anyio.run(one_round, count) for _ in range(rounds)]
    medians = {name: round(median(one[name] for one in found), 2) for name in found[0]}
    longest_gap_ms = round(max(one["longestGapMs"] for one in found))
    return (
        {"reports": count, "rounds": rounds, "intervalMs": INTERVAL_MS}
        | medians
        | {"longestGapMs": longest_gap_ms}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--reports", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.reports, options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    print(
        "{reports} reports in {seconds} s ({perSecond} a second; a bare invocation is {ratio} x as"
        " fast); {heartbeats} heartbeats, the longest gap {longestGapMs} ms of {intervalMs}"
        " ({rounds} rounds)".format(**found)
    )


if __name__ == "__main__":
    main()
