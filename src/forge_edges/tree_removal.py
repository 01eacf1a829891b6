"""Removes a directory that a hostile program of the same user has filled.

Nothing is followed, nothing is renamed out, and no mode that the owner may change stands in the
way.  However deep it is, two descriptors and no recursion are enough: what a directory holds of
directories is moved up into the one that is being removed, until none is nested any more.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from forge_edges.durable_file import sync_directory

_PATH_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path) -> bool:
    """Remove the directory ``path`` and all that it holds, durably.

    Blocking.  Nobody else may change it meanwhile; who does makes it fail, and nothing else.

    :returns: whether it was there.
    :raises OSError: something in it cannot be removed; call again when that has changed.
    """
    try:
        top = _open(path)
    except FileNotFoundError:
        return False
    try:
        _empty(top)
    finally:
        os.close(top)
    path.rmdir()
    sync_directory(path.parent)
    return True


def _empty(top: int) -> None:
    moved = 0
    while directories := _unlink_files(top):
        for name in directories:
            inner = _open(name, top)
            try:
                for nested in _unlink_files(inner):
                    moved = _move_up(nested, inner, top, moved)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


def _unlink_files(directory: int) -> list[str]:
    """Remove everything but directories; their names."""
    with os.scandir(directory) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_directory in entries:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
    return [name for name, is_directory in entries if is_directory]


def _move_up(name: str, inner: int, top: int, moved: int) -> int:
    """Into ``top`` under a free name; the number of the last one that was tried.

    A directory that changes its parent must be writable itself: its ``..`` changes (rename(2)).
    """
    os.close(_open(name, inner))
    while True:
        moved += 1
        try:
            os.mkdir(str(moved), dir_fd=top)
        except FileExistsError:
            continue
        # An empty directory is replaced, whatever was made in the meantime is not.
        os.rename(name, str(moved), src_dir_fd=inner, dst_dir_fd=top)
        return moved


def _open(name: str | Path, dir_fd: int | None = None) -> int:
    """The directory ``name``, which its owner may read, write and enter from now on."""
    bare = os.open(name, _PATH_FLAGS, dir_fd=dir_fd)
    try:
        itself = Path(f"/proc/self/fd/{bare}")
        mode = stat.S_IMODE(os.fstat(bare).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            itself.chmod(mode | stat.S_IRWXU)
        return os.open(itself, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(bare)
