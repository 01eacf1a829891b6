"""The tree of one commit as a tar stream, for a volume that is still empty.

A fresh ``.git`` goes with it: a shallow clone of that one commit, on a branch of its own, with an
index, and without a remote, a credential, a hook or a history.  Packs go by way of a file.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from forge_core.errors import RefusedError
from forge_core.tree_rules import object_format
from forge_edges.git import Repository, quarantine
from forge_edges.process import Bounds
from forge_edges.tree_archive import (
    CHUNK_BYTES,
    END_OF_ARCHIVE,
    Owner,
    check_size,
    invalid,
    padding,
    read_tree,
    tree_entries,
)

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


async def workspace_archive(
    store_path: Path,
    commit: str,
    *,
    uid: int,
    gid: int,
    directory: str = ".",
    max_bytes: int,
    max_entries: int,
) -> AsyncGenerator[bytes]:
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
    entries = await read_tree(store, commit, max_entries=max_entries)
    check = partial(check_size, max_bytes=max_bytes, max_entries=max_entries)
    await anyio.to_thread.run_sync(check, entries, f"cannot use commit {commit}")
    try:
        modified = int(await store.output("log", "-1", "--format=%ct", commit))
    except (RefusedError, ValueError) as error:
        raise invalid(f"cannot read commit {commit}: {error}") from error
    owner = Owner(f"{directory}/".encode(), uid, gid, modified)
    async with quarantine(
        store_path, object_format=object_format(commit), bounds=bounds
    ) as scratch:
        await _pack(scratch, commit)
        yield owner.header(b"", tarfile.DIRTYPE, mode=0o755)
        for part in (
            _in_workers(_git_directory(scratch.path, commit, owner)),
            tree_entries(store, entries, owner, scratch.path),
        ):
            async with aclosing(part):
                async for chunk in part:
                    yield chunk
    yield END_OF_ARCHIVE


async def _pack(scratch: Repository, commit: str) -> None:
    """One pack of *commit* and its tree, and an index of that tree, in the scratch repository."""
    await scratch.output(
        *("pack-objects", "--revs", "--shallow", "--delta-base-offset", "-q"),
        str(scratch.path / "objects" / "pack" / "pack"),
        input=f"--shallow {commit}\n{commit}\n".encode(),
    )
    await scratch.output("read-tree", f"--index-output={scratch.path / 'index'}", commit)


async def _in_workers(pieces: Generator[bytes]) -> AsyncGenerator[bytes]:
    """What a generator that reads files yields, run in worker threads a chunk at a time."""

    def next_chunk() -> bytes:
        chunk = bytearray()
        for piece in pieces:
            chunk += piece
            if len(chunk) >= CHUNK_BYTES:
                break
        return bytes(chunk)

    try:
        while chunk := await anyio.to_thread.run_sync(next_chunk):
            yield chunk
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(pieces.close)


def _git_directory(scratch: Path, commit: str, owner: Owner) -> Generator[bytes]:
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
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
        yield padding(size)
