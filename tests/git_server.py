"""A real Git server: ``git http-backend`` (git-http-backend(1)) behind HTTP Basic, in threads.

What can go wrong with such a server is a :class:`Fault` of it, which a test sets while it runs.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

USERNAME = "forge"
PASSWORD = "canary:push/credential+0123456789"
IDENTITY = ("-c", "user.name=Human", "-c", "user.email=human@localhost")
MAX_BODY_BYTES = 64 << 20


def git(directory: Path, *arguments: str) -> str:
    """Git as a person would use it, whatever this account's configuration says."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    command = ["git", *IDENTITY, "-C", str(directory), *arguments]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip()


def make_credentials(directory: Path, url: str, *, project: str, repository: str) -> Path:
    """What ``FORGE_HUB_CREDENTIALS_DIRECTORY`` names, with one credential in it."""
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / project).mkdir(mode=0o700, exist_ok=True)
    path = directory / project / f"{repository}.json"
    path.touch(mode=0o600)
    grant = {"repositoryUrl": url, "username": USERNAME, "credential": PASSWORD}
    path.write_text(json.dumps(grant))
    return directory


@dataclass(slots=True)
class Fault:
    """What the server does to a request for a push besides serving it.

    :ivar hang: neither looks nor pushes (``looks``), or no push (``pushes``), get an answer.
    :ivar lose_answer: the push is carried out, and its answer is withheld.
    :ivar redirect_to: where every request is sent instead.
    :ivar expires_after: how many requests the credential is good for.
    :ivar status: an answer that is none of Git's.
    """

    hang: str | None = None
    lose_answer: bool = False
    redirect_to: str | None = None
    expires_after: int | None = None
    status: int | None = None


@dataclass(slots=True)
class GitServer:
    """One that serves every bare repository below a directory.

    :ivar seen: each request: method, path with query, and whether its credential was right.
    :ivar entered: set when a request hangs or has lost its answer.
    """

    root: Path
    url: str
    username: str = USERNAME
    password: str = PASSWORD
    fault: Fault = field(default_factory=Fault)
    seen: list[tuple[str, str, bool]] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def create(self, name: str, *, source: Path | None = None, object_format: str = "sha1") -> str:
        """A bare repository, of ``source``'s branches where one is named; returns its URL."""
        path = self.root / f"{name}.git"
        git(self.root, "init", "-q", "--bare", f"--object-format={object_format}", str(path))
        git(path, "config", "http.receivepack", "true")
        if source is not None:
            git(source, "push", "-q", str(path), "refs/heads/*:refs/heads/*")
        return f"{self.url}/{name}.git"

    def branch(self, name: str, branch: str) -> str | None:
        """The commit of a branch, read from the server's disk."""
        wanted = ("--format=%(objectname)", f"refs/heads/{branch}")
        return git(self.root / f"{name}.git", "for-each-ref", *wanted) or None

    def commit(self, name: str, branch: str, message: str) -> str:
        """What a person pushes on top of a branch, or beside it where there is none."""
        path, parent = self.root / f"{name}.git", self.branch(name, branch)
        tree = git(path, "mktree", "--missing") if parent is None else f"{parent}^{{tree}}"
        parents = () if parent is None else ("-p", parent)
        made = git(path, "commit-tree", tree, *parents, "-m", message)
        git(path, "update-ref", f"refs/heads/{branch}", made)
        return made

    @property
    def pushes(self) -> int:
        """How many packs were sent."""
        return sum(1 for method, path, _ in self.seen if _is_push(method, path))


def _is_push(method: str, path: str) -> bool:
    return method == "POST" and path.endswith("/git-receive-pack")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Nothing; ``seen`` is the log."""

    def _serve(self) -> None:
        served, fault = self.server.served, self.server.served.fault
        body = self._body()
        is_right = self._is_right()
        served.seen.append((self.command, self.path, is_right))
        if fault.hang == "looks" or (fault.hang == "pushes" and _is_push(self.command, self.path)):
            self._hang()
        elif fault.redirect_to is not None:
            self._answer(307, {"Location": fault.redirect_to + self.path})
        elif fault.status is not None:
            self._answer(fault.status, {})
        elif not is_right:
            self._answer(401, {"WWW-Authenticate": 'Basic realm="git"'})
        else:
            answer = self._backend(body)
            if fault.lose_answer and _is_push(self.command, self.path):
                self._hang()
            else:
                self._relay(answer)

    def _hang(self) -> None:
        served = self.server.served
        served.entered.set()
        served.released.wait()
        self.close_connection = True

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = bytearray()
        while (size := int(self.rfile.readline().split(b";")[0], 16)) and len(
            pieces
        ) < MAX_BODY_BYTES:
            pieces += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(pieces)

    def _is_right(self) -> bool:
        served = self.server.served
        pair = base64.b64encode(f"{served.username}:{served.password}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {pair}":
            return False
        if served.fault.expires_after is None:
            return True
        served.fault.expires_after -= 1
        return served.fault.expires_after >= 0

    def _backend(self, body: bytes) -> bytes:
        """CGI (RFC 3875), as far as Git needs it."""
        parts = urlsplit(self.path)
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.server.served.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_NOSYSTEM": "1",
            "HOME": str(self.server.served.root),
            "REQUEST_METHOD": self.command,
            "PATH_INFO": parts.path,
            "QUERY_STRING": parts.query,
            "REMOTE_USER": self.server.served.username,
            "REMOTE_ADDR": "127.0.0.1",
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        done = subprocess.run(
            ["git", "http-backend"], input=body, env=environment, capture_output=True, check=False
        )
        return done.stdout

    def _relay(self, answer: bytes) -> None:
        head, _, content = answer.partition(b"\r\n\r\n")
        lines = [line.partition(":") for line in head.decode().split("\r\n") if line]
        fields = {name: value.strip() for name, _, value in lines}
        status = int(fields.pop("Status", "200").split()[0])
        self._answer(status, fields, content)

    def _answer(self, status: int, fields: Mapping[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    served: GitServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was ended breaks its connection."""


@contextmanager
def git_server(root: Path, *, tls: ssl.SSLContext | None = None) -> Iterator[GitServer]:
    """One on a free port of 127.0.0.1; gone, threads included, at the end."""
    assert shutil.which("git")
    root.mkdir(exist_ok=True)
    server = _Server(("127.0.0.1", 0), _Handler)
    scheme, port = "http", server.server_address[1]
    if tls is not None:
        scheme = "https"
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    host = "localhost" if tls is not None else "127.0.0.1"
    server.served = GitServer(root, f"{scheme}://{host}:{port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.served
    finally:
        server.served.released.set()
        server.shutdown()
        with suppress(OSError):
            server.socket.shutdown(socket.SHUT_RDWR)
        server.server_close()
        thread.join()
