"""Offers that a bridge answers in a second, over a real loopback socket.

    python benchmarks/offers_over_socket.py [--offers 2000] [--json]

A scripted hub and a bridge in one process.  Every offer is refused for capacity after the first
(one slot), so that nothing but the wire, the core and the answer is measured; ``accepted`` repeats
it with as many slots as offers, each of which opens a ledger (two syncs to the disk).  The floor is
the same number of bare invocations over the same connection.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "flows")]

from bridge_parts import Bridge, memory_bridge
from scripted_hub import ScriptedHub

from forge_core.wire.from_bridge import ReadAttemptSnapshot, SnapshotAck

AT_ONCE = 64


async def floor_per_second(bridge: Bridge, count: int, at_once: int = AT_ONCE) -> float:
    """The smallest hub method, invoked ``count`` times; by default as many at once as decisions."""
    runner = bridge.runner
    request = ReadAttemptSnapshot(
        runner_id=runner.identity.runner_id,
        runner_instance_id=runner.identity.runner_instance_id,
        part=1,
    )

    async def call(times: int) -> None:
        for _ in range(times):
            await runner.hub.call(request, SnapshotAck)

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number in range(at_once):
            tasks.start_soon(call, len(range(number, count, at_once)))
    return count / (time.perf_counter() - began)


async def offers_per_second(hub: ScriptedHub, bridge: Bridge, count: int) -> float:
    """From the first offer sent to the last decision received."""
    before = len(hub.of("SubmitOfferDecision"))
    offers = [bridge.offer() for _ in range(count)]
    began = time.perf_counter()
    for offer in offers:
        hub.send("Offer", offer)
    await hub.until(lambda: len(hub.of("SubmitOfferDecision")) >= before + count, 120)
    return count / (time.perf_counter() - began)


async def measure(count: int) -> dict[str, Any]:
    """Refusals, acceptances and the floor, each with a bridge of its own."""
    found: dict[str, Any] = {}
    for name, slots in (("refused", 1), ("accepted", count + 1)):
        with tempfile.TemporaryDirectory() as directory:
            hub = ScriptedHub()
            more: dict[str, Any] = {
                "max_concurrent_sandboxes": min(slots, 1024),
                "sandbox_pid_capacity": 4_194_304,
            }
            async with memory_bridge(Path(directory), hub, **more) as bridge:
                rate = await offers_per_second(hub, bridge, min(count, 1000))
                floor = await floor_per_second(bridge, min(count, 1000))
        found[name] = {
            "perSecond": round(rate),
            "floorPerSecond": round(floor),
            "ratio": round(floor / rate, 2),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--offers", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = anyio.run(measure, options.offers)
    if options.json:
        print(json.dumps(found))
        return
    for name, one in found.items():
        print(
            f"{name:<9} {one['perSecond']} offers a second; a bare invocation is "
            f"{one['ratio']} x as fast"
        )


if __name__ == "__main__":
    main()
