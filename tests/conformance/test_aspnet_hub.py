"""Our client against a hub on ASP.NET Core: the limits and manners that signalr.md counts on."""

from __future__ import annotations

import signal
from typing import Any

import anyio
import pytest
from aspnet_parts import AspNetHub, built, running

from forge_core.errors import HubConnectionLost, HubError, HubRefused
from forge_edges.signalr import SignalRConnection, SignalRSettings
from signalr_parts import connected, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.requirement("B-01", "B-07"), pytest.mark.timeout(600)]

TOKEN = "the-token"
MASKED = "An unexpected error occurred invoking '{}' on the server."


async def token(refresh: bool) -> str:
    return TOKEN if refresh else "an-old-one"


def settings(url: str, **more: Any) -> SignalRSettings:
    return SignalRSettings(url, token, keep_alive_ms=400, server_timeout_ms=2000, **more)


@pytest.fixture(scope="module")
def hub() -> AspNetHub:
    return built()


async def test_calls_and_their_errors(hub: AspNetHub) -> None:
    async with running(hub, TOKEN) as (_, url), connected(settings(url)) as (c, ends):
        payload = {"text": "é☃\u2028", "none": None, "list": [1, 2.5], "Key": 9007199254740993}
        assert await c.invoke("Echo", payload) == payload
        with pytest.raises(HubError) as told:
            await c.invoke("Told", {})
        assert str(told.value) == f"{MASKED.format('Told')} HubException: the runner is unknown"
        with pytest.raises(HubError) as masked:
            await c.invoke("Crash", {})
        assert str(masked.value) == MASKED.format("Crash")
        with pytest.raises(HubError, match="Method does not exist"):
            await c.invoke("Nowhere", {})
        assert await c.invoke("Echo", {"still": "here"}) == {"still": "here"}
        assert ends == []


async def test_typed_arguments_are_bound_by_our_conventions(hub: AspNetHub) -> None:
    async with running(hub, TOKEN) as (_, url), connected(settings(url)) as (c, _):
        beat = {
            "runnerId": "r1",
            "state": "draining",
            "sentAt": "2026-11-29T14:00:00.000Z",
            "freeBytes": 1 << 40,
            "aNewerField": {"is": "ignored"},
        }
        answer = await c.invoke("Heartbeat", beat)
        assert isinstance(answer, dict)
        assert answer == {
            "runnerId": "r1",
            "state": "draining",
            "sentAt": "2026-11-29T14:00:00+00:00",
            "freeBytes": 1 << 40,
        }
        with pytest.raises(HubError):
            await c.invoke("Heartbeat", {"state": "asleep"})


async def test_a_wrong_token_is_refused(hub: AspNetHub) -> None:
    async with running(hub, "another") as (_, url), anyio.create_task_group() as tasks:
        with pytest.raises(HubRefused) as refused:
            await SignalRConnection(settings(url), tasks).start()
        assert refused.value.status == 401


async def test_what_the_hub_pushes_arrives_in_order_up_to_the_bound(hub: AspNetHub) -> None:
    offers: list[object] = []
    async with (
        running(hub, TOKEN) as (_, url),
        connected(settings(url), on_offer=offers.append) as (c, _),
    ):
        assert await c.invoke("Push", {"count": 300, "sizeBytes": 10}) is True
        assert [offer["n"] for offer in offers if isinstance(offer, dict)] == list(range(300))
        offers.clear()
        assert await c.invoke("Push", {"count": 3, "sizeBytes": 1024 * 1024 - 100}) is True
        assert len(offers) == 3


async def test_our_bound_is_below_the_hubs_and_the_hubs_is_real(hub: AspNetHub) -> None:
    async with running(hub, TOKEN) as (_, url):
        async with connected(settings(url)) as (c, _):
            payload = {"text": "x" * 29_900}
            assert await c.invoke("Echo", payload) == payload
        async with connected(settings(url, max_outbound_bytes=100_000)) as (c, ends):
            with pytest.raises(HubConnectionLost):
                await c.invoke("Echo", {"text": "x" * 33_000})
            await wait_until(lambda: len(ends) == 1)


async def test_calls_queue_behind_a_slow_one_and_all_are_answered(hub: AspNetHub) -> None:
    done: list[object] = []
    async with running(hub, TOKEN) as (_, url), connected(settings(url)) as (c, _):

        async def call(n: int) -> None:
            done.append(await c.invoke("Slow", {"delayMs": 300 if n == 0 else 0, "n": n}))

        async with anyio.create_task_group() as tasks:
            for n in range(50):
                tasks.start_soon(call, n)
    assert done == [{"delayMs": 300 if n == 0 else 0, "n": n} for n in range(50)]


async def test_an_idle_connection_outlives_both_timeouts(hub: AspNetHub) -> None:
    async with running(hub, TOKEN) as (_, url), connected(settings(url)) as (c, ends):
        await anyio.sleep(4)  # more than twice the hub's timeout and ours
        assert ends == []
        assert await c.invoke("Echo", {"awake": True}) == {"awake": True}


@pytest.mark.parametrize("how", ["abort", "SIGTERM", "SIGKILL", "SIGSTOP"])
async def test_every_end_of_the_hub_fails_what_is_pending(hub: AspNetHub, how: str) -> None:
    failed: list[HubConnectionLost] = []
    async with running(hub, TOKEN) as (process, url), connected(settings(url)) as (c, ends):

        async def call() -> None:
            try:
                await c.invoke("Slow", {"delayMs": 60_000})
            except HubConnectionLost as error:
                failed.append(error)

        async with anyio.create_task_group() as tasks:
            if how == "abort":
                with pytest.raises(HubConnectionLost):
                    await c.invoke("Leave", {})
            else:
                for _ in range(20):
                    tasks.start_soon(call)
                await anyio.wait_all_tasks_blocked()
                process.send_signal(getattr(signal, how))
        await wait_until(lambda: len(ends) == 1)
        assert isinstance(ends[0], HubConnectionLost)
        assert len(failed) == (0 if how == "abort" else 20)
