"""Our SignalR endpoint, spoken to over real sockets, one record at a time."""

from __future__ import annotations

import logging

import aiohttp
import anyio
import orjson
import pytest

from forge_core.errors import HubConnectionLost, HubError
from forge_edges.signalr import SignalRSettings
from forge_hub.signalr import Connection, HubException, HubOptions
from forge_hub.signalr.tickets import Ticket, TicketError, Tickets
from signalr_hub_client import (
    bearer,
    client,
    make_hub,
    negotiate,
    upgrade_status,
)
from signalr_parts import connected, record, serving, wait_until

pytestmark = pytest.mark.requirement("B-95")


async def test_negotiate_answers_only_those_who_may_ask() -> None:
    async with serving(make_hub()) as url, aiohttp.ClientSession() as session:
        for headers in ({}, bearer("eve"), {"Authorization": "Basic ann"}):
            async with session.post(f"{url}/negotiate?negotiateVersion=1", headers=headers) as no:
                assert (no.status, no.headers["WWW-Authenticate"]) == (401, "Bearer")
        async with session.post(f"{url}/negotiate?access_token=ann&negotiateVersion=1") as no:
            assert no.status == 401
        async with session.post(f"{url}/negotiate", headers=bearer("ann")) as old:
            assert old.status == 400
        async with session.post(
            f"{url}/negotiate?negotiateVersion=1", headers=bearer("ann")
        ) as yes:
            answer = await yes.json()
            assert yes.headers["Cache-Control"] == "no-store"
    assert answer["connectionId"] != answer["connectionToken"]
    assert answer["availableTransports"] == [
        {"transport": "WebSockets", "transferFormats": ["Text"]}
    ]


async def test_a_ticket_opens_one_socket_of_its_owner_once() -> None:
    hub = make_hub()
    async with serving(hub) as url, aiohttp.ClientSession() as session:
        ticket = await negotiate(session, url)
        assert await upgrade_status(session, url, ticket, None) == 401
        assert await upgrade_status(session, url, ticket, "eve") == 401
        assert await upgrade_status(session, url, ticket, "bob") == 404
        assert await upgrade_status(session, url, "guessed") == 404
        async with session.ws_connect(f"{url}?id={ticket}", headers=bearer("ann")):
            assert await upgrade_status(session, url, ticket) == 409
        with anyio.fail_after(5):
            while await upgrade_status(session, url, ticket) == 409:
                await anyio.sleep(0.01)
        assert await upgrade_status(session, url, ticket) == 404


def test_tickets_expire_are_bounded_and_make_room() -> None:
    tickets: Tickets[str] = Tickets(ttl_ms=15_000, max_tickets=2)
    first, second = tickets.issue("ann", 0), tickets.issue("ann", 5_000)
    assert first is not None
    assert second is not None
    assert tickets.issue("ann", 14_999) is None
    assert tickets.redeem(first.token, "ann", 15_000) is TicketError.UNKNOWN
    assert isinstance(tickets.redeem(second.token, "ann", 19_999), Ticket)
    assert isinstance(tickets.issue("ann", 20_000), Ticket)
    assert tickets.redeem(second.token, "ann", 20_000) is TicketError.IN_USE
    tickets.release(second.token)
    assert tickets.redeem(second.token, "ann", 20_000) is TicketError.UNKNOWN


async def test_no_room_is_503_with_a_time_to_come_back() -> None:
    async with (
        serving(make_hub(HubOptions(max_connections=1))) as url,
        client(url),
        aiohttp.ClientSession() as session,
        session.post(f"{url}/negotiate?negotiateVersion=1", headers=bearer("ann")) as full,
    ):
        assert (full.status, full.headers["Retry-After"]) == (503, "5")


@pytest.mark.parametrize(
    "request_text",
    ['{"protocol":"messagepack","version":1}\x1e', '{"protocol":"json","version":9}\x1e', "hello"],
)
async def test_another_protocol_is_refused_in_the_handshake(request_text: str) -> None:
    async with serving(make_hub()) as url, aiohttp.ClientSession() as session:
        ticket = await negotiate(session, url)
        async with session.ws_connect(f"{url}?id={ticket}", headers=bearer("ann")) as websocket:
            await websocket.send_str(request_text)
            assert "error" in orjson.loads((await websocket.receive()).data[:-1])
            assert (await websocket.receive()).type is aiohttp.WSMsgType.CLOSE


