"""Single files of a commit, from a bare store: exactly the blob that the commit has (B-52)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forge_core.errors import RefusedError
from forge_core.tree_rules import (
    MODE_GITLINK,
    MODE_SYMLINK,
    MODE_TREE,
    parents,
    parse_listing,
    printable,
    structure_violation,
)
from forge_edges.git import Repository
from forge_edges.process import Bounds
from forge_edges.tree_archive import invalid

_TIMEOUT_MS: Final = 60_000
_MAX_LISTING_BYTES: Final = 1 << 20
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
    name = path.encode("utf-8", "surrogateescape")
    if violation := structure_violation(name):
        raise invalid(f"cannot read from commit {commit}: {violation}")
    store = Repository(
        store_path, Bounds(timeout_ms=_TIMEOUT_MS, stdout_bytes=max_bytes + (1 << 20))
    )
    above = parents(name)[::-1]
    wanted = [one.decode("utf-8", "surrogateescape") for one in (*above, name)]
    try:
        options = ("-t", "-l", "-z", "--full-tree")
        listing = await store.output("ls-tree", *options, commit, "--", *wanted)
    except RefusedError as error:
        raise invalid(f"cannot read commit {commit}: {error}") from error
    found = {entry.path: entry for entry in parse_listing(listing)}
    for one in (*above, name):
        if one not in found:
            return None
        kind = _KINDS.get(found[one].mode, "a file")
        if kind != ("a file" if one == name else "a directory"):
            raise invalid(f"cannot read {printable(one)} of commit {commit}: it is {kind}")
    entry = found[name]
    if entry.size_bytes > max_bytes:
        raise invalid(
            f"cannot read {printable(name)} of commit {commit}: {entry.size_bytes} bytes, "
            f"{max_bytes} are allowed"
        )
    return await store.output("cat-file", "blob", entry.object_id)


async def tree_id(store_path: Path, commit: str) -> str:
    """The id of *commit*'s root tree: the same for the same files, whoever committed them.

    :raises RefusedError: ``code="workspace_invalid"``: the store does not have the commit.
    """
    store = Repository(store_path, Bounds(timeout_ms=_TIMEOUT_MS))
    try:
        found = await store.output("rev-parse", "--verify", "--quiet", f"{commit}^{{tree}}")
    except RefusedError as error:
        raise invalid(f"cannot read commit {commit}: {error}") from error
    return found.decode("ascii").strip()
