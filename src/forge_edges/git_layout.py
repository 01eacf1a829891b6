"""Where a repository keeps its objects, found without running Git in it.

A repository's own configuration may run programs, so nothing but files is looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MAX_POINTER_BYTES: Final = 4096


def common_directory(repository: Path) -> Path:
    """The directory that holds ``objects`` and ``config``: gitrepository-layout(5).

    :param repository: a clone, a linked work tree or submodule of one, or a bare repository.
    :raises OSError: something cannot be read.
    :raises ValueError: there is no repository; the text says what there is.
    """
    git_directory = repository / ".git"
    if not git_directory.exists():
        git_directory = repository
    if git_directory.is_file():
        git_directory = repository / _pointer(git_directory).removeprefix("gitdir:").strip()
    common = git_directory / "commondir"
    if common.is_file():
        git_directory = git_directory / _pointer(common).strip()
    if not (git_directory / "objects").is_dir() or not (git_directory / "HEAD").is_file():
        what = "it is not a Git repository" if repository.is_dir() else "there is no directory"
        raise ValueError(what)
    return git_directory.resolve()


def _pointer(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_MAX_POINTER_BYTES)
    return content.partition(b"\n")[0].decode("utf-8", "surrogateescape")