async def test_completions_of_every_kind() -> None:
    hub = make_hub()

    @hub.method("Told")
    async def told(_connection: Connection[str], _payload: object) -> object:
        raise HubException("the runner is unknown")

    @hub.method("Masked")
    async def masked(_connection: Connection[str], _payload: object) -> object:
        raise ValueError("the password is hunter2")

    @hub.method("Unsayable")
    async def unsayable(_connection: Connection[str], _payload: object) -> object:
        return {"value": float("nan")}

    async with serving(hub) as url, client(url) as c:
        await c.websocket.send_str(
            record(type=1, target="echo", arguments=[{"é": None}], invocationId="1")
            + record(type=1, target="Void", arguments=[0], invocationId="2")
            + record(type=1, target="Echo", arguments=["nobody waits for this"])
            + record(type=1, target="Told", arguments=[0], invocationId="3")
            + record(type=1, target="Masked", arguments=[0], invocationId="4")
            + record(type=1, target="Unsayable", arguments=[0], invocationId="5")
            + record(type=1, target="Nowhere", arguments=[0], invocationId="6")
            + record(type=1, target="Echo", arguments=[1, 2], invocationId="7")
            + record(type=4, target="Echo", arguments=[1], invocationId="8")
            + record(type=99, new=True)
            + record(type=1, target="Echo", arguments=["last"], invocationId="9")
        )
        got: dict[object, dict[str, object]] = {}
        while "9" not in got:
            answer = await c.next()
            got[answer["invocationId"]] = answer
    start = "An unexpected error occurred invoking '{}' on the server."
    assert got["1"] == {"type": 3, "invocationId": "1", "result": {"é": None}}
    assert got["2"] == {"type": 3, "invocationId": "2"}
    assert got["3"]["error"] == f"{start.format('Told')} HubException: the runner is unknown"
    assert got["4"]["error"] == start.format("Masked")
    assert got["5"]["error"] == start.format("Unsayable")
    assert got["6"]["error"] == f"{start.format('Nowhere')} HubException: Method does not exist."
    assert got["7"]["error"] == f"{start.format('Echo')} Invocation provides 2 argument(s), not 1."
    assert "stream" in str(got["8"]["error"])
    assert len(got) == 9


async def test_what_a_failing_method_quotes_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub = make_hub()

    @hub.method("Leak")
    async def leak(_connection: Connection[str], payload: object) -> object:
        raise ValueError(payload)

    with caplog.at_level(logging.DEBUG, "forge_hub"):
        async with serving(hub) as url, client(url) as c:
            await c.call("Leak", "hunter2", id="1")
            assert "hunter2" not in str(await c.next())
    assert "Leak raised ValueError" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("parallel", [1, 3])
async def test_calls_of_one_client_start_in_order_and_no_more_than_allowed(parallel: int) -> None:
    hub = make_hub(HubOptions(max_parallel_invocations=parallel))
    started: list[object] = []
    running, most = 0, 0
    gate = anyio.Event()

    @hub.method("Gated")
    async def gated(_connection: Connection[str], payload: object) -> object:
        nonlocal running, most
        started.append(payload)
        running += 1
        most = max(most, running)
        await gate.wait()
        await anyio.lowlevel.checkpoint()
        running -= 1
        return payload

    async with serving(hub) as url, client(url) as c, client(url) as other:
        for n in range(9):
            await c.call("Gated", n, id=str(n))
        await wait_until(lambda: len(started) == parallel)
        await other.call("Echo", "not held up", id="1")
        assert (await other.next())["result"] == "not held up"
        assert len(started) == parallel
        gate.set()
        answers = [await c.next() for _ in range(9)]
    assert started == list(range(9))
    assert most == parallel
    assert sorted(str(answer["result"]) for answer in answers) == [str(n) for n in range(9)]


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (record(type=1, target="Echo", arguments=["x" * 32768]), "32768 accepted"),
        ('{"type":6}', "not terminated"),
        ("nonsense\x1e", "malformed"),
        (record(type=1, target=7, arguments=[]), "malformed"),
    ],
)
async def test_a_client_that_breaks_the_rules_is_told_and_closed(frame: str, says: str) -> None:
    async with serving(make_hub()) as url, client(url) as c:
        await c.websocket.send_str(frame)
        close = await c.next()
        assert close["type"] == 7
        assert says in str(close["error"])
        assert await c.next() == {}


