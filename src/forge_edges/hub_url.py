"""Where the runner hub is, worked out from the server's base URL (B-02; protocol.md, Where)."""

from __future__ import annotations

import ipaddress
import re
from typing import Never
from urllib.parse import SplitResult, urlsplit

from forge_core.errors import RefusedError

FIELD = "FORGE_SERVER_URL"
HUB_PATH = "/hubs/runner"
MAX_URL_CHARACTERS = 2048

_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_PRINTABLE_ASCII = re.compile(r"[\x21-\x7e]+")
# RFC 1123 section 2.1, and the underscore that container networks use in host names.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,254}}\Z){_LABEL}(?:\.{_LABEL})*\.?")


def resolve_bridge_runner_hub_url(server_url: str) -> str:
    """Return the URL of the runner hub below a server's base URL (B-02).

    ``ws`` and ``wss`` become ``http`` and ``https``, because a SignalR connection begins with an
    HTTP request; host and scheme become lower case.  A URL that already names the hub stays as it
    is, so that the function may be applied twice.

    :param server_url: the base URL, with or without path and trailing slash.
    :raises RefusedError: code ``invalid_url``, field ``FORGE_SERVER_URL``.  The message never
        repeats the URL, which may hold a password.
    """
    parts = _split(server_url)
    scheme = _SCHEMES.get(parts.scheme)
    if scheme is None:
        _refuse("its scheme is not http, https, ws or wss")
    if "@" in parts.netloc:
        _refuse("it holds a user name; put the token into FORGE_API_TOKEN instead")
    if "?" in server_url or "#" in server_url:
        _refuse("it has a query or a fragment; give the base URL alone")
    return f"{scheme}://{_authority(parts)}{_hub_path(parts.path)}"


def _split(server_url: str) -> SplitResult:
    if not server_url:
        _refuse("it is empty")
    if len(server_url) > MAX_URL_CHARACTERS:
        _refuse(f"it is longer than {MAX_URL_CHARACTERS} characters")
    if not _PRINTABLE_ASCII.fullmatch(server_url) or "\\" in server_url:
        _refuse(
            "it holds a space, a backslash, a control or a non-ASCII character; write an"
            " international host name in its xn-- form"
        )
    try:
        return urlsplit(server_url)
    except ValueError:
        _refuse("its host is not valid")


def _authority(parts: SplitResult) -> str:
    try:
        port = parts.port
    except ValueError:
        _refuse("its port is not a number from 1 to 65535")
    if port == 0:
        _refuse("its port is not a number from 1 to 65535")
    host = parts.hostname
    if not host:
        _refuse("it names no host; write it like https://hub.example.org")
    if ":" in host:
        try:
            host = f"[{ipaddress.IPv6Address(host)}]"
        except ValueError:
            _refuse("its host is not a valid IPv6 address")
    elif not _HOST_NAME.fullmatch(host):
        _refuse("its host is not a valid host name or address")
    return host if port is None else f"{host}:{port}"


def _hub_path(path: str) -> str:
    if any(segment in {".", ".."} for segment in path.split("/")):
        _refuse("its path holds a . or .. segment")
    base = path.rstrip("/")
    return base if base.endswith(HUB_PATH) else base + HUB_PATH


def _refuse(why: str) -> Never:
    raise RefusedError(
        f"cannot use {FIELD} as the hub's address: {why}", code="invalid_url", field=FIELD
    )
