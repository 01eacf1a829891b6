"""What stands in for the Internet in a network namespace: web servers, TLS, DNS, and sinks.

Run as root in that namespace; one argument in JSON: ``listen`` (addresses of the web servers),
``names`` (name or ``.suffix`` → lists of addresses, one after the other, the last one for ever;
null: the server fails), ``resolver`` (where DNS is answered), ``certificate`` and ``key`` (files),
``upstream`` (address and port of a proxy).
Prints ``ready``, then one line of JSON for whatever arrives.  Standard library only.
"""

from __future__ import annotations

import http.server
import ipaddress
import json
import socket
import socketserver
import ssl
import struct
import sys
import threading
from collections import Counter
from typing import Any

PLAIN_PORTS = (80, 8080)
TLS_PORTS = (443, 8443)
SINK_PORTS = (22, 3128)
UDP_PORTS = (53, 9999)
TYPE_A, TYPE_AAAA = 1, 28
SERVFAIL = 2

_PRINTING = threading.Lock()


def note(**facts: object) -> None:
    """One line for the test."""
    with _PRINTING:
        print(json.dumps(facts), flush=True)


class Page(http.server.BaseHTTPRequestHandler):
    """Every page says where it comes from; ``/to/URL`` leads to that URL."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        host, port = self.connection.getsockname()[:2]
        note(
            kind="http",
            at=f"{host}:{port}",
            path=self.path,
            host=self.headers.get("Host"),
            headers=dict(self.headers),
        )
        body = f"site-at {host}:{port}\n".encode()
        _, leads, url = self.path.partition("/to/")
        self.send_response(302 if leads else 200)
        if leads:
            self.send_header("Location", url)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Not to the terminal."""


class Upstream(Page):
    """A proxy that everything goes through: it answers itself, and says what it was asked."""

    def do_GET(self) -> None:
        note(
            kind="upstream",
            target=self.path,
            login=self.headers.get("Proxy-Authorization"),
        )
        super().do_GET()


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """One address and port."""

    daemon_threads = True
    request_queue_size = 64

    def server_bind(self) -> None:
        """As of any TCP server: an HTTP server would ask for its own name, and nobody answers."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, *_arguments: object) -> None:
        """A client that goes away is none of ours."""


class Names:
    """What the names stand for."""

    def __init__(self, names: dict[str, list[list[str] | None]]) -> None:
        self._names = names
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def addresses(self, name: str) -> list[str] | None:
        """In turn; None: the server fails."""
        labels = name.split(".")
        keys = [name, *(f".{'.'.join(labels[n:])}" for n in range(1, len(labels)))]
        key = next((key for key in keys if key in self._names), None)
        if key is None:
            return []
        with self._lock:
            turn = self._asked[name]
            self._asked[name] += 1
        turns = self._names[key]
        return turns[min(turn, len(turns) - 1)]


def answer(question: bytes, names: Names, peer: str) -> bytes:
    """One DNS message for another (RFC 1035, 4.1), with a time to live of nothing."""
    labels, end = [], 12
    while length := question[end]:
        labels.append(question[end + 1 : end + 1 + length].decode("latin-1"))
        end += length + 1
    name, kind = ".".join(labels).lower(), struct.unpack_from(">H", question, end + 1)[0]
    note(kind="dns", name=name, type=kind, peer=peer)
    found = names.addresses(name) if kind == TYPE_A else _six(names, name, kind)
    version = 4 if kind == TYPE_A else 6
    wanted = [ipaddress.ip_address(text) for text in found or ()]
    packed = [address.packed for address in wanted if address.version == version]
    flags = 0x8180 | (SERVFAIL if found is None else 0)
    head = question[:2] + struct.pack(">5H", flags, 1, len(packed), 0, 0)
    records = (b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 0, len(p)) + p for p in packed)
    return head + question[12 : end + 5] + b"".join(records)


def _six(names: Names, name: str, kind: int) -> list[str] | None:
    return names.addresses(f"6.{name}") if kind == TYPE_AAAA else []


def serve_names(address: str, names: Names) -> None:
    """DNS over UDP; over TCP nothing of ours asks."""
    resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    resolver.bind((address, 53))
    while True:
        question, peer = resolver.recvfrom(4096)
        try:
            resolver.sendto(answer(question, names, peer[0]), peer)
        except (IndexError, struct.error, OSError) as error:
            note(kind="dns-error", error=repr(error))


def sink(address: str, port: int, kind: int) -> None:
    """Whatever arrives here should not have."""
    listening = socket.socket(socket.AF_INET, kind)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((address, port))
    if kind == socket.SOCK_STREAM:
        listening.listen()
    while True:
        if kind == socket.SOCK_STREAM:
            connection, _ = listening.accept()
            note(kind="tcp", at=f"{address}:{port}")
            connection.close()
        else:
            data, _ = listening.recvfrom(4096)
            note(kind="udp", at=f"{address}:{port}", data=data.decode("latin-1"))


def start(target: Any, *arguments: object) -> None:
    """As long as this process lives."""
    threading.Thread(target=target, args=arguments, daemon=True).start()


def main() -> None:
    """Serve until the end of standard input."""
    orders = json.loads(sys.argv[1])
    for address in orders["listen"]:
        for port in PLAIN_PORTS:
            start(Server((address, port), Page).serve_forever)
        for port in SINK_PORTS:
            start(sink, address, port, socket.SOCK_STREAM)
        for port in UDP_PORTS:
            start(sink, address, port, socket.SOCK_DGRAM)
        if orders.get("certificate"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(orders["certificate"], orders["key"])
            for port in TLS_PORTS:
                server = Server((address, port), Page)
                server.socket = context.wrap_socket(
                    server.socket, server_side=True, do_handshake_on_connect=False
                )
                start(server.serve_forever)
    if orders.get("upstream"):
        start(Server(tuple(orders["upstream"]), Upstream).serve_forever)
    if orders.get("resolver"):
        start(serve_names, orders["resolver"], Names(orders["names"]))
    note(kind="ready")
    sys.stdin.read()


main()