async def test_a_message_at_the_bound_is_taken() -> None:
    room = 32 * 1024 - len(record(type=1, target="Echo", arguments=[""], invocationId="1"))
    async with serving(make_hub()) as url, client(url) as c:
        await c.websocket.send_str(
            record(type=1, target="Echo", arguments=["x" * room], invocationId="1")
        )
        assert (await c.next())["result"] == "x" * room


async def test_a_burst_goes_out_in_one_text_frame_and_in_order() -> None:
    hub = make_hub()
    async with serving(hub) as url, client(url) as c:
        await wait_until(lambda: len(hub.connections) == 1)
        (connection,) = hub.connections.values()
        assert connection.principal == "ann"
        assert all(connection.send("Offer", {"n": n}) for n in range(100))
        message = await c.websocket.receive()
    assert message.type is aiohttp.WSMsgType.TEXT
    numbers = [orjson.loads(r)["arguments"][0]["n"] for r in message.data.split("\x1e")[:-1]]
    assert numbers == list(range(100))


async def test_calls_end_with_their_connection_and_the_hooks_run_once() -> None:
    hub = make_hub()
    story: list[str] = []

    @hub.on_connected
    async def come(connection: Connection[str]) -> None:
        connection.state["seen"] = True
        story.append("connected")

    @hub.on_disconnected
    async def gone(connection: Connection[str]) -> None:
        assert connection.state["seen"]
        story.append("disconnected")

    @hub.method("Hang")
    async def hang(_connection: Connection[str], _payload: object) -> None:
        story.append("called")
        try:
            await anyio.sleep_forever()
        finally:
            story.append("cancelled")

    async with serving(hub) as url:
        async with client(url) as c:
            await c.call("Hang", {})
            await wait_until(lambda: "called" in story)
        await wait_until(lambda: story[-1] == "disconnected")
    assert story == ["connected", "called", "cancelled", "disconnected"]


async def test_a_failing_connected_hook_ends_the_connection_before_any_call() -> None:
    hub = make_hub()

    @hub.on_connected
    async def refuse(_connection: Connection[str]) -> None:
        raise RuntimeError("no such runner")

    async with serving(hub) as url, client(url) as c:
        assert await c.next() == {
            "type": 7, "error": "Connection closed with an error.", "allowReconnect": True,
        }  # fmt: skip
        assert await c.next() == {}


@pytest.mark.requirement("B-01")
async def test_our_client_and_our_hub_together() -> None:
    hub = make_hub()
    offers: list[object] = []

    @hub.method("Offers")
    async def push(connection: Connection[str], payload: object) -> object:
        connection.send("Offer", payload)
        return {"accepted": True}

    @hub.method("Leave")
    async def leave(connection: Connection[str], _payload: object) -> object:
        connection.close("superseded")
        return {}

    async def token(_refresh: bool) -> str:
        return "ann"

    async with serving(hub) as url:
        settings = SignalRSettings(url, token)
        async with connected(settings, on_offer=offers.append) as (c, ends):
            assert await c.invoke("Offers", {"offerId": "é"}) == {"accepted": True}
            assert offers == [{"offerId": "é"}]
            with pytest.raises(HubError, match="Method does not exist"):
                await c.invoke("Nowhere", {})
            with pytest.raises(HubConnectionLost) as caught:
                await c.invoke("Leave", {})
            assert caught.value.allow_reconnect is False
            await wait_until(lambda: len(ends) == 1)
