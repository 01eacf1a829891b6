"""SignalR's negotiate: one HTTP request that says where, and as whom, to open the WebSocket.

Protocol: https://github.com/dotnet/aspnetcore/blob/main/src/SignalR/docs/specs/TransportProtocols.md
"""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

import aiohttp
import anyio
import orjson
from yarl import URL

from forge_core.errors import HubRefused, HubUnavailable, RefusedError

from .signalr_settings import SignalRSettings

MAX_REDIRECTS = 10
MAX_ANSWER_BYTES = 64 * 1024
MAX_URL_CHARACTERS = 8 * 1024
MAX_RETRY_AFTER_MS = 300_000

_HTTP_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_WEBSOCKET_SCHEMES = {"http": "ws", "https": "wss"}
_DEFAULT_PORTS = {"http": 80, "https": 443}
# Wider than RFC 6750 section 2.1: whatever a header can carry in one word.
_TOKEN = re.compile(r"[\x21-\x7e]{1,8192}")


class _BadAnswerError(ValueError):
    """An answer that makes no sense; the text continues "cannot reach the hub at …: "."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to open the WebSocket.

    :param headers: of the upgrade: who we are, and the cookies by which a load balancer leads
        the upgrade to the process that answered the negotiate.
    :param proxy: URL of the HTTP proxy to go through.
    """

    url: str
    headers: dict[str, str]
    proxy: str | None


async def negotiate(settings: SignalRSettings, token: str | None) -> Endpoint:
    """Ask the hub for a connection, following SignalR's own redirects (at most ten).

    The token goes to the origin it was meant for and to no other: a redirect to another origin
    gets the token that came with it, or none.

    :raises HubRefused: the hub answered, with no.
    :raises HubUnavailable: there was no answer in time, or none that makes sense.
    """
    where = _http_url(settings.hub_url)
    try:
        with anyio.fail_after(settings.negotiate_timeout_ms / 1000):
            async with _session(settings) as session:
                for _ in range(MAX_REDIRECTS + 1):
                    if token is not None:
                        settings.learn(token)
                    answer = await _ask(session, where, token)
                    if not answer.get("url"):
                        return _endpoint(session, where, token, answer, settings.user_agent)
                    where, token = _follow(where, token, answer)
    except TimeoutError as error:
        raise HubUnavailable(
            f"cannot negotiate with the hub at {_origin_text(where)}: no answer within"
            f" {settings.negotiate_timeout_ms} ms"
        ) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise HubUnavailable(
            f"cannot reach the hub at {_origin_text(where)}: {error or type(error).__name__}"
        ) from error
    raise HubRefused(
        f"cannot negotiate with the hub at {_origin_text(where)}: more than {MAX_REDIRECTS}"
        " redirects",
        status=200,
    )


