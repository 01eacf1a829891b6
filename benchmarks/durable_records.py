"""What a durable record costs, next to the floor below it.

The floor is what a program without an event loop would do: one ``write`` of as many bytes to the
end of a file on the same file system, and one ``fdatasync``, again and again in one thread.  An
asynchronous program cannot have that, since a sync must not stop its loop; ``through a thread`` is
the floor handed to a worker thread and awaited, and says how much of our cost is any such
program's.  ``in place`` is the floor in a file that is long enough already.  Rounds of all are
interleaved, so that a busy machine slows them alike.  ``--reports`` also puts that many cleanup
reports into an outbox and replays them to a hub that answers at once.

    python benchmarks/durable_records.py [--directory .] [--rounds 20] [--reports 0] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import anyio
import anyio.to_thread

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


class Floor:
    """A file, written without anything of ours.

    :param size_bytes: how long it is before anything is written.
    """

    def __init__(self, path: Path, *, size_bytes: int = 0) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(self._descriptor, size_bytes)

    def write(self) -> None:
        """One line after the last one, durable."""
        os.write(self._descriptor, LINE)
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


async def measure_records(directory: Path, rounds: int) -> dict[str, float]:
    ledger = await LedgerFile.create(directory / "a1.1.ledger", utc=CLOCK.utc)
    floor, threaded = Floor(directory / "floor"), Floor(directory / "threaded")
    in_place = Floor(directory / "in-place", size_bytes=(rounds + 1) * RECORDS_A_ROUND * len(LINE))

    async def bare(file: Floor) -> None:
        for _ in range(RECORDS_A_ROUND):
            file.write()

    async def through_a_thread() -> None:
        for _ in range(RECORDS_A_ROUND):
            await anyio.to_thread.run_sync(threaded.write)

    async def alone() -> None:
        for _ in range(RECORDS_A_ROUND):
            await ledger.append("intent", DATA)

    async def together() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(WRITERS):
                tasks.start_soon(alone)

    ways: dict[str, tuple[Callable[[], Awaitable[None]], int]] = {
        "floor": (lambda: bare(floor), 1),
        "alone": (alone, 1),
        "floor_in_place": (lambda: bare(in_place), 1),
        "floor_through_a_thread": (through_a_thread, 1),
        f"together_{WRITERS}": (together, WRITERS),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, (way, writers) in ways.items():
            start = perf_counter()
            await way()
            took[name].append((perf_counter() - start) / RECORDS_A_ROUND / writers)
    await ledger.close()
    for file in (floor, threaded, in_place):
        file.close()
    for times in took.values():
        del times[0]
    return {f"{name}_us": median(times) * 1e6 for name, times in took.items()} | {
        "alone_cost_ratio": _ratio(took["alone"], took["floor"]),
        "thread_cost_ratio": _ratio(took["floor_through_a_thread"], took["floor"]),
        "together_gain": _ratio(took["alone"], took[f"together_{WRITERS}"]),
    }


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the rounds' ratios."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


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
        print(f"{name:26} {value:12,.2f}")


if __name__ == "__main__":
    main()
