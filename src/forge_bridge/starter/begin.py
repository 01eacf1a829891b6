"""From a directory to the files of a starter in its repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge_bridge.starter import Kind
from forge_bridge.starter.project import find_root, look_at
from forge_bridge.starter.render import starter_for
from forge_bridge.starter.write import write_starter


@dataclass(frozen=True, slots=True)
class Begun:
    """What was written, and what to tell about it, a line each."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...]


def begin(directory: Path, *, base: str | None = None, kind: Kind | None = None) -> Begun:
    """Write a starter at the top of the working tree that ``directory`` is in.

    :param base: the image to build on, by its digest; None: a contract alone.
    :param kind: what it is made for; None: by the files at the top.
    :raises RefusedError: code ``not_a_repository`` or ``file_exists``; nothing was written.
    :raises DiskUnusable: nothing is left of it.
    """
    root = find_root(directory)
    starter = starter_for(look_at(root, kind), base)
    return Begun(write_starter(root, starter), (starter.summary, *starter.advice))
