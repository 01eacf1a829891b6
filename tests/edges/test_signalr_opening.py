"""How a connection is opened: token, negotiate, redirects, upgrade, handshake."""

from __future__ import annotations

import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import anyio
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from forge_core.errors import ForgeError, HubRefused, HubUnavailable, RefusedError
from forge_edges.signalr import SignalRConnection, SignalRSettings
from forge_edges.signalr_negotiate import retry_after_ms
from signalr_parts import HUB_PATH, Peer, ScriptedHub, connected, record

pytestmark = pytest.mark.requirement("B-01")

SECRET = "tok-3b7e-secret"


async def token(_refresh: bool) -> str | None:
    return SECRET


async def failure(settings: SignalRSettings) -> ForgeError:
    """What the start of a connection raises."""
    async with anyio.create_task_group() as tasks:
        connection = SignalRConnection(settings, tasks)
        try:
            await connection.start()
        except ForgeError as error:
            return error
        await connection.stop()
    pytest.fail("the connection was opened")


async def refused(settings: SignalRSettings) -> HubRefused:
    error = await failure(settings)
    assert isinstance(error, HubRefused), error
    return error


async def unavailable(settings: SignalRSettings) -> str:
    error = await failure(settings)
    assert isinstance(error, HubUnavailable), error
    return str(error)


