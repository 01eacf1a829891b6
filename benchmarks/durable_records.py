"""What a durable record costs, next to the floor below it.

The floor is one ``write`` of as many bytes and one ``fdatasync`` on the same file system, in this
process and this run; rounds of both are interleaved, so that a busy machine slows them alike and
the ratio holds from disk to disk.  ``--reports`` also puts that many cleanup reports into an
outbox and replays them to a hub that answers at once.

    python benchmarks/durable_records.py [--directory .] [--rounds 20] [--reports 0] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import anyio

from forge_bridge.flows.replay import Replay
from forge_bridge.state_root import StateRoot
from forge_core.ledger import complete_line, encode_body
from forge_core.ready import Message
from forge_edges.clock import SystemClock
from forge_edges.ledger_file import LedgerFile

WRITERS = 64
RECORDS_A_ROUND = 32
PUTS_AT_ONCE = 64
DATA = {"kind": "container", "name": "forge-agent-0123456789abcdef01234567", "role": "agent"}
CLOCK = SystemClock()
LINE = complete_line(1, encode_body(CLOCK.utc(), "intent", DATA))


async def measure_records(directory: Path, rounds: int) -> dict[str, float]:
    ledger = await LedgerFile.create(directory / "a1.1.ledger", utc=CLOCK.utc)
    descriptor = os.open(directory / "floor", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    floor, alone, shared = [], [], []

    async def write() -> None:
        for _ in range(RECORDS_A_ROUND):
            await ledger.append("intent", DATA)

    for _ in range(rounds + 1):
        start = perf_counter()
        for _ in range(RECORDS_A_ROUND):
            os.write(descriptor, LINE)
            os.fdatasync(descriptor)
        between = perf_counter()
        await write()
        floor.append((between - start) / RECORDS_A_ROUND)
        alone.append((perf_counter() - between) / RECORDS_A_ROUND)
        start = perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(WRITERS):
                tasks.start_soon(write)
        shared.append((perf_counter() - start) / RECORDS_A_ROUND / WRITERS)
    await ledger.close()
    os.close(descriptor)
    del floor[0], alone[0], shared[0]
    return {
        "floor_us": median(floor) * 1e6,
        "alone_us": median(alone) * 1e6,
        f"shared_by_{WRITERS}_us": median(shared) * 1e6,
        "alone_cost_ratio": median(ours / bare for ours, bare in zip(alone, floor, strict=True)),
        "shared_gain": median(one / many for one, many in zip(alone, shared, strict=True)),
    }


def report(number: int) -> Message:
    payload = {
        "reportId": f"report-{number}",
        "attemptId": f"attempt-{number}",
        "fence": 1,
        "resourceRunnerInstanceId": "instance-0",
        "runnerId": "runner-1",
        "runnerInstanceId": "instance-1",
        "part": 1,
        "parts": 1,
        "createdAt": CLOCK.utc(),
        "trigger": "startup",
        "resources": [
            {"kind": kind, "id": f"{number:064x}", "name": f"forge-{kind}-{number}", "role": kind}
            | {"outcome": "removed"}
            for kind in ("container", "network", "volume")
        ],
    }
    return Message(f"report-{number}", "SubmitCleanupReport", payload)


async def measure_replay(directory: Path, reports: int) -> dict[str, float]:
    root = await StateRoot.open(directory / "state", clock=CLOCK)
    replay = Replay(root.messages, CLOCK, runner_id="runner-1", runner_instance_id="instance-1")

    async def put(numbers: range) -> None:
        for number in numbers:
            await replay.put(report(number))

    async def invoke(_method: str, _payload: object) -> object:
        await anyio.lowlevel.checkpoint()
        return {"accepted": True, "disposition": "persisted"}

    start = perf_counter()
    async with anyio.create_task_group() as tasks:
        for offset in range(PUTS_AT_ONCE):
            tasks.start_soon(put, range(offset, reports, PUTS_AT_ONCE))
    written = perf_counter()
    again = Replay(root.messages, CLOCK, runner_id="runner-1", runner_instance_id="instance-2")
    await again.load()
    loaded = perf_counter()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(again.run, invoke)
        await again.wait_empty()
        tasks.cancel_scope.cancel()
    return {
        "reports": reports,
        "put_s": written - start,
        "load_s": loaded - written,
        "replay_s": perf_counter() - loaded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--reports", type=int, default=0, help="how many to replay")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        results = anyio.run(measure_records, Path(directory), arguments.rounds)
        if arguments.reports:
            results |= anyio.run(measure_replay, Path(directory), arguments.reports)
    if arguments.json:
        print(json.dumps({name: round(value, 2) for name, value in results.items()}))
        return
    for name, value in results.items():
        print(f"{name:20} {value:12,.2f}")


if __name__ == "__main__":
    main()
