"""Unpacks a tar of ours into a directory, and never outside of it.

Whatever the archive says: a path goes down from the directory one component at a time, through no
link, and everything is new where it is made.  What is neither a file, a directory nor a symbolic
link is refused; owners and times are not taken over.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import anyio
import anyio.lowlevel
import anyio.to_thread

from forge_core.errors import RefusedError
from forge_edges.durable_file import disk_errors, write_all
from forge_edges.process import first_failure

CHUNK_BYTES: Final = 1 << 18
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


async def unpack(
    archive: AsyncIterable[bytes], directory: Path, threads: anyio.CapacityLimiter
) -> None:
    """Unpack *archive* as it comes; memory stays flat.  Modes are cut by the umask.

    :param threads: for this alone: what makes the archive may need threads as well.
    :raises RefusedError: code ``workspace_invalid``: it is no tar, or wants to be elsewhere.
    :raises DiskUnusable: there is no room for it.
    :raises ForgeError: of the archive itself.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with first_failure():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_feed, archive, writer)
            # Closed in the end: whatever is still to be fed has no reader any more.
            with os.fdopen(reader, "rb") as source:
                try:
                    await anyio.to_thread.run_sync(_unpack, source, directory, limiter=threads)
                except RefusedError:
                    # Cut short from outside: that is no fault of the archive.
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    raise


async def _feed(archive: AsyncIterable[bytes], writer: int) -> None:
    """Write it all; whatever ends this ends the reader too."""
    iterator = aiter(archive)
    try:
        async for piece in iterator:
            view = memoryview(piece)
            while view:
                try:
                    view = view[os.write(writer, view) :]
                except BlockingIOError:
                    await anyio.wait_writable(writer)
    except BrokenPipeError:
        return
    finally:
        os.close(writer)
        # What a generator holds open must not wait for the garbage collector.
        if isinstance(iterator, AsyncGenerator):
            with anyio.CancelScope(shield=True):
                await iterator.aclose()


def _unpack(source: IO[bytes], directory: Path) -> None:
    try:
        with (
            disk_errors("unpack into", directory),
            tarfile.open(
                fileobj=source, mode="r|", encoding="utf-8", errors="surrogateescape"
            ) as tar,
            _below(directory) as below,
        ):
            while (member := tar.next()) is not None:
                # It keeps every one that it has seen (tarfile, "TarFile Objects").
                tar.members.clear()  # type: ignore[attr-defined]
                _place(tar, member, below)
    except (tarfile.TarError, RefusedError) as error:
        raise RefusedError(
            f"cannot unpack the workspace: {error}", code="workspace_invalid"
        ) from error


def _place(tar: tarfile.TarFile, member: tarfile.TarInfo, below: _Below) -> None:
    path = member.name.rstrip("/")
    if not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise _refused(member, "it has no place below the directory")
    parents, _, name = path.rpartition("/")
    parent = below.open(parents)
    if member.isdir():
        os.mkdir(name, member.mode & 0o777, dir_fd=parent)
    elif member.issym():
        os.symlink(member.linkname, name, dir_fd=parent)
    elif member.isreg():
        _write(tar, member, os.open(name, _NEW_FILE, member.mode & 0o777, dir_fd=parent))
    else:
        raise _refused(member, "it is neither file, directory nor link")


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, file: int) -> None:
    try:
        content = tar.extractfile(member)
        assert content is not None, "it is a regular file"
        while chunk := content.read(CHUNK_BYTES):
            write_all(file, chunk)
    finally:
        os.close(file)


class _Below:
    """Opens directories below one, through no link; keeps the last one open."""

    def __init__(self, top: int) -> None:
        self._top = self._last = top
        self._path = ""

    def open(self, path: str) -> int:
        """A descriptor that is good until the next call."""
        if path == self._path:
            return self._last
        self.close()
        for component in path.split("/") if path else ():
            inner = os.open(component, _DIRECTORY, dir_fd=self._last)
            self.close()
            self._last = inner
        self._path = path
        return self._last

    def close(self) -> None:
        """Let go of the last one."""
        if self._last != self._top:
            os.close(self._last)
            self._last, self._path = self._top, ""


@contextmanager
def _below(directory: Path) -> Iterator[_Below]:
    top = os.open(directory, _DIRECTORY)
    below = _Below(top)
    try:
        yield below
    finally:
        below.close()
        os.close(top)


def _refused(member: tarfile.TarInfo, why: str) -> RefusedError:
    return RefusedError(f"{member.name[:200]!r}: {why}", code="workspace_invalid")
