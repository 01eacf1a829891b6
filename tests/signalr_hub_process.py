"""Our SignalR hub as a process of its own; prints its port. For tests that stop or kill it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from forge_hub.signalr import (
    UVICORN_SETTINGS,
    Connection,
    HubOptions,
    SignalRHub,
    expose_transport,
)


async def authenticate(_token: str | None, _request: HTTPConnection) -> str | None:
    return "runner"


def make_hub() -> SignalRHub[str]:
    hub: SignalRHub[str] = SignalRHub(
        "/hubs/runner",
        authenticate,
        HubOptions(
            max_parallel_invocations=200,
            max_queued_invocations=200,
            keep_alive_ms=300,
            client_timeout_ms=1000,
            tick_ms=50,
        ),
    )

    @hub.method("Echo")
    async def echo(_connection: Connection[str], payload: object) -> object:
        return payload

    @hub.method("Hang")
    async def hang(connection: Connection[str], _payload: object) -> None:
        connection.send("Offer", {"hanging": True})
        await anyio.sleep_forever()

    return hub


def main() -> None:
    hub = make_hub()

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with hub.running():
            print(listener.getsockname()[1], flush=True)
            yield

    listener = socket.create_server(("127.0.0.1", 0))
    app = expose_transport(Starlette(routes=hub.routes(), lifespan=lifespan))
    uvicorn.Server(uvicorn.Config(app, log_level="warning", **UVICORN_SETTINGS)).run([listener])


if __name__ == "__main__":
    main()
