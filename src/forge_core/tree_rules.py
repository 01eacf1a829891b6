"""Which trees may enter a workspace and which may come back out of one.

Two strengths.  *Structure* holds for every path that we materialise or accept: it keeps a tree
inside its directory and away from Git's own.  *Portability* holds only for paths that an attempt
adds: an input commit with odd names stays usable, but no attempt adds new ones.

The ``.git`` tricks are those of Git's own fsck (``is_hfs_dotgit``, ``is_ntfs_dotgit``): code
points that HFS+ ignores, trailing dots and spaces, alternate data streams and short names of
NTFS.  Source: sandbox.md, Output; git-fsck(1), hasDotgit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from forge_core.errors import RefusedError

MODE_FILE = 0o100644
MODE_EXECUTABLE = 0o100755
MODE_SYMLINK = 0o120000
MODE_GITLINK = 0o160000
MODE_TREE = 0o040000

MAX_COMPONENT_BYTES = 255
MAX_PATH_BYTES = 4095
MAX_SYMLINK_BYTES = 4095
MAX_LINK_STEPS = 4_000_000
"""Names on the way of all symbolic links of a tree together."""
_MAX_SYMLINKS_FOLLOWED = 40  # path_resolution(7): the kernel's own limit

_HFS_IGNORED = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
_DOTGIT = re.compile(r"\.git|git~[0-9]+")
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")
_NO_SYMLINK = frozenset({".gitmodules", ".gitattributes", ".gitignore", ".mailmap"})
_OBJECT_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One line of ``git ls-tree``: mode as Git writes it, object id, path, size of a blob."""

    mode: int
    object_id: str
    path: bytes
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a path breaks.

    :param rule: ``path``, ``symlink``, ``submodule`` or ``duplicate``.
    :param path: as the tree has it.
    :param why: the rest of the sentence after the path.
    """

    rule: str
    path: bytes
    why: str

    def __str__(self) -> str:
        return f"{printable(self.path)} {self.why}"


def printable(path: bytes) -> str:
    """*path* for people: at most 200 characters, nothing that moves a cursor."""
    text = path.decode("utf-8", "backslashreplace")
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f'"{shown if len(shown) <= 200 else shown[:199] + "…"}"'


def is_object_id(text: str) -> bool:
    """Whether *text* is a full lower-case SHA-1 (40) or SHA-256 (64) object id (B-52)."""
    return _OBJECT_ID.fullmatch(text) is not None


def object_format(commit: str) -> str:
    """Git's name of the hash that made *commit*: ``sha1`` or ``sha256``."""
    return "sha1" if len(commit) == 40 else "sha256"


MAX_TREE_ENTRIES = 1_000_000
"""Of any tree that is looked at.  Trees that hold one another, or one tree many times over, list as
millions of paths though they are a few hundred objects."""


def need_few_entries(listing: bytes, most: int = MAX_TREE_ENTRIES) -> None:
    """Refuse a listing with ``-z`` before anything is made of its entries.

    :raises RefusedError: ``code="too_many_entries"``.
    """
    if (count := listing.count(b"\0")) > most:
        raise RefusedError(f"{count} entries, {most} are allowed", code="too_many_entries")


def parse_listing(listing: bytes, *, max_entries: int = MAX_TREE_ENTRIES) -> list[TreeEntry]:
    """Entries of ``git ls-tree -r -z`` output, with or without ``-l`` (sizes) and ``-t`` (trees).

    :raises RefusedError: a line is not of that form (``code="malformed"``), or there are more
        (``code="too_many_entries"``).
    """
    need_few_entries(listing, max_entries)
    entries = []
    for line in listing.split(b"\0")[:-1]:
        head, tab, path = line.partition(b"\t")
        words = head.decode("ascii", "replace").split()
        if not tab or len(words) not in (3, 4) or not is_object_id(words[2]):
            raise RefusedError(
                f"cannot read a tree listing: unexpected line {printable(line)}", code="malformed"
            )
        size = words[3] if len(words) == 4 else "-"
        entries.append(
            TreeEntry(int(words[0], 8), words[2], path, int(size) if size.isdecimal() else 0)
        )
    return entries


def is_dotgit(component: bytes) -> bool:
    """Whether some filesystem takes *component* for ``.git``."""
    text = _HFS_IGNORED.sub("", component.decode("utf-8", "replace"))
    return _DOTGIT.fullmatch(_ntfs_name(text)) is not None


def structure_violation(path: bytes, fine: set[bytes] | None = None) -> Violation | None:
    """The rule of every tree that *path* breaks, or None.

    :param fine: paths that break none, of which those above *path* are not looked at again; it is
        added.  So a tree costs what its names are long, and not its paths.
    """
    if len(path) > MAX_PATH_BYTES:
        return Violation("path", path, f"is longer than {MAX_PATH_BYTES} bytes")
    directory = path.rpartition(b"/")[0]
    is_known = fine is not None and directory in fine
    for component in path[len(directory) + 1 if is_known else 0 :].split(b"/"):
        if component in (b"", b".", b".."):
            return Violation("path", path, "has an empty, '.' or '..' component")
        if len(component) > MAX_COMPONENT_BYTES:
            return Violation("path", path, f"has a name over {MAX_COMPONENT_BYTES} bytes")
        if b"\0" in component:
            return Violation("path", path, "has a NUL")
        if any(map(is_dotgit, re.split(rb"\\", component))):
            return Violation("path", path, "has a component that a filesystem takes for .git")
    if fine is not None:
        fine.update((directory, path) if directory else (path,))
    return None