def answering(status: int, **headers: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(
            status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    return answer


def redirecting(url: str, **more: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response({"url": url, **more})

    return answer


async def test_the_first_connection_carries_the_token_on_both_requests_and_nowhere_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    async def script(peer: Peer) -> None:
        call = await peer.next_call()
        seen.append(str(call))
        await peer.send(record(type=3, invocationId=call["invocationId"], result={}))
        await peer.wait_closed()

    hub = ScriptedHub(script)
    async with hub.running() as url:
        with caplog.at_level(logging.DEBUG):
            async with connected(SignalRSettings(url, token, user_agent="forge-bridge/9")) as (
                c,
                _,
            ):
                await c.invoke("Heartbeat", {"sequence": 1})
    negotiate, upgrade = hub.requests
    for request in (negotiate, upgrade):
        assert request.headers.getall("Authorization") == [f"Bearer {SECRET}"]
        assert request.headers.getall("User-Agent") == ["forge-bridge/9"]
        assert SECRET not in str(request.rel_url)
    assert negotiate.headers["Content-Length"] == "0"
    assert negotiate.query["negotiateVersion"] == "1"
    assert upgrade.query["id"] == "ticket"
    assert "Sec-WebSocket-Extensions" not in upgrade.headers
    assert SECRET not in str(seen) + str(hub.received) + caplog.text


async def test_a_refused_token_is_read_anew_once() -> None:
    hub = ScriptedHub()
    asked: list[bool] = []

    async def source(refresh: bool) -> str:
        asked.append(refresh)
        return "new" if refresh else "old"

    async def negotiate(request: web.Request) -> web.Response:
        if request.headers["Authorization"] != "Bearer new":
            return web.Response(status=401)
        return await hub.negotiate_plainly(request)

    hub.negotiate = negotiate
    async with hub.running() as url, connected(SignalRSettings(url, source)):
        pass
    assert asked == [False, True]
    assert [r.headers["Authorization"] for r in hub.requests] == [
        "Bearer old", "Bearer new", "Bearer new",
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["negotiate", "upgrade"])
async def test_a_token_that_stays_refused_is_not_tried_in_a_loop(where: str) -> None:
    hub = ScriptedHub()
    setattr(hub, where, answering(401))
    tokens = iter(["first", "second", "third"])

    async def source(_refresh: bool) -> str:
        return next(tokens)

    async with hub.running() as url:
        assert (await refused(SignalRSettings(url, source))).status == 401
    assert next(tokens) == "third"


@pytest.mark.parametrize("where", ["negotiate", "upgrade"])
@pytest.mark.parametrize("status", [302, 404, 429, 503])
async def test_a_refusal_says_status_and_how_long_to_wait(where: str, status: int) -> None:
    hub = ScriptedHub()
    setattr(hub, where, answering(status, Retry_After="7", Location="http://127.0.0.1:1/x"))
    async with hub.running() as url:
        caught = await refused(SignalRSettings(url, token))
    assert (caught.status, caught.retry_after_ms) == (status, 7000)
    assert SECRET not in str(caught)
    assert len(hub.requests) == (1 if where == "negotiate" else 2)


def test_retry_after_is_read_in_both_forms_and_capped() -> None:
    assert retry_after_ms(None) is None
    assert retry_after_ms("120") == 120_000
    assert retry_after_ms("99999999999999999999") == 300_000
    assert retry_after_ms("soon") is None
    assert retry_after_ms("-3") is None
    later = datetime.now(UTC) + timedelta(seconds=60)
    assert 50_000 < (retry_after_ms(format_datetime(later, usegmt=True)) or 0) <= 60_000
    assert retry_after_ms("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after_ms("Wed, 21 Oct 2915 07:28:00 GMT") == 300_000


@pytest.mark.parametrize("text", ["", "two words", "line\n", "ünicode", "x" * 9000])
async def test_a_token_that_no_header_can_carry_is_refused_unseen(text: str) -> None:
    async def source(_refresh: bool) -> str:
        return text

    error = await failure(SignalRSettings(f"http://127.0.0.1:9{HUB_PATH}", source))
    assert isinstance(error, RefusedError)
    assert error.field == "FORGE_API_TOKEN"
    assert not text or text not in str(error)


async def test_a_redirect_takes_its_own_token_and_never_ours_to_another_origin() -> None:
    target, stranger, hub = ScriptedHub(), ScriptedHub(), ScriptedHub()
    async with target.running() as target_url, hub.running() as url, stranger.running() as other:
        hub.negotiate = redirecting(other + "?hub=a%20b", accessToken="theirs")
        stranger.negotiate = redirecting(target_url)
        learnt: list[str] = []
        async with connected(SignalRSettings(url, token, learn=learnt.append)):
            pass
    assert learnt == [SECRET, "theirs"]
    assert [r.headers.get("Authorization") for r in hub.requests] == [f"Bearer {SECRET}"]
    assert [r.headers.get("Authorization") for r in stranger.requests] == ["Bearer theirs"]
    assert stranger.requests[0].query["hub"] == "a b"
    assert [r.headers.get("Authorization") for r in target.requests] == [None, None]


async def test_a_redirect_within_the_origin_keeps_the_token() -> None:
    hub = ScriptedHub()

    async def negotiate(request: web.Request) -> web.Response:
        if "hop" in request.query:
            return await hub.negotiate_plainly(request)
        return web.json_response({"url": hub.url + "?hop=1"})

    hub.negotiate = negotiate
    async with hub.running() as url, connected(SignalRSettings(url, token)):
        pass
    assert {r.headers["Authorization"] for r in hub.requests} == {f"Bearer {SECRET}"}
    assert hub.requests[-1].query["hop"] == "1"


async def test_redirects_end_after_ten() -> None:
    hub = ScriptedHub()
    async with hub.running() as url:
        hub.negotiate = redirecting(url)
        assert "more than 10 redirects" in str(await refused(SignalRSettings(url)))
    assert len(hub.requests) == 11


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (web.Response(text="<html>sign in</html>"), "is this a SignalR hub?"),
        (web.Response(text="[]"), "is this a SignalR hub?"),
        (web.Response(body=b" " * 70_000), "over 65536 bytes"),
        (web.json_response({"url": "ftp://x"}), "no plain http"),
        (web.json_response({"url": "http://u:p@x/"}), "no plain http"),
        (web.json_response({"url": 7}), "ill-typed"),
        (web.json_response({"url": "http://[::1"}), "cannot reach"),
        (web.json_response({"connectionToken": "t"}), "no WebSockets transport"),
        (web.json_response({"availableTransports": [7, {"transport": "LongPolling"}]}), "no WebS"),
        (web.json_response({"availableTransports": [{"transport": "WebSockets"}]}), "no conn"),
    ],
)  # fmt: skip
async def test_an_answer_that_makes_no_sense_is_named(answer: web.Response, says: str) -> None:
    async def negotiate(_request: web.Request) -> web.Response:
        return answer

    hub = ScriptedHub()
    hub.negotiate = negotiate
    async with hub.running() as url:
        assert says in await unavailable(SignalRSettings(url, token))


async def test_an_error_in_the_answer_is_a_refusal() -> None:
    async def negotiate(_request: web.Request) -> web.Response:
        return web.json_response({"error": "The hub is full. " + "x" * 5000})

    hub = ScriptedHub()
    hub.negotiate = negotiate
    async with hub.running() as url:
        caught = await refused(SignalRSettings(url))
    assert "The hub is full." in str(caught)
    assert len(str(caught)) < 700


async def test_nobody_there() -> None:
    assert "cannot reach the hub" in await unavailable(SignalRSettings("http://127.0.0.1:9/hubs"))


@pytest.mark.parametrize("stage", ["token", "negotiate", "upgrade", "handshake"])
async def test_every_stage_has_its_own_bound(stage: str) -> None:
    async def hang(*_: object) -> web.Response:
        await anyio.sleep_forever()
        raise AssertionError

    hub = ScriptedHub()
    if stage == "handshake":
        hub.handshake_answer = ""
    elif stage != "token":
        setattr(hub, stage, hang)
    async with hub.running() as url:
        settings = SignalRSettings(
            url,
            token=hang if stage == "token" else token,  # type: ignore[arg-type]
            negotiate_timeout_ms=150,
            upgrade_timeout_ms=150,
            handshake_timeout_ms=150,
        )
        with anyio.fail_after(5):
            assert "cannot" in await unavailable(settings)


@pytest.mark.parametrize(
    ("handshake", "status", "says"),
    [
        ('{"error":"no json here"}\x1e', 0, "no json here"),
        ("{}", None, "not terminated"),
        ("hello\x1e", None, "not JSON"),
        ('{"type":6}\x1e', None, "before the handshake"),
        ('{"error":7}\x1e', None, "error text"),
    ],
)
async def test_a_bad_handshake(handshake: str, status: int | None, says: str) -> None:
    hub = ScriptedHub()
    hub.handshake_answer = handshake
    async with hub.running() as url:
        if status is None:
            assert says in await unavailable(SignalRSettings(url))
        else:
            caught = await refused(SignalRSettings(url))
            assert (caught.status, says in str(caught)) == (status, True)


async def test_messages_in_the_handshake_frame_are_not_lost() -> None:
    hub = ScriptedHub()
    hub.handshake_answer = "{}\x1e" + record(type=1, target="Offer", arguments=[{"n": 1}])
    offers: list[object] = []
    async with hub.running() as url, connected(SignalRSettings(url), on_offer=offers.append) as _:
        with anyio.fail_after(5):
            while not offers:
                await anyio.lowlevel.checkpoint()
    assert offers == [{"n": 1}]


async def test_cookies_of_a_load_balancer_lead_the_upgrade() -> None:
    hub = ScriptedHub()

    async def negotiate(request: web.Request) -> web.Response:
        answer = await hub.negotiate_plainly(request)
        answer.set_cookie("affinity", "process-2")
        return answer

    hub.negotiate = negotiate
    async with hub.running() as url, connected(SignalRSettings(url)):
        pass
    assert hub.requests[-1].cookies == {"affinity": "process-2"}


async def test_both_requests_go_through_the_proxy_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    hub = ScriptedHub()
    async with hub.running() as url:
        assert "cannot reach" in await unavailable(SignalRSettings(url))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with connected(SignalRSettings(url)):
            pass


async def test_tls_with_an_authority_of_the_operators_own(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate)
    hub = ScriptedHub(echo_once)
    async with hub.running(server) as url:
        assert "certificate" in (await unavailable(SignalRSettings(url, token))).lower()
        assert hub.requests == []
        trusting = ssl.create_default_context(cafile=str(certificate))
        async with connected(SignalRSettings(url, token, tls=trusting)) as (c, _):
            assert await c.invoke("Echo", {"over": "TLS"}) == [{"over": "TLS"}]
        hub.negotiate = redirecting(url.replace("https:", "http:"), accessToken="theirs")
        says = await unavailable(SignalRSettings(url, token, tls=trusting))
        assert "redirects from https to http" in says


async def echo_once(peer: Peer) -> None:
    call = await peer.next_call()
    await peer.send(record(type=3, invocationId=call["invocationId"], result=call["arguments"]))
    await peer.wait_closed()


def self_signed(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that is its own authority, with its key, in one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hub")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoded = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = folder / "hub.pem"
    path.write_bytes(encoded + certificate.public_bytes(serialization.Encoding.PEM))
    return path


async def test_stop_during_the_opening_ends_it() -> None:
    hub = ScriptedHub()
    hub.handshake_answer = ""
    async with hub.running() as url, anyio.create_task_group() as tasks:
        connection = SignalRConnection(SignalRSettings(url), tasks)
        ends: list[object] = []
        connection.on_close(ends.append)
        errors: list[HubUnavailable] = []

        async def opening() -> None:
            try:
                await connection.start()
            except HubUnavailable as error:
                errors.append(error)

        tasks.start_soon(opening)
        with anyio.fail_after(5):
            while not hub.received:
                await anyio.sleep(0.005)
            await connection.stop()
        await anyio.wait_all_tasks_blocked()
        assert "stopped meanwhile" in str(errors[0])
        assert ends == []
