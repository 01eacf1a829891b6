"""Single files of a commit, from a bare store: exactly the blob that the commit has (B-52)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
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


async def read_files(
    store_path: Path, commit: str, max_bytes: Mapping[str, int]
) -> dict[str, bytes | None]:
    """Files of *commit* by their paths; None where there is nothing of that name.

    One program of Git for each directory on the way, and one for all contents.

    :param max_bytes: paths, relative and with slashes, and how large each file may be.
    :raises RefusedError: ``code="workspace_invalid"``: one is no file, or larger than it may be,
        or a directory above it is a link or a submodule, or the store does not have the commit.
    """
    need_full_id(commit)
    names = {path: path.encode("utf-8", "surrogateescape") for path in max_bytes}
    for name in names.values():
        if violation := structure_violation(name):
            raise invalid(f"cannot read from commit {commit}: {violation}")
    stdout_bytes = sum(max_bytes.values()) + len(names) * _MAX_ENTRY_BYTES
    store = Repository(store_path, Bounds(timeout_ms=_TIMEOUT_MS, stdout_bytes=stdout_bytes))
    found = await _find(store, commit, names.values())
    entries = {path: _file(found, name, commit) for path, name in names.items()}
    for path, entry in entries.items():
        if entry is not None and entry.size_bytes > max_bytes[path]:
            raise invalid(
                f"cannot read {printable(names[path])} of commit {commit}: {entry.size_bytes} "
                f"bytes, {max_bytes[path]} are allowed"
            )
    blobs = await _blobs(store, [entry for entry in entries.values() if entry is not None])
    return {path: None if e is None else blobs[e.object_id] for path, e in entries.items()}


async def read_file(store_path: Path, commit: str, path: str, max_bytes: int) -> bytes | None:
    """The file *path* of *commit*, as :func:`read_files`."""
    return (await read_files(store_path, commit, {path: max_bytes}))[path]


async def _find(store: Repository, commit: str, names: Iterable[bytes]) -> dict[bytes, TreeEntry]:
    """What the commit has under these names, and the directories above them."""
    wanted: dict[bytes, dict[bytes, None]] = {}
    for name in names:
        for at in (*parents(name), name):
            directory, _, last = at.rpartition(b"/")
            wanted.setdefault(directory, {})[last] = None
    trees, found = {b"": commit}, {}
    for directory in sorted(wanted):  # what lies above comes before what lies below
        if directory in trees:
            for entry in await _entries(store, trees[directory], wanted[directory], commit):
                at = b"/".join(filter(None, (directory, entry.path)))
                found[at] = entry
                if entry.mode == MODE_TREE:
                    trees[at] = entry.object_id
    return found


async def _entries(
    store: Repository, tree: str, names: Iterable[bytes], commit: str
) -> tuple[TreeEntry, ...]:
    """What *tree* has under these names: one level at a time, so that no answer is long."""
    asked = [name.decode("utf-8", "surrogateescape") for name in names]
    bounds = replace(store.bounds, stdout_bytes=len(asked) * _MAX_ENTRY_BYTES)
    options = ("-l", "-z", "--full-tree", tree, "--", *asked)
    try:
        listing = await replace(store, bounds=bounds).output("ls-tree", *options)
    except RefusedError as error:
        raise invalid(f"cannot read commit {commit}: {error}") from error
    return tuple(parse_listing(listing))


def _file(found: Mapping[bytes, TreeEntry], name: bytes, commit: str) -> TreeEntry | None:
    for at in (*parents(name)[::-1], name):
        if at not in found:
            return None
        kind = _KINDS.get(found[at].mode, _FILE)
        if kind != (_FILE if at == name else _KINDS[MODE_TREE]):
            raise invalid(f"cannot read {printable(at)} of commit {commit}: it is {kind}")
    return found[name]


async def _blobs(store: Repository, entries: Sequence[TreeEntry]) -> dict[str, bytes]:
    """Their contents by their ids (git-cat-file(1), Batch output)."""
    if not entries:
        return {}
    questions = "".join(f"{entry.object_id}\n" for entry in entries).encode()
    answers = io.BytesIO(await store.output("cat-file", "--batch", input=questions))
    blobs = {}
    for entry in entries:
        head = f"{entry.object_id} blob {entry.size_bytes}\n".encode()
        if answers.read(len(head)) != head:
            raise invalid(f"cannot read {printable(entry.path)}: run git fsck on the store")
        blobs[entry.object_id] = answers.read(entry.size_bytes)
        answers.read(1)
    return blobs


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