def portability_violation(path: bytes) -> Violation | None:
    """The rule for newly added paths that *path* breaks, or None."""
    if _CONTROL.search(path):
        return Violation("path", path, "has a control character")
    if b"\\" in path:
        return Violation("path", path, "has a backslash")
    try:
        path.decode("utf-8")
    except UnicodeDecodeError:
        return Violation("path", path, "is not UTF-8")
    return None


def input_violation(entries: Iterable[TreeEntry]) -> Violation | None:
    """The first rule that an input tree breaks, or None.

    Symbolic links of an input commit are kept as they are, absolute ones too: they are the
    project's own, and in the container they lead nowhere but into the container.  One that no
    kernel would make is none: its target is as large as a blob may be.
    """
    kinds: dict[bytes, int] = {}
    fine: set[bytes] = set()
    for entry in entries:
        if violation := structure_violation(entry.path, fine):
            return violation
        if entry.mode == MODE_SYMLINK and not 0 < entry.size_bytes <= MAX_SYMLINK_BYTES:
            return Violation("symlink", entry.path, "has an empty or over-long target")
        if entry.path in kinds:
            return Violation("duplicate", entry.path, "is there twice")
        kinds[entry.path] = entry.mode
    seen: set[bytes] = set()
    for path in kinds:
        for parent in new_parents(path, seen):
            if kinds.get(parent, MODE_TREE) != MODE_TREE:
                return Violation("duplicate", path, "lies under a path that is no directory")
    return None


def parents(path: bytes) -> list[bytes]:
    """Every directory above *path*, the nearest first, without the root."""
    return list(new_parents(path, set()))


def new_parents(path: bytes, seen: set[bytes]) -> Iterator[bytes]:
    """Likewise, up to the first that is in *seen*, whose own are there too; they are added."""
    while (cut := path.rfind(b"/")) > 0:
        path = path[:cut]
        if path in seen:
            return
        seen.add(path)
        yield path


def escaping_symlinks(symlinks: Mapping[bytes, bytes]) -> dict[bytes, str]:
    """Which of *symlinks* (path → target) leave the tree or enter ``.git``, each with the reason.

    Links are followed through one another, as a kernel would; whatever is no link counts as a
    directory, so a dangling target is judged by where it would lead.

    :raises RefusedError: ``code="too_many_steps"``: each link may lead through forty others, all of
        them thousands of names long, and there may be a hundred thousand.
    """
    found = {}
    steps = iter(range(MAX_LINK_STEPS))
    for path, target in symlinks.items():
        if reason := _escape(path, target, symlinks, steps):
            found[path] = reason
    return found


def added_symlink_violation(path: bytes, target: bytes) -> Violation | None:
    """The rule that a new or changed link breaks by itself, or None."""
    name = _HFS_IGNORED.sub("", path.rpartition(b"/")[2].decode("utf-8", "replace"))
    if _ntfs_name(name) in _NO_SYMLINK:
        return Violation("symlink", path, "must not be a symbolic link")
    if not target or len(target) > MAX_SYMLINK_BYTES or b"\0" in target:
        return Violation("symlink", path, "has an empty or over-long target")
    if b"\\" in target:
        return Violation("symlink", path, "has a backslash in its target")
    return None


def folded_symlink_violation(added: Iterable[bytes], symlinks: Iterable[bytes]) -> Violation | None:
    """A path that a case-folding filesystem writes *through* a symbolic link, or None.

    ``a → elsewhere`` beside ``A/file``: legal apart, an escape together.
    """
    links = {_fold(link): link for link in symlinks}
    seen: set[bytes] = set()
    for path in added if links else ():
        for prefix in (path, *new_parents(path, seen)):
            link = links.get(_fold(prefix))
            if link is not None and link != prefix:
                return Violation("duplicate", path, f"differs from {printable(link)} in case only")
    return None


def _fold(path: bytes) -> str:
    return _HFS_IGNORED.sub("", path.decode("utf-8", "surrogateescape")).casefold()


def _ntfs_name(text: str) -> str:
    return text.partition(":")[0].rstrip(" .").casefold()


def _escape(
    path: bytes, target: bytes, symlinks: Mapping[bytes, bytes], steps: Iterator[int]
) -> str | None:
    at = path.rpartition(b"/")[0]
    todo = target.split(b"/")[::-1]
    followed = 1
    if target.startswith(b"/"):
        return "is an absolute symbolic link"
    while todo:
        component = todo.pop()
        if next(steps, None) is None:
            raise RefusedError(
                f"symbolic links that take over {MAX_LINK_STEPS} steps to follow",
                code="too_many_steps",
            )
        if component in (b"", b"."):
            continue
        if component == b"..":
            if not at:
                return "is a symbolic link that leads out of the tree"
            at = at.rpartition(b"/")[0]
            continue
        if is_dotgit(component):
            return "is a symbolic link into .git"
        below = at + b"/" + component if at else component
        if len(below) > MAX_PATH_BYTES:
            return f"is a symbolic link to a path over {MAX_PATH_BYTES} bytes"
        onward = symlinks.get(below)
        if onward is None:
            at = below
            continue
        followed += 1
        if followed > _MAX_SYMLINKS_FOLLOWED:
            return "is a symbolic link that never ends"
        if onward.startswith(b"/"):
            return "is a symbolic link that leads to an absolute one"
        todo.extend(onward.split(b"/")[::-1])
    return None
