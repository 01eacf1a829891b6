"""Processes of this host that carry a mark in their environment, and how all of them are ended.

A mark is a variable that a process is started with and that its descendants inherit, so it says
whose they are without a record that could be out of date, and a process id that was given to
somebody else in the meantime is never taken for it (proc_pid_environ(5)).  What a marked process
has below it belongs to it as well, marked or not.  Out of reach is what has left by both ways: a
daemon that cleared its environment and whose ancestors have all ended.

The functions block; run them in a worker thread.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from forge_core.errors import RefusedError

MAX_ENVIRONMENT_BYTES: Final = 8 << 20
"""More than execve(2) lets anybody hand over with the usual stack limit."""

EXEC_LOOKS: Final = 50
EXEC_LOOK_S: Final = 0.002
_KERNEL_THREAD: Final = 0x0020_0000
_DEAD: Final = frozenset({b"Z", b"X", b"x"})


@dataclass(frozen=True, slots=True)
class _Process:
    """One line of proc_pid_stat(5); parent and start tell two bearers of one id apart."""

    parent: int
    start_ticks: int


def marks(variable: str) -> frozenset[str]:
    """The values of ``variable`` that living processes carry."""
    return frozenset(found for pid in _table() if (found := _mark(pid, variable)) is not None)


def end_marked(variable: str, value: str, *, within_ms: int) -> bool:
    """Kill every process that carries the mark and everything below; none is left on return.

    Those that have nobody of them above go last: a subreaper inherits what is left until then.

    :returns: whether there was any.
    :raises RefusedError: ``process_resists``: one did not end in time, or is another user's.
    """
    deadline = time.monotonic() + within_ms / 1000
    found_any = False
    while members := _members(variable, value):
        found_any = True
        tops = {pid for pid in members if members[pid].parent not in members}
        victims = members.keys() - tops or tops
        if time.monotonic() >= deadline:
            raise _resists(victims, f"not ended by SIGKILL within {within_ms} ms")
        _kill({pid: members[pid] for pid in victims}, deadline)
    return found_any


def _members(variable: str, value: str) -> dict[int, _Process]:
    """Marked processes and their descendants, without this one and its ancestors."""
    table = _table()
    children: dict[int, list[int]] = defaultdict(list)
    for pid, process in table.items():
        children[process.parent].append(pid)
    ours, own = set(), os.getpid()
    while own in table:
        ours.add(own)
        own = table[own].parent
    todo = [pid for pid in table if pid not in ours and _mark(pid, variable) == value]
    members: dict[int, _Process] = {}
    while todo:
        pid = todo.pop()
        if pid not in members and pid not in ours:
            members[pid] = table[pid]
            todo += children[pid]
    return members


def _kill(victims: Mapping[int, _Process], deadline: float) -> None:
    """SIGKILL to exactly these, and wait until they have ended or time is up."""
    poll = select.poll()
    descriptors: list[int] = []
    waiting = 0
    try:
        for pid, process in victims.items():
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                descriptors.append(descriptor)
                # Whoever has the id now keeps it for as long as the descriptor is open.
                if _stat(pid) != process:
                    continue
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                poll.register(descriptor, select.POLLIN)
                waiting += 1
        while waiting and (ended := poll.poll(max(0.0, deadline - time.monotonic()) * 1000)):
            for descriptor, _ in ended:
                poll.unregister(descriptor)
            waiting -= len(ended)
    except PermissionError as error:
        raise _resists(victims, "not ours to kill") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _table() -> dict[int, _Process]:
    """Every process that has not ended, but for the init, which nobody has started."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdecimal()]
    return {pid: process for pid in pids if pid > 1 and (process := _stat(pid)) is not None}


def _stat(pid: int) -> _Process | None:
    fields = _fields(pid)
    if len(fields) < 20 or fields[0] in _DEAD:
        return None
    return _Process(int(fields[1]), int(fields[19]))


def _mark(pid: int, variable: str) -> str | None:
    name = variable.encode() + b"="
    for entry in _environment(pid).split(b"\0"):
        if entry.startswith(name):
            return entry[len(name) :].decode("utf-8", "replace")
    return None


def _environment(pid: int) -> bytes:
    """As the process was started with; in the middle of execve(2) it shows none for a moment."""
    path = f"/proc/{pid}/environ"
    content = _read(path, MAX_ENVIRONMENT_BYTES)
    for _ in range(EXEC_LOOKS):
        if content or not _is_starting(pid):
            break
        time.sleep(EXEC_LOOK_S)
        content = _read(path, MAX_ENVIRONMENT_BYTES)
    return content


def _is_starting(pid: int) -> bool:
    """Whether its environment has no place yet, which an empty one has (proc_pid_stat(5))."""
    fields = _fields(pid)
    if len(fields) < 49 or fields[0] in _DEAD or int(fields[6]) & _KERNEL_THREAD:
        return False
    return os.access(f"/proc/{pid}/environ", os.R_OK) and int(fields[48]) == 0


def _fields(pid: int) -> list[bytes]:
    """From the state on: the name before it may hold anything, parentheses too."""
    return _read(f"/proc/{pid}/stat", 4096).rpartition(b")")[2].split()


def _read(path: str, max_bytes: int) -> bytes:
    """Nothing where it has gone, or is not ours to look at."""
    content = bytearray()
    with suppress(OSError), open(path, "rb", buffering=0) as file:  # noqa: PTH123 - thousands
        while len(content) < max_bytes and (piece := file.read(1 << 16)):
            content += piece
    return bytes(content)


def _resists(pids: Iterable[int], why: str) -> RefusedError:
    shown = ", ".join(str(pid) for pid in sorted(pids)[:10])
    return RefusedError(f"cannot end the processes {shown}: {why}", code="process_resists")