def retry_after_ms(value: str | None) -> int | None:
    """Read a Retry-After header (RFC 9110 section 10.2.3): seconds or a date, capped."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return min(int(value[:9]) * 1000, MAX_RETRY_AFTER_MS)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    wait_ms = int((when - datetime.now(UTC)).total_seconds() * 1000)
    return min(max(wait_ms, 0), MAX_RETRY_AFTER_MS)


def request_headers(user_agent: str, token: str | None) -> dict[str, str]:
    """Headers of negotiate and upgrade.

    :raises RefusedError: the token has a form that no header can carry; it is not repeated.
    """
    headers = {"User-Agent": user_agent}
    if token is not None:
        if not _TOKEN.fullmatch(token):
            raise RefusedError(
                "cannot send the hub's token: it is empty, too long, or holds characters that a"
                " bearer token cannot have (a line break at its end, perhaps)",
                code="invalid_token",
                field="FORGE_API_TOKEN",
            )
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _session(settings: SignalRSettings) -> aiohttp.ClientSession:
    # The proxy is chosen by _proxy and not by trust_env, which would also take a ~/.netrc entry
    # for the hub as a second, conflicting Authorization.
    return aiohttp.ClientSession(
        headers={"User-Agent": settings.user_agent, "Accept-Encoding": "identity"},
        connector=aiohttp.TCPConnector(ssl=settings.tls or True),
        cookie_jar=aiohttp.CookieJar(unsafe=True),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
    )


async def _ask(
    session: aiohttp.ClientSession, where: SplitResult, token: str | None
) -> dict[str, Any]:
    query = [
        pair
        for pair in parse_qsl(where.query, keep_blank_values=True)
        if pair[0] != "negotiateVersion"
    ]
    url = where._replace(
        path=where.path.rstrip("/") + "/negotiate",
        query=urlencode([*query, ("negotiateVersion", "1")]),
    )
    async with session.post(
        URL(urlunsplit(url), encoded=True),
        headers=request_headers(session.headers["User-Agent"], token),
        proxy=_proxy(where),
        allow_redirects=False,
    ) as response:
        if response.status != 200:
            raise _refusal(where, response.status, response.headers.get("Retry-After"))
        return _parse(where, await _read_bounded(response))


def _refusal(where: SplitResult, status: int, retry_after: str | None) -> HubRefused:
    remedy = ""
    if 300 <= status < 400:
        remedy = "; HTTP redirects are not followed: set FORGE_SERVER_URL to the final address"
    elif status == 404:
        remedy = "; is FORGE_SERVER_URL the base URL of a Forge server?"
    return HubRefused(
        f"cannot negotiate with the hub at {_origin_text(where)}: it answered {status}{remedy}",
        status=status,
        retry_after_ms=retry_after_ms(retry_after),
    )


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise _BadAnswerError(f"its answer to negotiate is over {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


def _parse(where: SplitResult, body: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise _BadAnswerError("its answer to negotiate is no JSON object: is this a SignalR hub?")
    if answer.get("error"):
        raise HubRefused(
            f"cannot negotiate with the hub at {_origin_text(where)}: it says"
            f" {str(answer['error'])[:500]!r}",
            status=200,
        )
    return answer


def _follow(
    where: SplitResult, token: str | None, answer: dict[str, Any]
) -> tuple[SplitResult, str | None]:
    url, own_token = answer["url"], answer.get("accessToken")
    if not isinstance(url, str) or not isinstance(own_token, str | None):
        raise _BadAnswerError("its redirect is ill-typed")
    target = _http_url(url)
    if where.scheme == "https" and target.scheme == "http":
        raise _BadAnswerError("it redirects from https to http")
    if own_token:
        return target, own_token
    return target, token if _origin(target) == _origin(where) else None


def _endpoint(
    session: aiohttp.ClientSession,
    where: SplitResult,
    token: str | None,
    answer: dict[str, Any],
    user_agent: str,
) -> Endpoint:
    transports = answer.get("availableTransports")
    if not isinstance(transports, list) or not any(
        isinstance(one, dict) and one.get("transport") == "WebSockets" for one in transports
    ):
        raise _BadAnswerError("it offers no WebSockets transport")
    # Version 0 of negotiate knows the connectionId only.
    ticket = answer.get("connectionToken") or answer.get("connectionId")
    if not isinstance(ticket, str) or not 0 < len(ticket) <= 4096:
        raise _BadAnswerError("its answer to negotiate has no connection token")
    target = where._replace(
        scheme=_WEBSOCKET_SCHEMES[where.scheme],
        query=urlencode([*parse_qsl(where.query, keep_blank_values=True), ("id", ticket)]),
    )
    headers = request_headers(user_agent, token)
    cookies = session.cookie_jar.filter_cookies(URL(urlunsplit(where), encoded=True))
    if cookies:
        headers["Cookie"] = "; ".join(f"{name}={one.value}" for name, one in cookies.items())
    return Endpoint(url=urlunsplit(target), headers=headers, proxy=_proxy(where))


def _http_url(url: str) -> SplitResult:
    if len(url) > MAX_URL_CHARACTERS or not url.isascii() or not url.isprintable():
        raise _BadAnswerError("its URL is too long or holds characters that no URL has")
    parts = urlsplit(url)
    scheme = _HTTP_SCHEMES.get(parts.scheme)
    if scheme is None or not parts.hostname or "@" in parts.netloc or parts.fragment:
        raise _BadAnswerError("its URL is no plain http or https URL")
    return parts._replace(scheme=scheme)


def _origin(url: SplitResult) -> tuple[str, str | None, int]:
    return url.scheme, url.hostname, url.port or _DEFAULT_PORTS[url.scheme]


def _origin_text(url: SplitResult) -> str:
    return f"{url.scheme}://{url.netloc}"


def _proxy(url: SplitResult) -> str | None:
    """The proxy that the environment names for a URL: the same for negotiate and upgrade."""
    scheme, host, port = _origin(url)
    if urllib.request.proxy_bypass(f"{host}:{port}"):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy:
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        raise _BadAnswerError("the environment names a proxy that is neither http nor https")
    return proxy
