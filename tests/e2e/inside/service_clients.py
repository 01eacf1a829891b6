"""An agent that uses its services as their clients do; standard library only.

Not imported by anything: a test hands this file's text to an agent (``python3 -c``).  It finds
everything in its environment, prints what it saw as one line of JSON, and fails when a service
does not do its work.
"""

from __future__ import annotations

import base64
import hashlib
import hmac  # noqa: TID251 - runs in a sandbox, with nothing but the standard library
import json
import os
import secrets
import socket
import struct
from urllib.parse import urlsplit

CONNECT_S = 5.0


class Refused(Exception):  # noqa: N818 - says what is the case
    """The server said no, in these words."""


class Postgres:
    """The frontend protocol 3.0 with SCRAM-SHA-256 (RFC 7677), as far as this needs it."""

    def __init__(self, url: str, password: str | None = None) -> None:
        place = urlsplit(url)
        self._socket = socket.create_connection((place.hostname, place.port or 5432), CONNECT_S)
        self._stream = self._socket.makefile("rb")
        user, database = place.username or "", place.path[1:]
        start = f"user\0{user}\0database\0{database}\0\0".encode()
        self._socket.sendall(struct.pack(">ii", len(start) + 8, 196608) + start)
        self._log_in(password if password is not None else place.password or "")
        while self._read()[0] != b"Z":
            continue

    def query(self, statement: str) -> list[list[str]]:
        self._send(b"Q", statement.encode() + b"\0")
        rows: list[list[str]] = []
        error = None
        while True:
            kind, body = self._read()
            if kind == b"D":
                rows.append(self._row(body))
            elif kind == b"E":
                error = _fields(body)
            elif kind == b"Z":
                if error is not None:
                    raise Refused(error)
                return rows

    def _log_in(self, password: str) -> None:
        self._expect(10)
        nonce = secrets.token_urlsafe(18)
        bare = f"n=,r={nonce}"
        first = f"n,,{bare}".encode()
        self._send(b"p", b"SCRAM-SHA-256\0" + struct.pack(">i", len(first)) + first)
        challenge = self._expect(11).decode()
        given = dict(part.split("=", 1) for part in challenge.split(","))
        salted = hashlib.pbkdf2_hmac(
            "sha256", password.encode(), base64.b64decode(given["s"]), int(given["i"])
        )
        final = f"c=biws,r={given['r']}"
        key = hmac.digest(salted, b"Client Key", "sha256")
        signed = f"{bare},{challenge},{final}".encode()
        mask = hmac.digest(hashlib.sha256(key).digest(), signed, "sha256")
        proof = bytes(a ^ b for a, b in zip(key, mask, strict=True))
        self._send(b"p", f"{final},p={base64.b64encode(proof).decode()}".encode())
        self._expect(12)
        self._expect(0)

    def _expect(self, code: int) -> bytes:
        kind, body = self._read()
        if kind == b"E":
            raise Refused(_fields(body))
        assert kind == b"R", kind
        assert struct.unpack(">i", body[:4])[0] == code, body
        return body[4:]

    def _send(self, kind: bytes, body: bytes) -> None:
        self._socket.sendall(kind + struct.pack(">i", len(body) + 4) + body)

    def _read(self) -> tuple[bytes, bytes]:
        head = self._stream.read(5)
        if len(head) < 5:
            raise ConnectionError("the server is gone")
        return head[:1], self._stream.read(struct.unpack(">i", head[1:])[0] - 4)

    def _row(self, body: bytes) -> list[str]:
        (count,), at, row = struct.unpack(">h", body[:2]), 2, []
        for _ in range(count):
            (size,) = struct.unpack(">i", body[at : at + 4])
            row.append(body[at + 4 : at + 4 + size].decode())
            at += 4 + size
        return row


def _fields(body: bytes) -> str:
    fields = {part[:1]: part[1:].decode() for part in body.split(b"\0") if part}
    return f"{fields[b'C']} {fields[b'M']}"


def redis(host: str, *commands: str) -> list[str]:
    """The first lines of the answers to inline commands (RESP)."""
    with socket.create_connection((host, 6379), CONNECT_S) as connection:
        connection.sendall("".join(f"{command}\r\n" for command in (*commands, "QUIT")).encode())
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
    return answer.decode().split("\r\n")


def refusal(url: str, password: str) -> str:
    try:
        Postgres(url, password)
    except Refused as refused:
        return str(refused)
    return "let in"


def main() -> None:
    seen: dict[str, object] = {}
    if url := os.environ.get("DATABASE_URL"):
        database = Postgres(url)
        database.query("CREATE TABLE t (n int, s text)")
        database.query("INSERT INTO t SELECT n, repeat('x', 100) FROM generate_series(1, 1000) n")
        seen["rows"] = database.query("SELECT count(*), sum(n) FROM t")
        seen["umlaut"] = database.query("SELECT upper('ä'), current_user, current_database()")
        seen["postgres"] = database.query("SHOW server_version")[0][0]
        seen["wrong"] = refusal(url, "0" * 32)
        seen["none"] = refusal(url, "")
        parts = (os.environ[f"PG{name}"] for name in ("USER", "PASSWORD", "HOST", "PORT"))
        assert "postgresql://{}:{}@{}:{}/".format(*parts) in url
    if url := os.environ.get("REDIS_URL"):
        host, password = os.environ["REDIS_HOST"], os.environ["REDIS_PASSWORD"]
        assert f":{password}@{host}:{os.environ['REDIS_PORT']}/" in url
        seen["redis"] = redis(host, f"AUTH {password}", "SET k v", "GET k")[:4]
        seen["stranger"] = redis(host, "GET k")[0]
        seen["guess"] = redis(host, f"AUTH {'0' * 32}")[0]
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
