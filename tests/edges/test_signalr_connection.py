"""An open connection: calls, targets, liveness, and every way in which it ends."""

from __future__ import annotations

import logging
import signal
import time
from urllib.parse import urlsplit

import anyio
import pytest

from forge_core.errors import (
    ForgeError,
    HubConnectionLost,
    HubError,
    HubUnavailable,
    RefusedError,
)
from forge_edges.signalr import SignalRConnection, SignalRConnectionFactory, SignalRSettings
from signalr_parts import (
    HUB_PATH,
    FreezingProxy,
    Peer,
    ScriptedHub,
    connected,
    hub_process,
    record,
    wait_until,
)

pytestmark = pytest.mark.requirement("B-01", "B-07")


async def echo(peer: Peer) -> None:
    """Answer every call with its own argument."""
    while True:
        call = await peer.next_call()
        arguments = call["arguments"]
        assert isinstance(arguments, list)
        await peer.send(record(type=3, invocationId=call["invocationId"], result=arguments[0]))


async def test_calls_are_answered_each_its_own() -> None:
    async def backwards(peer: Peer) -> None:
        calls = [await peer.next_call() for _ in range(20)]
        await peer.send(
            "".join(
                record(type=3, invocationId=call["invocationId"], result=call["arguments"])
                for call in reversed(calls)
            )
        )
        await peer.wait_closed()

    answers: dict[int, object] = {}

    async def call(connection: SignalRConnection, n: int) -> None:
        answers[n] = await connection.invoke("Number", {"n": n, "text": "é☃\u2028"})

    async with (
        ScriptedHub(backwards).running() as url,
        connected(SignalRSettings(url)) as (c, _),
        anyio.create_task_group() as tasks,
    ):
        for n in range(20):
            tasks.start_soon(call, c, n)
    assert answers == {n: [{"n": n, "text": "é☃\u2028"}] for n in range(20)}


async def test_a_hub_error_is_its_own_kind_and_bounded() -> None:
    async def failing(peer: Peer) -> None:
        call = await peer.next_call()
        await peer.send(record(type=3, invocationId=call["invocationId"], error="no " * 5000))
        await peer.wait_closed()

    async with ScriptedHub(failing).running() as url, connected(SignalRSettings(url)) as (c, _):
        with pytest.raises(HubError, match=r"^no no") as caught:
            await c.invoke("RegisterRunner", {})
    assert len(str(caught.value)) <= 500


async def test_an_answer_that_does_not_come_is_an_unknown_outcome() -> None:
    late: list[object] = []

    async def slow(peer: Peer) -> None:
        late.append((await peer.next_call())["invocationId"])
        call = await peer.next_call()
        await peer.send(record(type=3, invocationId=late[0], result="too late"))
        await peer.send(record(type=3, invocationId="4711", result="whose?"))
        await peer.send(record(type=3, invocationId=call["invocationId"], result="mine"))
        await peer.send(record(type=3, invocationId=call["invocationId"], result="again"))
        await peer.wait_closed()

    async with ScriptedHub(slow).running() as url, connected(SignalRSettings(url)) as (c, ends):
        with pytest.raises(HubConnectionLost, match="outcome of Heartbeat: no answer within 50"):
            await c.invoke("Heartbeat", {}, timeout_ms=50)
        assert await c.invoke("Heartbeat", {}) == "mine"
        await wait_until(lambda: c.ignored_records == 3)
        assert ends == []


async def test_a_message_over_the_bound_is_refused_before_it_is_sent() -> None:
    async with ScriptedHub(echo).running() as url, connected(SignalRSettings(url)) as (c, _):
        text = "x" * (
            30_000 - len(record(type=1, invocationId="1", target="E", arguments=[{"t": ""}]))
        )
        assert await c.invoke("E", {"t": text}) == {"t": text}
        with pytest.raises(RefusedError) as caught:
            await c.invoke("E", {"t": text + "x"})
        assert caught.value.code == "message_too_large"
        with pytest.raises(RefusedError):
            await c.invoke("E", {"t": float("nan")})
        assert await c.invoke("E", {"still": "open"}) == {"still": "open"}


