"""The files of a commit as entries of a tar stream, made by ourselves from Git's objects.

Made from ``git ls-tree`` and ``git cat-file --batch``: no attribute, filter, line ending or
``export-subst`` has a say, so every blob arrives byte for byte.  Symbolic links come last: nothing
is ever written through one, whoever extracts the stream.  Memory stays flat, one chunk at a time.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final

import anyio
import anyio.to_thread

from forge_core.errors import RefusedError
from forge_core.tree_rules import (
    MAX_TREE_ENTRIES,
    MODE_EXECUTABLE,
    MODE_GITLINK,
    MODE_SYMLINK,
    MODE_TREE,
    TreeEntry,
    input_violation,
    is_object_id,
    parse_listing,
    printable,
)
from forge_edges.git import Repository, disk_errors
from forge_edges.process import Process

CHUNK_BYTES: Final = 1 << 18
_BLOCK_BYTES: Final = 512
END_OF_ARCHIVE: Final = bytes(2 * _BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Owner:
    """Where entries are in the archive, and whose.

    :param directory: in front of every path; ends with a slash when it is not empty.
    :param modified: seconds since the epoch.
    """

    directory: bytes
    uid: int
    gid: int
    modified: int

    def header(
        self, path: bytes, kind: bytes, *, mode: int, size: int = 0, link: str = ""
    ) -> bytes:
        """One tar header, GNU form: names of any length and bytes."""
        name = self.directory + path
        info = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
        info.type, info.mode, info.size, info.linkname = kind, mode, size, link
        info.uid, info.gid, info.mtime = self.uid, self.gid, self.modified
        return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")

    def file(self, path: str, content: bytes) -> bytes:
        """A whole small file."""
        head = self.header(path.encode(), tarfile.REGTYPE, mode=0o644, size=len(content))
        return head + content + padding(len(content))


async def read_tree(
    store: Repository, commit: str, *, max_entries: int = MAX_TREE_ENTRIES
) -> list[TreeEntry]:
    """Every tree, blob and gitlink of *commit*, with the sizes of the blobs.

    :raises RefusedError: ``code="workspace_invalid"``: no such commit, more than *max_entries*, or
        a path or link breaks a rule.
    """
    need_full_id(commit)
    try:
        listing = await store.output("ls-tree", "-r", "-t", "-l", "-z", "--full-tree", commit)
        # In worker threads: half a million paths take seconds, and the event loop keeps leases.
        parse = partial(parse_listing, max_entries=max_entries)
        entries = await anyio.to_thread.run_sync(parse, listing)
    except RefusedError as error:
        raise invalid(f"cannot read commit {commit}: {error}") from error
    if violation := await anyio.to_thread.run_sync(input_violation, entries):
        raise invalid(f"cannot use commit {commit}: {violation}")
    return entries


def check_size(
    entries: Sequence[TreeEntry], what: str, *, max_bytes: int, max_entries: int
) -> None:
    """Raise when there is more than is allowed.

    :param what: begins the message: ``cannot use commit …``.
    :raises RefusedError: ``code="workspace_invalid"``.
    """
    if len(entries) > max_entries:
        raise invalid(f"{what}: {len(entries)} entries, {max_entries} are allowed")
    total = sum(entry.size_bytes for entry in entries)
    if total > max_bytes:
        raise invalid(f"{what}: {total} bytes, {max_bytes} are allowed")


async def tree_entries(
    store: Repository, entries: Sequence[TreeEntry], owner: Owner, scratch: Path
) -> AsyncGenerator[bytes]:
    """*entries* as the middle of a tar stream; a gitlink is an empty directory.

    :param scratch: where a file without a name may be.
    :raises RefusedError: ``code="workspace_invalid"``: the store does not have a blob.
    :raises DiskUnusable: there is no room for the file.
    """
    pending = bytearray()
    async with aclosing(_pieces(store, entries, owner, scratch)) as pieces:
        async for piece in pieces:
            pending += piece
            if len(pending) >= CHUNK_BYTES:
                yield bytes(pending)
                pending.clear()
    if pending:
        yield bytes(pending)


async def _pieces(
    store: Repository, entries: Sequence[TreeEntry], owner: Owner, scratch: Path
) -> AsyncGenerator[bytes]:
    for entry in entries:
        if entry.mode in (MODE_TREE, MODE_GITLINK):
            yield owner.header(entry.path + b"/", tarfile.DIRTYPE, mode=0o755)
    files = [e for e in entries if e.mode not in (MODE_TREE, MODE_GITLINK, MODE_SYMLINK)]
    links = [e for e in entries if e.mode == MODE_SYMLINK]
    with disk_errors(scratch):
        questions = await anyio.to_thread.run_sync(_questions, [*files, *links], scratch)
    async with anyio.wrap_file(questions):
        blobs = _Blobs(store.start("cat-file", "--batch", "--buffer", stdin=questions))
        try:
            for entry in files:
                mode = 0o755 if entry.mode & 0o111 == MODE_EXECUTABLE & 0o111 else 0o644
                size = await blobs.next_size(entry)
                yield owner.header(entry.path, tarfile.REGTYPE, mode=mode, size=size)
                async for chunk in blobs.content(size):
                    yield chunk
                yield padding(size)
            for entry in links:
                size = await blobs.next_size(entry)
                target = b"".join([chunk async for chunk in blobs.content(size)])
                link = target.decode("utf-8", "surrogateescape")
                yield owner.header(entry.path, tarfile.SYMTYPE, mode=0o777, link=link)
        finally:
            await blobs.process.close()


def _questions(entries: list[TreeEntry], directory: Path) -> IO[bytes]:
    """A file that asks for the blobs of *entries*, to be read from its beginning."""
    file = TemporaryFile(dir=directory)  # noqa: SIM115 - the caller closes it
    file.writelines(f"{entry.object_id}\n".encode() for entry in entries)
    file.seek(0)
    return file


class _Blobs:
    """The answers of ``git cat-file --batch``, in the order of the questions."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._buffer = bytearray()

    async def next_size(self, entry: TreeEntry) -> int:
        """Size of the next blob, which must be that of *entry*."""
        while (end := self._buffer.find(b"\n")) < 0:
            await self._more()
        words = bytes(self._buffer[:end]).split()
        del self._buffer[: end + 1]
        if words[:2] != [entry.object_id.encode(), b"blob"]:
            raise invalid(
                f"cannot read {printable(entry.path)}: the store answers {b' '.join(words)!r}"
            )
        return int(words[2])

    async def content(self, size: int) -> AsyncIterator[bytes]:
        """The *size* bytes of the blob whose size was read last."""
        left = size
        while left:
            if not self._buffer:
                await self._more()
            chunk = bytes(self._buffer[:left])
            del self._buffer[:left]
            left -= len(chunk)
            yield chunk
        if not self._buffer:
            await self._more()
        del self._buffer[:1]

    async def _more(self) -> None:
        data = await self.process.read()
        if not data:
            raise invalid("cannot read a blob: git cat-file ended early; run git fsck on the store")
        self._buffer += data


def need_full_id(commit: str) -> None:
    """Refuse a name that could mean another commit tomorrow (B-52)."""
    if not is_object_id(commit):
        raise invalid(f"cannot use commit {commit[:80]!r}: it is not a full object id")


def padding(size: int) -> bytes:
    """What fills the last block of *size* bytes."""
    return bytes(-size % _BLOCK_BYTES)


def invalid(message: str) -> RefusedError:
    """The commit cannot be used."""
    return RefusedError(message, code="workspace_invalid", field="inputCommit")
