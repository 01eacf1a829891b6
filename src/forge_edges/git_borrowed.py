"""A clone's commits, read through a bare store of ours that borrows the clone's objects.

For a look at a commit that no attempt is about: nothing is copied, and the clone's index, filters,
attributes, hooks and replace refs have no say, as they have none in an attempt.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from forge_core.errors import RefusedError
from forge_core.tree_rules import is_object_id, object_format
from forge_edges.git import GIT, SAFE_CONFIG, clean_environment, create_repository
from forge_edges.git_layout import common_directory
from forge_edges.git_stores import GitStores
from forge_edges.process import Bounds, run

BORROWED: Final = "borrowed"
"""The name of the one repository of :func:`borrowed_store`."""

_BOUNDS: Final = Bounds(timeout_ms=30_000)


async def resolve_commit(clone: Path, revision: str) -> str | None:
    """The full id of the commit that ``revision`` names in the clone; None: it names none.

    The only call that reads the clone's refs, and so its configuration; gitrevisions(7).

    :param clone: a clone, a linked working tree of one, or a bare repository.
    :raises RefusedError: code ``not_a_repository``.
    """
    git_directory = clone / ".git" if (clone / ".git").exists() else clone
    _objects(clone)
    outcome = await run(
        [
            *(GIT, *SAFE_CONFIG, f"--git-dir={git_directory}", "rev-parse", "--verify", "--quiet"),
            *("--end-of-options", f"{revision}^{{commit}}"),
        ],
        env=clean_environment(git_directory),
        cwd=clone,
        bounds=_BOUNDS,
    )
    commit = outcome.stdout.decode("ascii", "replace").strip()
    return commit if outcome.exit_code == 0 and is_object_id(commit) else None


@asynccontextmanager
async def borrowed_store(clone: Path, commit: str) -> AsyncIterator[GitStores]:
    """A store in which :data:`BORROWED` has what the clone has; gone at the end.

    :param commit: full id; says by which hash the clone names its objects.
    :raises RefusedError: code ``not_a_repository``.
    """
    objects = _objects(clone)
    with tempfile.TemporaryDirectory(prefix="forge-borrowed-") as directory:
        await anyio.to_thread.run_sync(
            partial(
                create_repository,
                Path(directory) / f"{BORROWED}.git",
                object_format=object_format(commit),
                alternate=objects,
            )
        )
        yield GitStores(Path(directory), {})


def _objects(clone: Path) -> Path:
    try:
        return common_directory(clone) / "objects"
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:
        why = str(error)
    raise RefusedError(f"cannot use {clone}: {why}", code="not_a_repository", field="repository")
