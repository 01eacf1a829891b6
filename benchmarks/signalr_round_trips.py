"""Round trips through our SignalR client and hub, next to the floor below them.

Both ends run in this process over loopback, so one core does the work of two.  The floor is the
same ``websockets`` client and uvicorn server exchanging frames of the same size without SignalR;
the ratio to it is the cost of ours, and holds from machine to machine where rates do not.

    python benchmarks/signalr_round_trips.py [--seconds 2] [--json]
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import connect

from forge_edges.signalr import SignalRConnection, SignalRSettings
from forge_hub.signalr import (
    UVICORN_SETTINGS,
    Connection,
    HubOptions,
    SignalRHub,
    expose_transport,
)

CONCURRENCY = 64
ROUNDS = 8
PAYLOAD = {
    "runnerId": "runner-1",
    "sequence": 1,
    "usedResources": {"slots": 1, "memoryBytes": 1 << 30, "cpuMillis": 2000},
    "attempts": [{"attemptId": f"attempt-{n}", "fence": n, "state": "active"} for n in range(4)],
}


async def authenticate(_token: str | None, _request: HTTPConnection) -> str | None:
    return "runner"


async def echo_frames(websocket: WebSocket) -> None:
    await websocket.accept()
    try:
        while True:
            await websocket.send_text(await websocket.receive_text())
    except WebSocketDisconnect:
        return


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    hub: SignalRHub[str] = SignalRHub(
        "/hub", authenticate, HubOptions(max_parallel_invocations=CONCURRENCY)
    )

    @hub.method("Echo")
    async def echo(_connection: Connection[str], payload: object) -> object:
        return payload

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with hub.running():
            started.set()
            yield

    started = anyio.Event()
    routes = [*hub.routes(), WebSocketRoute("/raw", echo_frames)]
    app = expose_transport(Starlette(routes=routes, lifespan=lifespan))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", **UVICORN_SETTINGS))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listener])
            await started.wait()
            yield listener.getsockname()[1]
            server.should_exit = True


async def rate(call: Callable[[], Awaitable[object]], workers: int, seconds: float) -> float:
    """Calls a second that ``workers`` tasks get through, each waiting for its own answer."""
    count = 0

    async def work() -> None:
        nonlocal count
        while anyio.current_time() < end:
            await call()
            count += 1

    start = anyio.current_time()
    end = start + seconds
    async with anyio.create_task_group() as tasks:
        for _ in range(workers):
            tasks.start_soon(work)
    return count / (anyio.current_time() - start)


async def measure(seconds: float) -> dict[str, float]:
    rounds: list[tuple[float, float, float]] = []
    frame = json.dumps(PAYLOAD, separators=(",", ":"))
    async with serving() as port, anyio.create_task_group() as tasks:
        connection = SignalRConnection(SignalRSettings(f"http://127.0.0.1:{port}/hub"), tasks)
        await connection.start()
        url = f"ws://127.0.0.1:{port}/raw"
        async with connect(url, compression=None, ping_interval=None, proxy=None) as raw:

            async def invoke() -> object:
                return await connection.invoke("Echo", PAYLOAD)

            async def exchange() -> object:
                await raw.send(frame)
                return await raw.recv()

            await rate(invoke, 1, 0.2)
            await rate(exchange, 1, 0.2)
            for _ in range(ROUNDS):  # interleaved, so that a busy machine slows all three alike
                rounds.append(
                    (
                        await rate(exchange, 1, seconds / ROUNDS),
                        await rate(invoke, 1, seconds / ROUNDS),
                        await rate(invoke, CONCURRENCY, seconds / ROUNDS),
                    )
                )
        await connection.stop()
    floor, sequential, concurrent = (median(column) for column in zip(*rounds, strict=True))
    return {
        "bare_websocket_per_second": floor,
        "sequential_per_second": sequential,
        f"concurrent_{CONCURRENCY}_per_second": concurrent,
        "sequential_cost_ratio": median(bare / ours for bare, ours, _ in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    results = anyio.run(measure, arguments.seconds)
    if arguments.json:
        print(json.dumps({name: round(value, 2) for name, value in results.items()}))
        return
    for name, value in results.items():
        print(f"{name:28} {value:12,.2f}")


if __name__ == "__main__":
    main()
