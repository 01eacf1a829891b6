"""What PID 1 runs in a service's container: the server, tried from inside as a client would.

Run as ``python3 -I -S -c <this source> <JSON>`` from the tooling's own interpreter, so it is one
file, standard library only, Python 3.9 and later.  The image brings the server and its client.

``{"look": account}`` prints the numeric user and group of an account of the image, then ends.
``{"serve": {...}}`` starts a server and prints one line of JSON once a client with the password
was answered and one without it was refused; it ends when the server ends, never with 0.

The password comes in an environment variable, which PID 1 got over stdin.  It goes on through
a pipe, a client's own connection, or a file in memory that is gone before the line is printed:
never into an argument or the environment of another process.  All that others print goes to
stderr.

Source: sandbox.md "Services", docs/reference/service-images.md (B-55).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

PASSWORD = "FORGE_SERVICE_PASSWORD"
LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
PAUSE_S = 0.05  # between two tries; how long there may be tries is the host's to decide
CLIENT_S = 10.0
MAX_ANSWER_BYTES = 64 * 1024
STDERR = 2

IN_MEMORY = Path("/run")
DATA = Path("/data")


def say(**facts: object) -> None:
    """One line for the host."""
    print(json.dumps(facts), flush=True)


def write_private(path: Path, text: str) -> None:
    """A new file that only this user can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


class Service:
    """A server and its client.

    :param options: ``port``, ``memoryBytes``, ``dataBytes`` and what else the kind needs.
    """

    def __init__(self, options: dict[str, Any], password: str) -> None:
        self.options = options
        self.port = int(options["port"])
        self.password = password

    def start(self) -> subprocess.Popen[bytes]:
        """Start the server."""
        raise NotImplementedError

    def version(self) -> str | None:
        """What a client with the password is told; None: the server is not there yet."""
        raise NotImplementedError

    def refuses_strangers(self) -> bool:
        """Whether a client without the password is turned away."""
        raise NotImplementedError

    def run(self, argv: list[str], given: bytes | None = None) -> subprocess.Popen[bytes]:
        """Start a program; its output goes to stderr."""
        stdin = subprocess.DEVNULL if given is None else subprocess.PIPE
        process = subprocess.Popen(argv, stdin=stdin, stdout=STDERR)
        if given is not None:
            assert process.stdin is not None
            process.stdin.write(given)
            process.stdin.close()
        return process


