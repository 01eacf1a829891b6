"""Daemons that outlive the process which started them, and their certain end.

A process id alone proves nothing: ids are used again.  A record holds the id *and* the start
time that the kernel keeps for it (proc(5), ``/proc/pid/stat`` field 22), and both must match
before anything is signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lib.layout import BedError

LOG_KEEP_BYTES = 1 << 20
KILL_WAIT_S = 5.0
DAEMONS = frozenset(
    {"containerd", "containerd-shim-runc-v2", "docker-proxy", "docker-registry", "dockerd"}
    | {"qemu-system-x86_64", "rootlesskit", "rootlesskit-docker-proxy", "slirp4netns", "socat"}
)


@dataclass(frozen=True)
class Process:
    """One process, told apart from every later one with the same id."""

    pid: int
    started_ticks: int

    @classmethod
    def observe(cls, pid: int) -> Process | None:
        """The process that has this id now; None when there is none, or only a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The command name is in parentheses and may itself hold spaces and parentheses.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        return Process.observe(self.pid) == self

    def signal(self, number: signal.Signals) -> None:
        """Signal this process and no later one: the descriptor pins it while it is checked."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive:
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait for the end; True when it came in time."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive:
                return True
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            return bool(poller.poll(timeout_s * 1000))
        finally:
            os.close(descriptor)

    def end(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after ``grace_s``.

        :raises BedError: the process survives even that.
        """
        self.signal(signal.SIGTERM)
        if self.wait_gone(grace_s):
            return
        self.signal(signal.SIGKILL)
        if not self.wait_gone(KILL_WAIT_S):
            raise BedError(f"cannot end process {self.pid}: it survives SIGKILL")


def recorded(record: Path) -> Process | None:
    """The living process that ``record`` names, else None."""
    try:
        process = Process(**json.loads(record.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return process if process.alive else None


def start(
    argv: Sequence[str],
    *,
    record: Path,
    log: Path,
    environment: Mapping[str, str],
    prepare: Sequence[str] = (),
) -> Process:
    """Start a daemon in a session of its own and record it.

    :param prepare: a command that ends in ``exec`` of the rest (``nsenter …``, ``setpriv …``),
        so that the process id stays the daemon's.
    """
    record.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    _trim(log)
    with log.open("ab") as output:
        child = subprocess.Popen(
            [*prepare, *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=dict(environment),
            start_new_session=True,
        )
    process = Process.observe(child.pid)
    if process is None:
        raise BedError(f"cannot start {argv[0]}: {tail(log)}")
    # Nobody waits for a daemon: it is meant to outlive this process.
    child.returncode = 0
    partial = record.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(process)))
    partial.replace(record)
    return process


def wait_ready(
    what: str, ready: Callable[[], bool], process: Process, log: Path, timeout_s: float
) -> None:
    """Wait until ``ready()`` holds.

    :raises BedError: the process ended or the time is over; the log's last lines say why.
    """
    give_up = time.monotonic() + timeout_s
    while not ready():
        if not process.alive:
            raise BedError(f"cannot start {what}: it ended at once. {tail(log)}")
        if time.monotonic() > give_up:
            raise BedError(f"cannot start {what}: not ready after {timeout_s:.0f} s. {tail(log)}")
        time.sleep(0.02)


def tail(log: Path, lines: int = 6) -> str:
    """The last lines of a log on one line, with its name."""
    try:
        text = log.read_text(errors="replace")[-4000:]
    except FileNotFoundError:
        text = ""
    last = " | ".join(text.strip().splitlines()[-lines:])
    return f"Log {log}: {last or 'empty'}"


def _trim(log: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > LOG_KEEP_BYTES:
            log.unlink()


def belonging_to(places: Sequence[Path]) -> list[Process]:
    """Daemons whose arguments name one of ``places``, and what runs on a root file system there.

    The places are folders that only the test bed writes, so whatever names them is its own: shims
    and container processes that survived a killed daemon are found like this.
    """
    prefixes = tuple(f"{place}/" for place in places)
    return [process for process in _all() if _is_ours(process.pid, prefixes)]


def describe(process: Process) -> str:
    """Process id and command line, for messages."""
    try:
        argv = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        argv = []
    return f"process {process.pid} ({os.fsdecode(b' '.join(argv))[:120].strip()})"


def _all() -> Iterator[Process]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (process := Process.observe(int(entry.name))) is not None:
            yield process


def _is_ours(pid: int, prefixes: tuple[str, ...]) -> bool:
    try:
        argv = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
        if os.path.basename(argv[0]) in DAEMONS:
            return any(prefix in argument for argument in argv for prefix in prefixes)
        mounts = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError:
        return False
    return any(_root_lies_in(line, prefixes) for line in mounts.splitlines())


def _root_lies_in(mountinfo_line: str, prefixes: tuple[str, ...]) -> bool:
    # proc(5), mountinfo: field 5 is the mount point; super options hold overlay's upperdir.
    return mountinfo_line.split(" ")[4] == "/" and any(
        f"upperdir={prefix}" in mountinfo_line for prefix in prefixes
    )
