"""Single files of a commit, from a bare store: exactly the blob that the commit has (B-52)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from forge_core.errors import RefusedError
from forge_core.tree_rules import (
    MODE_GITLINK,
    MODE_SYMLINK,
    MODE_TREE,
    TreeEntry,
    parents,
    parse_listing,
    printable,
    structure_violation,
)
from forge_edges.git import Repository
from forge_edges.process import Bounds
from forge_edges.tree_archive import invalid, need_full_id

_TIMEOUT_MS: Final = 60_000
_MAX_ENTRY_BYTES: Final = 4_096
_FILE: Final = "a file"
_KINDS: Final = {
    MODE_TREE: "a directory",
    MODE_SYMLINK: "a symbolic link",
    MODE_GITLINK: "a submodule",
}


async def read_file(store_path: Path, commit: str, path: str, max_bytes: int) -> bytes | None:
    """The file *path* of *commit*; None when there is nothing of that name.

    :param path: relative, with slashes.
    :raises RefusedError: ``code="workspace_invalid"``: it is no file, or larger than ``max_bytes``,
        or a directory above it is a link or a submodule, or the store does not have the commit.
    """
    need_full_id(commit)
    name = path.encode("utf-8", "surrogateescape")
    if violation := structure_violation(name):
        raise invalid(f"cannot read from commit {commit}: {violation}")
    store = Repository(store_path, Bounds(timeout_ms=_TIMEOUT_MS, stdout_bytes=max_bytes))
    entry = TreeEntry(MODE_TREE, commit, b"")
    for at in [*parents(name)[::-1], name]:
        found = await _entry(store, entry.object_id, at.rpartition(b"/")[2], commit)
        if found is None:
            return None
        kind = _KINDS.get(found.mode, _FILE)
        if kind != (_FILE if at == name else _KINDS[MODE_TREE]):
            raise invalid(f"cannot read {printable(at)} of commit {commit}: it is {kind}")
        entry = found
    if entry.size_bytes > max_bytes:
        raise invalid(
            f"cannot read {printable(name)} of commit {commit}: {entry.size_bytes} bytes, "
            f"{max_bytes} are allowed"
        )
    return await store.output("cat-file", "blob", entry.object_id)


async def _entry(store: Repository, tree: str, name: bytes, commit: str) -> TreeEntry | None:
    """What *tree* has under *name*: one level at a time, so that no answer is long."""
    bounds = replace(store.bounds, stdout_bytes=_MAX_ENTRY_BYTES)
    options = ("-l", "-z", "--full-tree", tree, "--", name.decode("utf-8", "surrogateescape"))
    try:
        listing = await replace(store, bounds=bounds).output("ls-tree", *options)
    except RefusedError as error:
        raise invalid(f"cannot read commit {commit}: {error}") from error
    return next(iter(parse_listing(listing)), None)


async def tree_id(store_path: Path, commit: str) -> str:
    """The id of *commit*'s root tree: the same for the same files, whoever committed them.

    :raises RefusedError: ``code="workspace_invalid"``: the store does not have the commit.
    """
    need_full_id(commit)
    store = Repository(store_path, Bounds(timeout_ms=_TIMEOUT_MS))
    try:
        found = await store.output("rev-parse", "--verify", "--quiet", f"{commit}^{{tree}}")
    except RefusedError as error:
        raise invalid(f"cannot read commit {commit}: {error}") from error
    return found.decode("ascii").strip()
