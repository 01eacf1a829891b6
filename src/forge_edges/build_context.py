"""The build context of one commit: a tar of its tracked files, the same bytes every time.

The Dockerfile is in it whatever ``.dockerignore`` says, since the builder reads it from there.
Symbolic links stay links, absolute ones too: a builder resolves them within the context.
Source: B-52; sandbox.md, Images; docs/reference/dockerfile.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Final

import anyio.to_thread
from anyio import from_thread

from forge_core.contract import DOCKERFILE_PATH
from forge_core.dockerignore import Ignore
from forge_core.tree_rules import MODE_TREE, TreeEntry, new_parents
from forge_edges.git import Repository
from forge_edges.process import Bounds
from forge_edges.tree_archive import END_OF_ARCHIVE, Owner, check_size, read_tree, tree_entries

_TIMEOUT_MS: Final = 600_000
_NOBODY: Final = Owner(b"", 0, 0, 0)


async def build_context(
    store_path: Path, commit: str, *, ignore: Ignore | None, max_bytes: int, max_entries: int
) -> AsyncGenerator[bytes]:
    """Tar stream of what *ignore* leaves of *commit*'s tree: time 0, owner 0:0, modes 0644, 0755.

    Gitlinks become empty directories.  Nothing is yielded before the whole tree has passed the
    rules.  Close the iterator (``contextlib.aclosing``) when it is not read to its end.

    :param max_bytes: of all blobs that are sent.
    :param max_entries: files, links and directories that are sent.
    :raises RefusedError: ``code="workspace_invalid"``: a path that breaks a rule (it is named),
        too many bytes or entries, or the store does not have the commit.
    """
    store = Repository(store_path, Bounds(timeout_ms=_TIMEOUT_MS, stdout_bytes=256 << 20))
    entries = await read_tree(store, commit)
    if ignore is not None:
        entries = await anyio.to_thread.run_sync(_sent, entries, ignore)
    check = partial(check_size, max_bytes=max_bytes, max_entries=max_entries)
    what = f"cannot send commit {commit} to a builder, leave more out in .dockerignore"
    await anyio.to_thread.run_sync(check, entries, what)
    async with aclosing(tree_entries(store, entries, _NOBODY, store_path)) as chunks:
        async for chunk in chunks:
            yield chunk
    yield END_OF_ARCHIVE


def _sent(entries: Sequence[TreeEntry], ignore: Ignore) -> list[TreeEntry]:
    """What is not left out, and the directories that it lies in; in a worker thread."""
    kept = {DOCKERFILE_PATH.encode()}
    for entry in entries:
        from_thread.check_cancelled()
        if not ignore.excludes(entry.path.decode("utf-8", "surrogateescape")):
            kept.add(entry.path)
    needed: set[bytes] = set()
    for entry in entries:
        if entry.mode != MODE_TREE and entry.path in kept:
            deque(new_parents(entry.path, needed), maxlen=0)
    return [entry for entry in entries if entry.path in kept or entry.path in needed]
