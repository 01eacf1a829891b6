"""Files that survive a crash whole: the old content or the new, never a mixture.

A file that replaces another is written under a temporary name in the same directory, synced,
renamed over the old one, and the directory is synced (storage.md, Files that replace others;
fsync(2), rename(2)).
Its mode is 0600 from the moment it exists.  The functions block; ``await on_disk(function, …)``
runs one in a worker thread.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Generic, ParamSpec, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from forge_core.errors import DiskUnusable, RefusedError

FILE_MODE: Final = 0o600
DISK_THREADS: Final = 8
"""Durable writes have threads of their own: never behind an engine that does not answer."""

MAX_SHARED: Final = 64
"""Calls that take one trip together; the first must not wait long for the last."""

TEMPORARY_PREFIX: Final = ".tmp-"
"""Begins the name of what a crash can leave half-made."""

_REFUSED: Final = {
    errno.EACCES: "path_refused",
    errno.EPERM: "path_refused",
    errno.ELOOP: "path_refused",
    errno.ENOTDIR: "path_refused",
    errno.EISDIR: "path_refused",
    errno.ENAMETOOLONG: "path_refused",
    errno.ENOENT: "file_missing",
    errno.EEXIST: "file_exists",
}
_limiter: Final = anyio.lowlevel.RunVar[anyio.CapacityLimiter]("forge-disk-threads")

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")


async def on_disk(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function of this kind in a worker thread.

    Cancellation is held back until the function is through: what was begun is then either done
    or has failed, and nothing goes on unseen.  There is no timeout, because a sync whose outcome
    is unknown lets nothing that depends on it begin; a disk that hangs stops new effects, as it
    must, and leases end what runs.
    """
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(DISK_THREADS)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(lambda: function(*args, **kwargs), limiter=limiter)


class _Call(Generic[A, T]):
    """One argument, and what came of it."""

    __slots__ = ("argument", "error", "may_go_on", "results")

    def __init__(self, argument: A) -> None:
        self.argument = argument
        self.results: tuple[T, ...] = ()
        self.error: Exception | None = None
        self.may_go_on = anyio.Event()

    @property
    def is_done(self) -> bool:
        return bool(self.results) or self.error is not None


class SharedTrips(Generic[A, T]):
    """:func:`on_disk` for one function of which many are called at once.

    A trip to a worker thread and back costs several times what a small file does, so calls that
    meet take it together: whoever finds nobody under way goes, with all who wait by then.
    """

    def __init__(self, function: Callable[[A], T]) -> None:
        self._function = function
        self._waiting: list[_Call[A, T]] = []
        self._under_way = False

    async def call(self, argument: A) -> T:
        """What ``function(argument)`` returns or raises; cancellation is held back as there."""
        call: _Call[A, T] = _Call(argument)
        self._waiting.append(call)
        with anyio.CancelScope(shield=True):
            if self._under_way:
                await call.may_go_on.wait()
            if not call.is_done:
                await self._go()
        if call.error is not None:
            raise call.error
        return call.results[0]

    async def _go(self) -> None:
        """Take along who waits; afterwards the first of those who came meanwhile goes."""
        calls, self._waiting = self._waiting[:MAX_SHARED], self._waiting[MAX_SHARED:]
        self._under_way = True
        try:
            await on_disk(self._run, calls)
        except Exception as error:  # noqa: BLE001 - no thread to be had; raised likewise
            for call in calls:
                call.error = error
        finally:
            self._under_way = bool(self._waiting)
            for call in (*calls, *self._waiting[:1]):
                call.may_go_on.set()

    def _run(self, calls: Iterable[_Call[A, T]]) -> None:
        for call in calls:
            try:
                call.results = (self._function(call.argument),)
            except Exception as error:  # noqa: BLE001 - raised where the call was made
                call.error = error


@contextmanager
def disk_errors(action: str, path: Path) -> Iterator[None]:
    """Translate what the operating system says about ``path``.

    :raises RefusedError: ``file_missing``, ``file_exists`` or ``path_refused``.
    :raises DiskUnusable: everything else: ENOSPC, EIO, EDQUOT, EROFS, ….
    """
    try:
        yield
    except OSError as error:
        message = f"cannot {action} {path}: {error.strerror or error}"
        code = _REFUSED.get(error.errno or 0)
        if code is not None:
            raise RefusedError(message, code=code) from error
        raise DiskUnusable(message) from error


def replace_file(path: Path, data: bytes) -> None:
    """Make ``data`` the content of ``path``, whether or not there was one.

    :raises DiskUnusable: the old content or the new one is there, and it is whole.
    """
    with disk_errors("write", path):
        temporary = _write_temporary(path, data)
        try:
            temporary.replace(path)
        except OSError:
            _discard(temporary)
            raise
        sync_directory(path.parent)


def create_file(path: Path, data: bytes) -> None:
    """Make ``path`` with ``data``; of several who try at once, exactly one succeeds.

    :raises RefusedError: ``file_exists``.
    :raises DiskUnusable: either nothing is there, or the whole file is.
    """
    with disk_errors("create", path):
        temporary = _write_temporary(path, data)
        try:
            os.link(temporary, path)
        finally:
            _discard(temporary)
        sync_directory(path.parent)


def remove_file(path: Path) -> None:
    """Remove ``path``, durably; that it is gone already is success."""
    with disk_errors("remove", path):
        path.unlink(missing_ok=True)
        sync_directory(path.parent)


def read_file(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file, which is not reached through a symbolic link.

    :raises RefusedError: ``file_missing``, ``path_refused``, or ``file_too_large``.
    """
    with disk_errors("read", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RefusedError(
                    f"cannot read {path}: it is not a regular file", code="path_refused"
                )
            data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise RefusedError(
            f"cannot read {path}: it has more than {max_bytes} bytes", code="file_too_large"
        )
    return data


def sync_directory(path: Path) -> None:
    """Make the names in ``path`` durable; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte; raises OSError, after which part of ``data`` may be there."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sweep_temporary_files(directory: Path, *, min_age_s: float = 0) -> int:
    """Remove what a crash left of unfinished writes; returns how many files that were.

    :param min_age_s: how old they must be where others may be writing at this moment.
    """
    newest = time.time() - min_age_s
    swept = 0
    with disk_errors("sweep", directory), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY_PREFIX) and entry.stat().st_mtime <= newest:
                Path(entry.path).unlink(missing_ok=True)
                swept += 1
    return swept


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(16)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, FILE_MODE)
    try:
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        _discard(temporary)
        raise
    return temporary


def _discard(temporary: Path) -> None:
    with suppress(OSError):  # the sweep at the next start removes what cannot be removed now
        temporary.unlink()
