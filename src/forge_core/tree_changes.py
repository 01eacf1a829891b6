"""Whether what an attempt changed in a tree may be accepted.

The rules look at changed paths; what the input commit already had stays acceptable, so that no
attempt is refused for what it did not do.  Symbolic links are judged in the whole tree, because
a link can start to lead outside when *another* one changes.  Source: sandbox.md, Output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forge_core.errors import RefusedError
from forge_core.tree_rules import (
    MAX_TREE_ENTRIES,
    MODE_EXECUTABLE,
    MODE_FILE,
    MODE_GITLINK,
    MODE_SYMLINK,
    MODE_TREE,
    TreeEntry,
    Violation,
    added_symlink_violation,
    escaping_symlinks,
    folded_symlink_violation,
    need_few_entries,
    portability_violation,
    structure_violation,
)

_RAW = re.compile(rb":([0-7]{6}) ([0-7]{6}) ([0-9a-f]{40,64}) ([0-9a-f]{40,64}) ([A-Z])[0-9]*")
_MODES = frozenset({MODE_FILE, MODE_EXECUTABLE, MODE_SYMLINK, MODE_TREE})


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs: mode and object before and after; mode 0: not there."""

    path: bytes
    old_mode: int
    old_id: str
    new_mode: int
    new_id: str

    @property
    def added(self) -> bool:
        """Whether the path is new."""
        return self.old_mode == 0

    @property
    def removed(self) -> bool:
        """Whether the path is gone."""
        return self.new_mode == 0


def parse_changes(raw: bytes) -> list[Change]:
    """Changes of ``git diff-tree -r -t -z --raw --no-renames --no-abbrev`` output.

    :raises RefusedError: it is not of that form (``code="malformed"``), or there are more than
        :data:`forge_core.tree_rules.MAX_TREE_ENTRIES` (``code="too_many_entries"``).
    """
    need_few_entries(raw, 2 * MAX_TREE_ENTRIES)
    fields = raw.split(b"\0")[:-1]
    changes = []
    for head, path in zip(fields[::2], fields[1::2], strict=True):
        match = _RAW.fullmatch(head)
        if match is None:
            raise RefusedError("cannot read a tree comparison", code="malformed")
        old_mode, new_mode, old_id, new_id = (word.decode() for word in match.groups()[:4])
        changes.append(Change(path, int(old_mode, 8), old_id, int(new_mode, 8), new_id))
    return changes


def link_ids(changes: Iterable[Change], result: Iterable[TreeEntry]) -> set[str]:
    """Ids of the blobs whose content :func:`changes_violation` needs: targets of links."""
    before = {change.old_id for change in changes if change.old_mode == MODE_SYMLINK}
    return before | {entry.object_id for entry in result if entry.mode == MODE_SYMLINK}


def changes_violation(
    changes: Sequence[Change], result: Iterable[TreeEntry], targets: Mapping[str, bytes]
) -> Violation | None:
    """The first rule that *changes* break, or None.

    :param result: the whole tree after the changes (``git ls-tree -r -z``).
    :param targets: content of the blobs of :func:`link_ids`.
    :raises RefusedError: ``code="too_many_steps"``.
    """
    fine: set[bytes] = set()
    for change in changes:
        if not change.removed and (violation := _entry_violation(change, targets, fine)):
            return violation
    links = {e.path: targets[e.object_id] for e in result if e.mode == MODE_SYMLINK}
    added = [change.path for change in changes if change.added]
    if any(MODE_SYMLINK in (change.old_mode, change.new_mode) for change in changes):
        before = _links_before(changes, links, targets)
        already = escaping_symlinks(before)
        for path, why in escaping_symlinks(links).items():
            if path not in already or before[path] != links[path]:
                return Violation("symlink", path, why)
        added = [change.path for change in changes if not change.removed]
    return folded_symlink_violation(added, links)


def _entry_violation(
    change: Change, targets: Mapping[str, bytes], fine: set[bytes]
) -> Violation | None:
    if violation := structure_violation(change.path, fine):
        return violation
    if change.added and (violation := portability_violation(change.path)):
        return violation
    if change.new_mode == MODE_GITLINK:
        return Violation("submodule", change.path, "is a new or changed submodule")
    if change.new_mode not in _MODES:
        return Violation("path", change.path, f"has the unknown mode {change.new_mode:o}")
    if change.new_mode == MODE_SYMLINK:
        return added_symlink_violation(change.path, targets[change.new_id])
    return None


def _links_before(
    changes: Iterable[Change], links: Mapping[bytes, bytes], targets: Mapping[str, bytes]
) -> dict[bytes, bytes]:
    before = dict(links)
    for change in changes:
        before.pop(change.path, None)
        if change.old_mode == MODE_SYMLINK:
            before[change.path] = targets[change.old_id]
    return before
