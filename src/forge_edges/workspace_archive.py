"""The tree of one commit as a tar stream, for a volume that is still empty.

Made from ``git ls-tree`` and ``git cat-file --batch`` by ourselves: no attribute, filter, line
ending or ``export-subst`` has a say, so every blob arrives byte for byte.  A fresh ``.git`` goes
with it: a shallow clone of that one commit, on a branch of its own, with an index, and without a
remote, a credential, a hook or a history.

Symbolic links come last: nothing is ever written through one, whoever extracts the stream.
Memory stays flat: one chunk at a time, and packs go by way of a file.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import anyio
import anyio.to_thread

from forge_core.errors import RefusedError
from forge_core.tree_rules import (
    MODE_EXECUTABLE,
    MODE_GITLINK,
    MODE_SYMLINK,
    MODE_TREE,
    TreeEntry,
    input_violation,
    object_format,
    parse_listing,
    printable,
)
from forge_edges.git import Repository, disk_errors, quarantine
from forge_edges.process import Bounds, Process

_CHUNK_BYTES = 1 << 18
_BLOCK_BYTES = 512
_TIMEOUT_MS = 600_000
_BRANCH = "work"
_CONFIG = """\
[core]
	repositoryformatversion = {version}
	filemode = true
	bare = false
	logallrefupdates = true
"""
_SHA256_CONFIG = """\
[extensions]
	objectformat = sha256
