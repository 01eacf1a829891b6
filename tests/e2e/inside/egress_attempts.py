"""Runs as the agent: every attempt of the table of egress, and what came of it.

The environment variable ``ATTEMPTS`` holds a list of [id, operation, argument, …].
Prints one JSON object: id → what was reached, ``None`` where nothing was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import ssl
import struct
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

PROXY = urlsplit(os.environ["HTTP_PROXY"])
WAIT_S = 20.0
DIRECT_S = 3.0
SIOCADDRT = 0x890B
AT_ONCE = 8


def _own() -> tuple[str, str]:
    """The proxy's address in this network of sixteen, and the bridge's."""
    proxy = socket.gethostbyname(str(PROXY.hostname))
    (number,) = struct.unpack(">I", socket.inet_aton(proxy))
    return proxy, socket.inet_ntoa(struct.pack(">I", number & ~15 | 1))


OWN = _own()


def _proxy() -> socket.socket:
    connection = socket.create_connection((PROXY.hostname, PROXY.port), WAIT_S)
    connection.settimeout(WAIT_S)
    return connection


def _all(connection: socket.socket) -> str:
    data = b""
    with contextlib.suppress(OSError):
        while piece := connection.recv(65_536):
            data += piece
    return data.decode("latin-1")


def _page(text: str) -> str | None:
    """What a page of the stand-in says of itself; None: it is none of these pages."""
    _, found, rest = text.partition("site-at ")
    return rest.split()[0] if found else None


def request(target: str, host: str = "x", method: str = "GET") -> str | None:
    """A request to the proxy, with any target."""
    with _proxy() as connection:
        head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        answer = _all(connection)
    status = answer.split()[1] if answer.startswith("HTTP/") else ""
    if "squid-internal" in target or target.startswith("cache_object"):
        return "the manager" if status == "200" else None
    return _page(answer)


def tunnel(target: str, path: str, tls: str = "tls") -> str | None:
    """CONNECT, and a request through it."""
    with _proxy() as connection:
        connection.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        answer = connection.recv(65_536).decode("latin-1")
        if answer.split()[1:2] != ["200"]:
            return None
        inner = connection
        if tls == "tls":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            try:
                inner = context.wrap_socket(connection, server_hostname=target.split(":")[0])
            except (OSError, ssl.SSLError):
                return None
        inner.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return _page(_all(inner)) if tls == "tls" else "a tunnel"


def program(url: str) -> str | None:
    """A program that knows its environment and nothing else; redirects are followed."""
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:  # noqa: S310
            return _page(answer.read().decode("latin-1"))
    except (urllib.error.URLError, OSError):
        return None


def often(target: str, seconds: str) -> str | None:
    """The same request for as long as that; the first page that is not a public one."""
    until, pages = time.monotonic() + float(seconds), 0
    while time.monotonic() < until:
        page = request(target)
        pages += page is not None
        if page is not None and not page.startswith("192.31.196."):
            return page
    assert pages, "not even the public address was ever reached"
    return None


def tcp(host: str, port: str) -> str | None:
    """A direct connection."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as direct:
        direct.settimeout(DIRECT_S)
        try:
            direct.connect((host, int(port)))
        except OSError:
            return None
    return f"{host}:{port}"


def named(host: str, port: str) -> str | None:
    """A direct connection, by name."""
    try:
        socket.create_connection((host, int(port)), DIRECT_S).close()
    except OSError:
        return None
    return f"{host}:{port}"


def udp(host: str, port: str, text: str) -> str | None:
    """A datagram; whether it arrives, the other side tells."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as direct:
        direct.settimeout(DIRECT_S)
        try:
            direct.connect((host, int(port)))
            direct.send(text.encode())
            return direct.recv(4096).decode("latin-1")
        except OSError:
            return None


def icmp(host: str) -> str | None:
    """An echo request, raw or not."""
    for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM):
        try:
            with socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP) as direct:
                direct.settimeout(DIRECT_S)
                direct.sendto(struct.pack(">BBHHH", 8, 0, 0xF7FF, 0, 0), (host, 0))
                direct.recv(1024)
                return host
        except OSError:
            continue
    return None


def raw(protocol: str) -> str | None:
    """A socket that could forge packets."""
    for family, kind in ((socket.AF_INET, socket.SOCK_RAW), (socket.AF_PACKET, socket.SOCK_RAW)):
        with contextlib.suppress(OSError):
            socket.socket(family, kind, int(protocol)).close()
            return "a raw socket"
    return None


def route(gateway: str) -> str | None:
    """A default route of our own (rtentry of net/route.h, x86-64 and arm64)."""

    def address(text: str) -> bytes:
        return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))

    everywhere = address("0.0.0.0")  # noqa: S104 - a route's destination
    entry = bytes(8) + everywhere + address(gateway) + everywhere + struct.pack("=H62x", 0x3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            fcntl.ioctl(control, SIOCADDRT, entry)
        except OSError as error:
            return None if error.errno in (errno.EPERM, errno.EACCES) else f"failed: {error}"
    return "a route"


def lookup(name: str, kind: str, server: str, over: str = "udp") -> str | None:
    """A question to a name server; the answer, when there is any record in it."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    question = (
        struct.pack(">6H", 7, 0x0100, 1, 0, 0, 0) + labels + struct.pack(">BHH", 0, int(kind), 1)
    )
    try:
        if over == "tcp":
            with socket.create_connection((server, 53), DIRECT_S) as direct:
                direct.sendall(struct.pack(">H", len(question)) + question)
                answer = direct.recv(4096)[2:]
        else:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as direct:
                direct.settimeout(DIRECT_S)
                direct.connect((server, 53))
                direct.send(question)
                answer = direct.recv(4096)
        return "an answer" if struct.unpack(">H", answer[6:8])[0] else None
    except (OSError, struct.error):
        return None


def resolve(name: str) -> str | None:
    """The C library's own way."""
    try:
        return str(socket.getaddrinfo(name, 80)[0][4][0])
    except OSError:
        return None


def unix(path: str) -> str | None:
    """A socket in the file system."""
    with socket.socket(socket.AF_UNIX) as local:
        try:
            local.connect(path)
        except OSError:
            return None
    return path


OPERATIONS = {
    name: globals()[name]
    for name in (
        *("request", "tunnel", "program", "often", "tcp", "named", "udp", "icmp", "raw", "route"),
        *("lookup", "resolve", "unix"),
    )
}


def attempt(orders: list[str]) -> tuple[str, object]:
    """One of them."""
    own = (word.replace("{proxy}", OWN[0]).replace("{gateway}", OWN[1]) for word in orders)
    identity, operation, *arguments = own
    try:
        return identity, OPERATIONS[operation](*arguments)
    except Exception as error:
        return identity, f"failed: {error!r}"


with ThreadPoolExecutor(AT_ONCE) as pool:
    print(json.dumps(dict(pool.map(attempt, json.loads(os.environ["ATTEMPTS"])))), flush=True)
