"""Who owns a Docker engine and a state root: one process at a time, until it dies.

Three locks, taken without waiting: the state root itself (its outbox and its ledgers have one
reader), the engine within it (storage.md), and an abstract socket named after engine and runner
id, so that two state roots cannot both own one runner id (lifecycle.md, Start-up and reaping).
All three are released by death; the files stay, since removing a lock file lets two owners in.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from forge_core.errors import RefusedError, RetryableError
from forge_edges.durable_file import FILE_MODE, disk_errors

_PLAIN_ENGINE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_-]{0,127}\Z")
_MAX_CONTENT_BYTES: Final = 4_096
_PROBES: Final = 128
"""How many may ask who holds the name; they are never answered, and later ones learn less."""

_PEER_CREDENTIALS: Final = struct.Struct("iII")


class EngineLockHeld(RetryableError):  # noqa: N818 - says what is the case
    """Another process owns the engine, the state root or the runner id (exit status 75).

    :ivar holder_pid: which; None when that cannot be told.
    """

    def __init__(self, what: str, holder_pid: int | None) -> None:
        holder = "another process" if holder_pid is None else f"process {holder_pid}"
        super().__init__(f"cannot take {what}: {holder} holds it; stop it, or let it do the work")
        self.holder_pid = holder_pid


class EngineLock:
    """Held from its making until :meth:`release`, or the end of the process."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held

    def release(self) -> None:
        """Let others in; idempotent."""
        self._held.close()


def take_locks(
    root: Path, *, engine_id: str, runner_id: str, instance_id: str, since: str
) -> EngineLock:
    """Take all three locks, or none; does not wait.

    :raises EngineLockHeld: somebody else has one of them.
    :raises RefusedError: code ``lock_refused``; the file system or the kernel has no such locks.
    :raises DiskUnusable: a lock file cannot be made.
    """
    content = {"pid": os.getpid(), "instance": instance_id, "since": since}
    with ExitStack() as stack:
        for name in ("state-root.lock", engine_lock_name(engine_id)):
            _take_file(stack, root / name, content)
        _take_socket(stack, engine_id, runner_id)
        return EngineLock(stack.pop_all())


def probe_locks(root: Path, *, engine_id: str | None = None, runner_id: str = "") -> None:
    """Take what :func:`take_locks` would take, as far as it exists, and let it go again.

    :raises EngineLockHeld: somebody has one of them.
    """
    names = ["state-root.lock"] + ([] if engine_id is None else [engine_lock_name(engine_id)])
    with ExitStack() as stack:
        for name in names:
            path = root / name
            with disk_errors("look at", path):
                try:
                    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue
                stack.callback(os.close, descriptor)
                _flock(descriptor, path)
        if engine_id is not None:
            _take_socket(stack, engine_id, runner_id)


def engine_lock_name(engine_id: str) -> str:
    """The file name for an engine, whose id is whatever the engine says."""
    if _PLAIN_ENGINE_ID.match(engine_id) is None:
        engine_id = hashlib.sha256(engine_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"engine-{engine_id}.lock"


def _take_file(stack: ExitStack, path: Path, content: dict[str, object]) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with disk_errors("take", path):
        descriptor = os.open(path, flags, FILE_MODE)
        stack.callback(os.close, descriptor)
        _flock(descriptor, path)
    with suppress(OSError):  # advice for people: a full disk must not keep the reaper out
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(content).encode() + b"\n", 0)


def _flock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise EngineLockHeld(str(path), _pid_in(descriptor)) from None
    except OSError as error:
        if error.errno in {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise RefusedError(
                f"cannot lock {path}: its file system has no locks; set"
                " FORGE_SANDBOX_STATE_ROOT to a directory on a local disk",
                code="lock_refused",
            ) from error
        raise


def _pid_in(descriptor: int) -> int | None:
    """What the holder wrote; advice for people only."""
    try:
        content = json.loads(os.pread(descriptor, _MAX_CONTENT_BYTES, 0))
    except ValueError:
        return None
    pid = content.get("pid") if isinstance(content, dict) else None
    return pid if isinstance(pid, int) else None


def _take_socket(stack: ExitStack, engine_id: str, runner_id: str) -> None:
    """Bind an abstract name (unix(7)), which the kernel frees when its last holder is gone."""
    key = f"{engine_id}\0{runner_id}".encode("utf-8", "surrogatepass")
    address = f"\0forge-bridge/{hashlib.sha256(key).hexdigest()[:32]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(address)
            listener.listen(_PROBES)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RefusedError(
                    f"cannot lock runner {runner_id}: {error.strerror}", code="lock_refused"
                ) from error
            what = f"runner id {runner_id} on this engine"
            raise EngineLockHeld(what, _pid_behind(address)) from None
        # A bare descriptor, so that a lock that nobody refers to any more is still held.
        stack.callback(os.close, listener.detach())


def _pid_behind(address: str) -> int | None:
    """The process that listens there, as the kernel knows it (unix(7), SO_PEERCRED)."""
    size = _PEER_CREDENTIALS.size
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        except OSError:
            return None
    pid: int = _PEER_CREDENTIALS.unpack(raw)[0]
    return pid or None