async def test_pending_calls_are_bounded() -> None:
    async with (
        ScriptedHub().running() as url,
        connected(SignalRSettings(url, max_pending_calls=2)) as (c, _),
        anyio.create_task_group() as tasks,
    ):
        for _ in range(2):
            tasks.start_soon(c.invoke, "Hang", {})
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(HubUnavailable, match="2 calls wait"):
            await c.invoke("Hang", {})
        tasks.cancel_scope.cancel()


async def test_a_connection_that_is_not_open_sends_nothing() -> None:
    async with ScriptedHub(echo).running() as url, anyio.create_task_group() as tasks:
        connection = SignalRConnectionFactory(SignalRSettings(url)).create(tasks)
        with pytest.raises(HubUnavailable):
            await connection.invoke("E", {})
        await connection.start()
        await connection.stop()
        with pytest.raises(HubUnavailable):
            await connection.invoke("E", {})
        with pytest.raises(AssertionError):
            await connection.start()


async def test_every_target_reaches_its_handler_in_order() -> None:
    targets = {
        "Dispatch": "on_dispatch", "Offer": "on_offer", "Start": "on_start",
        "LeaseUpdate": "on_lease_update", "Cancel": "on_cancel", "Reap": "on_reap",
        "RunnerSettings": "on_runner_settings",
    }  # fmt: skip
    got: list[object] = []
    hub = ScriptedHub()

    async def push(peer: Peer) -> None:
        await peer.send("".join(record(type=1, target=t, arguments=[t]) for t in targets))
        for target in targets:
            await peer.send(record(type=1, target=target.upper(), arguments=[{"again": target}]))
        await peer.wait_closed()

    hub.script = push
    handlers = dict.fromkeys(targets.values(), got.append)
    async with hub.running() as url, connected(SignalRSettings(url), **handlers):
        await wait_until(lambda: len(got) == 14)
    assert got == [*targets, *({"again": target} for target in targets)]


@pytest.mark.requirement("B-04")
async def test_a_lying_hub_is_borne_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    lies = [
        "nonsense\x1e", "\x1e", "null\x1e", record(type=99), record(type="1"),
        record(type=1, target=7, arguments=[]), record(type=1, target="Offer", arguments=[]),
        record(type=1, target="Offer", arguments=[1, 2]),
        record(type=1, target="Nobody", arguments=[1]),
        record(type=3, invocationId="x", result=1), record(type=2, invocationId="x", item=1),
        record(type=5, invocationId="x"), record(type=1, target="Offer", arguments=["boom"]),
    ]  # fmt: skip
    offers: list[object] = []

    def on_offer(payload: object) -> None:
        if payload == "boom":
            raise ValueError("the lease key is 0xdeadbeef")
        offers.append(payload)

    async def lie(peer: Peer) -> None:
        await peer.send("".join(lies))
        await peer.websocket.send_bytes(b'{"type":1,"target":"\xff","arguments":[1]}\x1e')
        await peer.send(record(type=1, target="Offer", arguments=["true"]))
        await peer.wait_closed()

    with caplog.at_level(logging.WARNING):
        async with (
            ScriptedHub(lie).running() as url,
            connected(SignalRSettings(url), on_offer=on_offer) as (c, ends),
        ):
            await wait_until(lambda: bool(offers))
            assert (offers, ends) == (["true"], [])
            assert c.ignored_records == len(lies) + 1
    assert "deadbeef" not in caplog.text
    assert len(caplog.records) == 11


async def test_many_records_in_one_frame_do_not_hold_up_the_other_tasks() -> None:
    async def push(peer: Peer) -> None:
        await peer.send(record(type=1, target="Offer", arguments=[0]) * 2000)
        await peer.wait_closed()

    turns = 0
    turns_at_offer: list[int] = []

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    def on_offer(_payload: object) -> None:
        turns_at_offer.append(turns)

    async with ScriptedHub(push).running() as url, anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        async with connected(SignalRSettings(url), on_offer=on_offer):
            await wait_until(lambda: len(turns_at_offer) == 2000)
        tasks.cancel_scope.cancel()
    assert turns_at_offer[-1] - turns_at_offer[0] >= 5