"""


@dataclass(frozen=True, slots=True)
class _Owner:
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
        return head + content + _padding(len(content))


async def workspace_archive(
    store_path: Path,
    commit: str,
    *,
    uid: int,
    gid: int,
    directory: str = ".",
    max_bytes: int,
    max_entries: int,
) -> AsyncIterator[bytes]:
    """Tar stream of *commit*'s tree with a ``.git`` of its own, everything owned by *uid*:*gid*.

    Gitlinks become empty directories.  Nothing is yielded before the whole tree has passed the
    rules.  Close the iterator (``contextlib.aclosing``) when it is not read to its end.

    :param directory: where the tree is in the archive; its owner is *uid*:*gid* as well.
    :param max_bytes: of all blobs together.
    :param max_entries: files, links and directories together.
    :raises RefusedError: ``code="workspace_invalid"``: a path that breaks a rule (it is named),
        too many bytes or entries, or the store does not have the commit.
    """
    bounds = Bounds(timeout_ms=_TIMEOUT_MS, stdout_bytes=256 << 20, file_bytes=4 * max_bytes)
    store = Repository(store_path, bounds)
    try:
        listing = await store.output("ls-tree", "-r", "-t", "-l", "-z", "--full-tree", commit)
        entries = await anyio.to_thread.run_sync(parse_listing, listing)
        modified = int(await store.output("log", "-1", "--format=%ct", commit))
    except (RefusedError, ValueError) as error:
        raise _invalid(f"cannot read commit {commit}: {error}") from error
    # In a worker thread: half a million paths take seconds, and the event loop has leases to keep.
    check = partial(_check, max_bytes=max_bytes, max_entries=max_entries)
    await anyio.to_thread.run_sync(check, entries, commit)
    owner = _Owner(f"{directory}/".encode(), uid, gid, modified)
    async with quarantine(
        store_path, object_format=object_format(commit), bounds=bounds
    ) as scratch:
        await _pack(scratch, commit)
        yield owner.header(b"", tarfile.DIRTYPE, mode=0o755)
        async for chunk in _in_workers(_git_directory(scratch.path, commit, owner)):
            yield chunk
        async for chunk in _tree(store, entries, owner, scratch.path):
            yield chunk
    yield bytes(2 * _BLOCK_BYTES)


def _check(entries: list[TreeEntry], commit: str, *, max_bytes: int, max_entries: int) -> None:
    if violation := input_violation(entries):
        raise _invalid(f"cannot use commit {commit}: {violation}")
    if len(entries) > max_entries:
        raise _invalid(
            f"cannot use commit {commit}: {len(entries)} entries, {max_entries} are allowed"
        )
    total = sum(entry.size_bytes for entry in entries)
    if total > max_bytes:
        raise _invalid(f"cannot use commit {commit}: {total} bytes, {max_bytes} are allowed")


async def _pack(scratch: Repository, commit: str) -> None:
    """One pack of *commit* and its tree, and an index of that tree, in the scratch repository."""
    await scratch.output(
        *("pack-objects", "--revs", "--shallow", "--delta-base-offset", "-q"),
        str(scratch.path / "objects" / "pack" / "pack"),
        input=f"--shallow {commit}\n{commit}\n".encode(),
    )
    await scratch.output("read-tree", f"--index-output={scratch.path / 'index'}", commit)


async def _in_workers(pieces: Generator[bytes]) -> AsyncIterator[bytes]:
    """What a generator that reads files yields, run in worker threads a chunk at a time."""

    def next_chunk() -> bytes:
        chunk = bytearray()
        for piece in pieces:
            chunk += piece
            if len(chunk) >= _CHUNK_BYTES:
                break
        return bytes(chunk)

    try:
        while chunk := await anyio.to_thread.run_sync(next_chunk):
            yield chunk
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(pieces.close)


def _git_directory(scratch: Path, commit: str, owner: _Owner) -> Generator[bytes]:
    for directory in (
        *(".git", ".git/objects", ".git/objects/info", ".git/objects/pack"),
        *(".git/refs", ".git/refs/heads", ".git/refs/tags"),
    ):
        yield owner.header(f"{directory}/".encode(), tarfile.DIRTYPE, mode=0o755)
    sha256 = object_format(commit) == "sha256"
    yield owner.file(
        ".git/config", (_CONFIG.format(version=int(sha256)) + sha256 * _SHA256_CONFIG).encode()
    )
    yield owner.file(".git/HEAD", f"ref: refs/heads/{_BRANCH}\n".encode())
    yield owner.file(f".git/refs/heads/{_BRANCH}", f"{commit}\n".encode())
    yield owner.file(".git/shallow", f"{commit}\n".encode())
    packs = sorted((scratch / "objects" / "pack").glob("pack-*.[ip]*"))
    for source in (scratch / "index", *packs):
        name = source.relative_to(scratch)
        mode = 0o644 if source.name == "index" else 0o444
        size = source.stat().st_size
        yield owner.header(f".git/{name}".encode(), tarfile.REGTYPE, mode=mode, size=size)
        with source.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
        yield _padding(size)


async def _tree(
    store: Repository, entries: list[TreeEntry], owner: _Owner, scratch: Path
) -> AsyncIterator[bytes]:
    pending = bytearray()
    for entry in entries:
        if entry.mode in (MODE_TREE, MODE_GITLINK):
            pending += owner.header(entry.path + b"/", tarfile.DIRTYPE, mode=0o755)
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
                pending += owner.header(entry.path, tarfile.REGTYPE, mode=mode, size=size)
                async for chunk in blobs.content(size):
                    pending += chunk
                    if len(pending) >= _CHUNK_BYTES:
                        yield bytes(pending)
                        pending.clear()
                pending += _padding(size)
            for entry in links:
                size = await blobs.next_size(entry)
                target = b"".join([chunk async for chunk in blobs.content(size)])
                link = target.decode("utf-8", "surrogateescape")
                pending += owner.header(entry.path, tarfile.SYMTYPE, mode=0o777, link=link)
            yield bytes(pending)
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
            raise _invalid(
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
            raise _invalid(
                "cannot read a blob: git cat-file ended early; run git fsck on the store"
            )
        self._buffer += data


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK_BYTES)


def _invalid(message: str) -> RefusedError:
    return RefusedError(message, code="workspace_invalid", field="inputCommit")