class Postgres(Service):
    """A cluster in memory with one superuser and one database, both named by the options."""

    cluster = DATA / "cluster"
    passfile = IN_MEMORY / "passfile"

    def start(self) -> subprocess.Popen[bytes]:
        """Make the cluster, then start it.  Nothing of it outlives the container: no fsync."""
        write_private(self.passfile, f"{LOOPBACK}:*:*:*:{self.password}\n")
        password = IN_MEMORY / "password"
        write_private(password, self.password)
        initdb = [
            *("initdb", "--no-sync", "--wal-segsize=4", f"--pwfile={password}"),
            *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8"),
            *(f"--username={self.options['user']}", f"--pgdata={self.cluster}"),
        ]
        made = self.run(initdb).wait()
        password.unlink()
        if made != 0:
            sys.exit(f"cannot make a cluster: initdb ended with {made}")
        with (self.cluster / "pg_hba.conf").open("a") as rules:
            rules.write("host all all all scram-sha-256\n")
        settings = {
            "listen_addresses": "*",
            "unix_socket_directories": IN_MEMORY,
            "fsync": "off",
            "full_page_writes": "off",
            "synchronous_commit": "off",
            "shared_buffers": f"{self.options['memoryBytes'] // 8 // 1024}kB",
            "min_wal_size": "8MB",
            "max_wal_size": f"{max(8, self.options['dataBytes'] // 4 >> 20)}MB",
        }
        given = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return self.run(["postgres", "-D", str(self.cluster), "-p", str(self.port), *given])

    def version(self) -> str | None:
        ready = ["pg_isready", "--quiet", f"--host={LOOPBACK}", f"--port={self.port}"]
        if self.run(ready).wait(CLIENT_S) != 0:
            return None
        database = str(self.options["database"])
        created = self._psql("postgres", f'CREATE DATABASE "{database}"', self.passfile)
        shown = self._psql(database, "SELECT current_setting('server_version')", self.passfile)
        self.passfile.unlink()
        if created is None or not shown:
            sys.exit("cannot use the server: it did not answer the password that it was given")
        return shown.split()[0]

    def refuses_strangers(self) -> bool:
        wrong = IN_MEMORY / "wrong"
        write_private(wrong, f"{LOOPBACK}:*:*:*:not-{self.password}\n")
        answer = self._psql("postgres", "SELECT 1", wrong)
        wrong.unlink()
        return answer is None

    def _psql(self, database: str, statement: str, passfile: Path) -> str | None:
        """What a statement yields; None: it failed."""
        address = [f"--host={LOOPBACK}", f"--port={self.port}"]
        role = [f"--username={self.options['user']}", f"--dbname={database}"]
        quiet = ["--no-psqlrc", "--no-password", "--quiet", "--tuples-only", "--no-align"]
        done = subprocess.run(
            ["psql", *address, *role, *quiet, f"--command={statement}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, "PGPASSFILE": str(passfile), "PGCONNECT_TIMEOUT": "5"},
            timeout=CLIENT_S,
        )
        return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


class Redis(Service):
    """A store in memory, bounded below what the container has."""

    def start(self) -> subprocess.Popen[bytes]:
        lines = (
            f"bind {EVERYWHERE}",
            f"port {self.port}",
            f"requirepass {self.password}",
            "protected-mode no",
            "maxclients 1000",
            "daemonize no",
            'save ""',
            "appendonly no",
            f"dir {DATA}",
            f"maxmemory {self.options['dataBytes']}",
        )
        return self.run(["redis-server", "-"], "\n".join((*lines, "")).encode())

    def version(self) -> str | None:
        answer = self._ask(f"AUTH {self.password}\r\nPING\r\nINFO server\r\n")
        if answer is None or "-LOADING" in answer:
            return None
        if not answer.startswith("+OK\r\n+PONG\r\n"):
            sys.exit("cannot use the server: it did not take the password that it was given")
        return answer.partition("redis_version:")[2].partition("\r\n")[0]

    def refuses_strangers(self) -> bool:
        answers = self._ask("PING\r\n"), self._ask(f"AUTH not-{self.password}\r\n")
        return all(answer is not None and answer.startswith("-") for answer in answers)

    def _ask(self, commands: str) -> str | None:
        """The answers to inline commands (RESP); None: nobody listens."""
        answer = b""
        try:
            with socket.create_connection((LOOPBACK, self.port), CLIENT_S) as connection:
                connection.sendall(f"{commands}QUIT\r\n".encode())
                while len(answer) < MAX_ANSWER_BYTES and (piece := connection.recv(4096)):
                    answer += piece
        except OSError:
            return None
        return answer.decode("utf-8", "replace")


class Browser(Service):
    """A headless Chromium and its DevTools protocol, which knows no password.

    Chromium listens on the loopback address whatever it is told, so the port that others reach
    is this process's, and what comes there is handed on as it is.
    """

    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless-shell")

    def start(self) -> subprocess.Popen[bytes]:
        program = next((name for name in self.names if shutil.which(name)), None)
        if program is None:
            sys.exit(f"cannot find a browser: none of {', '.join(self.names)} is on PATH")
        inner = self.port + 1
        argv = [
            *(program, "--headless", "--no-sandbox", "--no-first-run", "--disable-gpu"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--disable-crash-reporter", "--disable-breakpad", "--no-default-browser-check"),
            *(f"--user-data-dir={DATA / 'profile'}", f"--remote-debugging-port={inner}"),
        ]
        if proxy := self.options.get("proxy"):
            argv += [f"--proxy-server={proxy}", f"--proxy-bypass-list={self.options['bypass']}"]
        server = self.run([*argv, "about:blank"])
        threading.Thread(target=hand_on, args=(self.port, inner), daemon=True).start()
        return server

    def version(self) -> str | None:
        import http.client  # slow to import, and the others do without

        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=CLIENT_S)
        try:
            connection.request("GET", "/json/version")
            answer = json.loads(connection.getresponse().read(MAX_ANSWER_BYTES))
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()
        return str(answer["Browser"]).rpartition("/")[2]

    def refuses_strangers(self) -> bool:
        return True  # who reaches the port is decided by the network alone


def hand_on(port: int, inner: int) -> None:
    """Join every connection to ``port`` with one to ``inner`` on the loopback address."""
    import asyncio  # likewise

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(MAX_ANSWER_BYTES):
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(LOOPBACK, inner)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    async def listen() -> None:
        async with await asyncio.start_server(join, EVERYWHERE, port) as server:
            await server.serve_forever()

    asyncio.run(listen())


SERVICES: dict[str, type[Service]] = {"postgres": Postgres, "redis": Redis, "browser": Browser}


def serve(options: dict[str, Any]) -> None:
    """See the module."""
    service = SERVICES[options["service"]](options, os.environ.pop(PASSWORD, ""))
    server = service.start()
    version = None
    while version is None and server.poll() is None:
        version = service.version()
        if version is None:
            time.sleep(PAUSE_S)
    if version is not None:
        if not service.refuses_strangers():
            sys.exit("cannot use the server: it answers whoever has not the password")
        say(version=version)
    status = server.wait()
    how = f"exit code {status}" if status >= 0 else f"signal {-status}"
    sys.exit(f"the server ended with {how}")


def look(account: str) -> None:
    """Read the image's own passwd(5), since the C library here is not the image's."""
    found: tuple[int, int] | None = None
    for line in Path("/etc/passwd").read_text("utf-8", "replace").splitlines():
        name, _, uid, gid, *_ = [*line.split(":"), "", "", ""]
        if name == account and uid.isdecimal() and gid.isdecimal():
            found = int(uid), int(gid)
            break
    say(user=found)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    serve(asked["serve"]) if "serve" in asked else look(asked["look"])