async def test_a_message_of_one_mebibyte_is_taken_and_one_byte_more_ends_it() -> None:
    limit = 1024 * 1024
    envelope = len(record(type=1, target="Offer", arguments=[""]))
    offers: list[object] = []

    async def push(peer: Peer) -> None:
        await peer.send(record(type=1, target="Offer", arguments=["x" * (limit - envelope)]))
        await peer.send(record(type=1, target="Offer", arguments=["x" * (limit - envelope + 1)]))
        await peer.wait_closed()

    async with (
        ScriptedHub(push).running() as url,
        connected(SignalRSettings(url), on_offer=offers.append) as (_, ends),
    ):
        await wait_until(lambda: bool(ends))
    assert len(offers) == 1
    assert "over the 1048576 accepted" in str(ends[0])


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        ('{"type":6}', "not terminated"),
        ('{"type":6}\x1e{"type":', "not terminated"),
        ("", "not terminated"),
        ("x" * (3 * 1024 * 1024), "over 1048576 bytes"),
    ],
)
async def test_a_broken_framing_ends_the_connection_with_a_reason(frame: str, says: str) -> None:
    async def break_it(peer: Peer) -> None:
        await peer.send(frame)
        await peer.wait_closed()

    async with ScriptedHub(break_it).running() as url, connected(SignalRSettings(url)) as (_, ends):
        await wait_until(lambda: bool(ends))
    assert isinstance(ends[0], HubConnectionLost)
    assert says in str(ends[0])


@pytest.mark.parametrize(
    ("fields", "allow"),
    [({}, False), ({"error": "bye"}, False), ({"error": "bye", "allowReconnect": True}, True)],
)
async def test_a_close_says_whether_to_come_back(fields: dict[str, object], allow: bool) -> None:
    async def close(peer: Peer) -> None:
        await peer.next_call()
        await peer.send(record(type=7, **fields))
        await peer.wait_closed()

    async with ScriptedHub(close).running() as url, connected(SignalRSettings(url)) as (c, ends):
        with pytest.raises(HubConnectionLost) as caught:
            await c.invoke("Heartbeat", {})
        await wait_until(lambda: bool(ends))
    for error in (caught.value, ends[0]):
        assert isinstance(error, HubConnectionLost)
        assert error.allow_reconnect is allow
        assert ("bye" in str(error)) is ("error" in fields)


async def test_a_websocket_close_frame_is_reported_with_its_code() -> None:
    async def close(peer: Peer) -> None:
        await peer.websocket.close(code=1012, message=b"restart")

    async with ScriptedHub(close).running() as url, connected(SignalRSettings(url)) as (_, ends):
        await wait_until(lambda: bool(ends))
    assert "code 1012 'restart'" in str(ends[0])


async def test_stop_is_orderly_idempotent_and_tells_the_owner_once() -> None:
    codes: list[int | None] = []

    async def note(peer: Peer) -> None:
        await peer.wait_closed()
        codes.append(peer.websocket.close_code)

    async with ScriptedHub(note).running() as url:
        async with connected(SignalRSettings(url)) as (c, ends):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(c.stop)
            await c.stop()
        assert ends == [None]
        await wait_until(lambda: codes == [1000])


async def test_stop_fails_what_is_pending() -> None:
    errors: list[ForgeError] = []
    async with (
        ScriptedHub().running() as url,
        connected(SignalRSettings(url)) as (c, _),
        anyio.create_task_group() as tasks,
    ):

        async def call() -> None:
            try:
                await c.invoke("Hang", {})
            except HubConnectionLost as error:
                errors.append(error)

        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await c.stop()
    assert "stopped" in str(errors[0])


async def test_stop_is_bounded_when_the_hub_does_not_answer_it() -> None:
    async def deaf(_peer: Peer) -> None:
        await anyio.sleep_forever()

    async with ScriptedHub(deaf).running() as url:
        with anyio.fail_after(5):
            async with connected(SignalRSettings(url, close_timeout_ms=200)) as (_, ends):
                pass
    assert ends == [None]


