"""A PostgreSQL server of a test session's own: private data, one Unix socket, no network.

The binaries are the machine's, as Debian installs them, or else unpacked beside it by the means of
the test bed.  PostgreSQL refuses to run as root, so root lends it to ``nobody``.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engines import REPOSITORY
from rig import wait_for

sys.path.insert(0, str(REPOSITORY / "scripts"))

from lib.debian import Packages, library_path
from lib.layout import BedError, Layout

PACKAGES = ("postgresql-15", "postgresql-client-15")
INSTALLED = Path("/usr/lib/postgresql")
USER = "forge"
NOBODY = 65534
# nobody may lack the right to pass through the folders above unpacked binaries.
LEND = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)


class PostgreSQLMissingError(Exception):
    """There is none, and none can be had; the message says why."""


class PostgreSQL:
    """A running server that makes databases.

    :ivar folder: holds the data and the socket.
    """

    def __init__(self, folder: Path, binaries: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._binaries = binaries
        self._environment = environment
        self._numbers = itertools.count(1)

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of an empty database, gone afterwards."""
        name = f"hub{next(self._numbers)}"
        self.call("createdb", name)
        try:
            yield f"postgresql+asyncpg://{USER}@/{name}?host={self.folder}"
        finally:
            self.call("dropdb", "--force", name)

    def call(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's own client programs."""
        where = (f"--host={self.folder}", f"--username={USER}")
        command = [str(self._binaries / program), *where, *arguments]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"

    def is_ready(self) -> bool:
        """Whether it takes connections."""
        command = [str(self._binaries / "pg_isready"), "--quiet", f"--host={self.folder}"]
        return subprocess.run(command, env=self._environment, timeout=60).returncode == 0


@contextmanager
def running_postgresql() -> Iterator[PostgreSQL]:
    """A fresh server; nothing of it is left.

    :raises PostgreSQLMissingError: it cannot be had on this machine.
    """
    binaries, libraries = _find()
    lend = LEND if os.geteuid() == 0 else ()
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    if libraries:
        environment["LD_LIBRARY_PATH"] = libraries
    folder = Path(tempfile.mkdtemp(prefix="forge-pg-", dir="/tmp"))  # short: it holds a socket
    data, log = folder / "data", folder / "log"
    try:
        if lend:
            os.chown(folder, NOBODY, NOBODY)
        options = ("--auth=trust", f"--username={USER}", "--encoding=UTF8", "--no-locale")
        initialise = [*lend, str(binaries / "initdb"), f"--pgdata={data}", *options, "--no-sync"]
        done = subprocess.run(
            initialise, env=environment, cwd="/", capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        command = [*lend, str(binaries / "postgres"), "-D", str(data), "-k", str(folder)]
        with (
            log.open("wb") as stream,
            subprocess.Popen(
                [*command, "-c", "listen_addresses="], env=environment, cwd="/", stderr=stream
            ) as server,
        ):
            try:
                postgresql = PostgreSQL(folder, binaries, environment)
                wait_for("PostgreSQL", lambda: _is_up(server, postgresql, log), 60)
                yield postgresql
            finally:
                server.send_signal(signal.SIGINT)  # a fast shutdown: pg_ctl(1)
                server.wait(60)
    finally:
        shutil.rmtree(folder)


def _is_up(server: subprocess.Popen[bytes], postgresql: PostgreSQL, log: Path) -> bool:
    assert server.poll() is None, log.read_text()[-3000:]
    return postgresql.is_ready()


def _find() -> tuple[Path, str]:
    """The folder of its programs, and where libraries are that came with them."""
    installed = sorted(INSTALLED.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if installed:
        return installed[-1].parent, ""
    try:
        prefix = Packages(Layout.from_environment().cache).unpack_missing(PACKAGES)
    except BedError as error:
        raise PostgreSQLMissingError(str(error)) from error
    return next(prefix.glob("usr/lib/postgresql/*/bin")), library_path(prefix)
