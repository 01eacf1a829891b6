"""Microsoft's JavaScript client, unchanged, against our hub."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import anyio
import pytest
from npm_parts import installed
from starlette.requests import HTTPConnection

from forge_hub.signalr import Connection, HubException, HubOptions, SignalRHub
from signalr_parts import serving

PROJECT = Path(__file__).with_name("javascript")


async def authenticate(token: str | None, _request: HTTPConnection) -> str | None:
    return token if token == "ann" else None


def make_hub() -> SignalRHub[str]:
    options = HubOptions(keep_alive_ms=150, client_timeout_ms=600, tick_ms=20)
    hub: SignalRHub[str] = SignalRHub("/hubs/runner", authenticate, options)

    @hub.method("Echo")
    async def echo(_connection: Connection[str], payload: object) -> object:
        return payload

    @hub.method("Void")
    async def void(_connection: Connection[str], _payload: object) -> object:
        return None

    @hub.method("Told")
    async def told(_connection: Connection[str], _payload: object) -> object:
        raise HubException("the runner is unknown")

    @hub.method("Masked")
    async def masked(_connection: Connection[str], _payload: object) -> object:
        raise ValueError("the password is hunter2")

    @hub.method("Push")
    async def push(connection: Connection[str], payload: object) -> object:
        assert isinstance(payload, dict)
        return [connection.send("Offer", {"n": n}) for n in range(payload["count"])]

    @hub.method("ComeBack")
    async def come_back(connection: Connection[str], _payload: object) -> object:
        connection.close("moving house", allow_reconnect=True)
        return None

    @hub.method("GoAway")
    async def go_away(connection: Connection[str], _payload: object) -> object:
        connection.close("not welcome")
        return None

    return hub


@pytest.mark.requirement("B-95")
async def test_microsofts_client_works_with_our_hub() -> None:
    folder = await anyio.to_thread.run_sync(installed, PROJECT)
    node = shutil.which("node")
    assert node is not None
    hub = make_hub()
    async with serving(hub) as url:
        with anyio.fail_after(60):
            done = await anyio.run_process(
                [node, str(PROJECT / "client.js"), url],
                check=False,
                env={"PATH": os.environ["PATH"], "NODE_PATH": str(folder / "node_modules")},
            )
        assert done.returncode == 0, done.stderr.decode()
    seen = json.loads(done.stdout)
    unexpected = "An unexpected error occurred invoking '{}' on the server."
    assert seen["transport"] == "WebSocketTransport"
    assert seen["echo"] == {"text": "é☃\u2028", "none": None, "list": [1, 2.5]}
    assert seen.get("void") is None
    assert seen["hubException"] == unexpected.format("Told") + (
        " HubException: the runner is unknown"
    )
    assert seen["masked"] == unexpected.format("Masked")
    assert "Method does not exist" in seen["unknown"]
    assert "2 argument(s)" in seen["argumentCount"]
    assert "does not stream" in seen["stream"]
    assert seen["offers"] == list(range(200))
    assert seen["large"] == 32000
    assert seen["many"] == list(range(100))
    assert seen["stopped"] == "Disconnected"
    assert seen["idle"] == {"closed": False, "echo": "awake"}
    assert seen["comeBack"]["newId"] is True
    assert seen["comeBack"]["echo"] == 7
    assert "moving house" in seen["comeBack"]["left"]
    assert "not welcome" in seen["goAway"]
    assert "32768" in seen["oversize"]
    assert "401" in seen["unauthorized"]
    assert "Unable to connect" in seen["longPolling"]
    assert not hub.connections