async def test_a_cancelled_owner_closes_the_socket() -> None:
    gone = anyio.Event()

    async def note(peer: Peer) -> None:
        try:
            await peer.wait_closed()
        finally:  # the server cancels its handler when the socket breaks off
            gone.set()

    async with ScriptedHub(note).running() as url:
        async with anyio.create_task_group() as tasks:
            connection = SignalRConnection(SignalRSettings(url), tasks)
            ends: list[ForgeError | None] = []
            connection.on_close(ends.append)
            await connection.start()
            tasks.cancel_scope.cancel()
        assert ends == [None]
        with anyio.fail_after(5):
            await gone.wait()


async def test_pings_keep_an_idle_connection_and_their_lack_ends_it() -> None:
    received: list[str] = []

    async def listen(peer: Peer) -> None:
        while not peer.websocket.closed:
            message = await peer.websocket.receive()
            if message.data == '{"type":6}\x1e':
                received.append(message.data)
                if len(received) <= 3:
                    await peer.send('{"type":6}\x1e')

    async with ScriptedHub(listen).running() as url:
        settings = SignalRSettings(url, keep_alive_ms=100, server_timeout_ms=400)
        async with connected(settings) as (_, ends):
            await wait_until(lambda: bool(ends))
    assert len(received) >= 5
    assert "nothing came for 400 ms" in str(ends[0])


async def test_flapping_near_the_timeout_stays_one_connection() -> None:
    async with ScriptedHub(echo).running() as url:
        proxy = FreezingProxy(urlsplit(url).port or 0)
        async with proxy.running() as port:
            settings = SignalRSettings(
                f"http://127.0.0.1:{port}{HUB_PATH}", server_timeout_ms=600, keep_alive_ms=200
            )
            async with connected(settings) as (c, ends):
                for _ in range(4):
                    proxy.freeze()
                    await anyio.sleep(0.4)
                    proxy.thaw()
                    assert await c.invoke("E", {"up": True}) == {"up": True}
                assert ends == []


async def test_a_half_open_connection_is_noticed_and_its_calls_fail() -> None:
    async with ScriptedHub(echo).running() as url:
        proxy = FreezingProxy(urlsplit(url).port or 0)
        async with proxy.running() as port:
            settings = SignalRSettings(
                f"http://127.0.0.1:{port}{HUB_PATH}",
                server_timeout_ms=300,
                close_timeout_ms=60_000,  # an orderly close would wait for the frozen peer
            )
            async with connected(settings) as (c, ends):
                assert await c.invoke("E", {}) == {}
                proxy.freeze()
                with pytest.raises(HubConnectionLost, match="nothing came for 300 ms"):
                    await c.invoke("E", {})
                await wait_until(lambda: len(ends) == 1)


async def test_a_stalled_event_loop_is_not_taken_for_a_silent_hub() -> None:
    async with hub_process() as (_process, url):
        settings = SignalRSettings(url, keep_alive_ms=200, server_timeout_ms=700)
        async with connected(settings) as (c, ends):
            time.sleep(0.9)  # longer than our timeout, shorter than the hub's
            assert await c.invoke("Echo", {"here": "again"}) == {"here": "again"}
            assert ends == []


async def test_a_frozen_hub_is_noticed() -> None:
    async with (
        hub_process() as (process, url),
        connected(SignalRSettings(url, server_timeout_ms=700)) as (c, ends),
    ):
        await c.invoke("Echo", {})
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(HubConnectionLost):
                await c.invoke("Echo", {})
            await wait_until(lambda: len(ends) == 1)
        finally:
            process.send_signal(signal.SIGCONT)


async def test_a_killed_hub_fails_a_hundred_pending_calls_at_once() -> None:
    failed: list[HubConnectionLost] = []
    hanging: list[object] = []
    async with (
        hub_process() as (process, url),
        connected(SignalRSettings(url), on_offer=hanging.append) as (c, ends),
    ):

        async def call() -> None:
            try:
                await c.invoke("Hang", {})
            except HubConnectionLost as error:
                failed.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(call)
            await wait_until(lambda: len(hanging) == 100)
            process.kill()
            killed_at = anyio.current_time()
        assert anyio.current_time() - killed_at < 5
        await wait_until(lambda: len(ends) == 1)
    assert len(failed) == 100
