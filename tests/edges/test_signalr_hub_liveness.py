"""Who is kept, who is cut off, and when: the endpoint under slow, silent and frozen peers."""

from __future__ import annotations

import time
from dataclasses import replace

import aiohttp
import anyio
import pytest

from forge_edges.signalr import SignalRSettings
from forge_hub.signalr import Connection
from signalr_hub_client import (
    FAST,
    bearer,
    client,
    make_hub,
    negotiate,
    peer_holds,
    raw_client,
    read_until_end,
)
from signalr_parts import connected, serving, wait_until

pytestmark = pytest.mark.requirement("B-95")


async def test_a_client_that_never_shakes_hands_is_dropped() -> None:
    async with serving(make_hub(FAST)) as url, aiohttp.ClientSession() as session:
        ticket = await negotiate(session, url)
        async with session.ws_connect(f"{url}?id={ticket}", headers=bearer("ann")) as websocket:
            message = await websocket.receive(timeout=5)
            assert message.type in {aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE}


async def test_idle_clients_are_pinged_and_silent_ones_cut_off() -> None:
    hub = make_hub(FAST)
    async with serving(hub) as url, client(url) as c:
        pings = 0
        while (message := await c.websocket.receive(timeout=5)).type is aiohttp.WSMsgType.TEXT:
            assert message.data == '{"type":6}\x1e'
            pings += 1
        assert pings >= 2
        await wait_until(lambda: not hub.connections)


async def test_a_client_whose_calls_wait_for_their_turn_is_not_silent() -> None:
    hub = make_hub(FAST)
    done: list[object] = []

    @hub.method("Slow")
    async def slow(_connection: Connection[str], payload: object) -> object:
        await anyio.sleep(0.5)  # longer than the client timeout
        done.append(payload)
        return payload

    async with serving(hub) as url, client(url) as c, anyio.create_task_group() as tasks:

        async def ping() -> None:
            while True:
                await c.send(type=6)
                await anyio.sleep(0.1)

        for n in range(5):
            await c.call("Slow", n, id=str(n))
        tasks.start_soon(ping)
        for n in range(5):
            assert (await c.next())["result"] == n
        tasks.cancel_scope.cancel()


async def test_a_client_that_does_not_read_is_cut_off_and_holds_up_nobody() -> None:
    hub = make_hub(replace(FAST, close_timeout_ms=60_000))  # no time for an orderly close
    async with serving(hub) as url, raw_client(url) as deaf, client(url) as c:
        await wait_until(lambda: len(hub.connections) == 2)
        assert peer_holds(deaf)
        victims = [one for one in hub.connections.values() if one.principal == "bob"]
        sent = 0
        while victims[0].send("Offer", {"text": "x" * 60_000}):
            sent += 1
            await c.call("Echo", sent, id="1")
            assert (await c.next())["result"] == sent
        await wait_until(lambda: len(hub.connections) == 1)
        # The hub's socket is gone although the peer has read nothing yet.
        await wait_until(lambda: not peer_holds(deaf), within_s=5)
        assert not victims[0].send("Offer", {})
        assert await read_until_end(deaf)


async def test_a_client_that_does_not_let_a_close_finish_is_dropped() -> None:
    hub = make_hub(FAST)
    ended: list[str] = []

    @hub.on_disconnected
    async def gone(connection: Connection[str]) -> None:
        ended.append(connection.principal)

    async with serving(hub) as url, raw_client(url) as deaf:
        await wait_until(lambda: len(hub.connections) == 1)
        (connection,) = hub.connections.values()
        connection.close("enough", allow_reconnect=True)
        assert not connection.send("Offer", {})
        await wait_until(lambda: ended == ["bob"])
        assert b"enough" in await read_until_end(deaf)


async def test_a_hub_that_goes_down_asks_its_clients_back() -> None:
    hub = make_hub()
    async with serving(hub) as url, client(url, "ann") as c:
        await wait_until(lambda: len(hub.connections) == 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hub.shut_down)
            close = await c.next()
        assert (close["type"], close["allowReconnect"]) == (7, True)
        await wait_until(lambda: not hub.connections)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/negotiate?negotiateVersion=1", headers=bearer("ann")) as answer,
        ):
            assert answer.status == 503


async def test_a_hub_that_was_held_up_does_not_blame_its_clients() -> None:
    hub = make_hub(FAST)

    async def token(_refresh: bool) -> str:
        return "ann"

    async with serving(hub) as url:
        settings = SignalRSettings(url, token, keep_alive_ms=100, server_timeout_ms=5000)
        async with connected(settings) as (c, ends):
            for _ in range(3):
                time.sleep(0.5)  # longer than the hub's client timeout
                await anyio.sleep(0.05)  # the hub's ticker comes first
                assert await c.invoke("Echo", {"here": "still"}) == {"here": "still"}
            assert ends == []
