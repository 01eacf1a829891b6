"""From the approved commit to everything that decides its image (B-52).

Contract, Dockerfile, ``.dockerignore`` and context are read from the object store, at the commit
that was approved; the commit that the agent works on, and the working tree, have no say.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import anyio.to_thread
from anyio import from_thread

from forge_bridge.off_loop import off_loop
from forge_core.contract import (
    CONTRACT_PATH,
    DOCKERFILE_PATH,
    MAX_CONTRACT_BYTES,
    Contract,
    read_contract,
)
from forge_core.dockerfile import analyse_dockerfile
from forge_core.dockerignore import IGNORE_PATHS, Ignore, first_ignore
from forge_core.dockerignore import MAX_BYTES as MAX_IGNORE_BYTES
from forge_core.errors import RefusedError
from forge_core.image_key import context_id
from forge_core.ports import GitStore
from forge_edges.buildx_run import context_of

MAX_DOCKERFILE_BYTES: Final = 1 << 20
MAX_CONTEXT_BYTES: Final = 1 << 30

MAX_BYTES: Final = {
    DOCKERFILE_PATH: MAX_DOCKERFILE_BYTES,
    **dict.fromkeys(IGNORE_PATHS, MAX_IGNORE_BYTES),
}
"""Of every file that decides a build."""

NO_CONTEXT: Final = ""
"""The context id of an image that takes nothing from the repository."""


@dataclass(frozen=True, slots=True)
class Approved:
    """The contract of an approved commit."""

    repository: str
    commit: str
    contract: Contract
    content: bytes


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is built.

    :param sources: every external image, pinned.
    :param open_context: a tar of the context, once for each build; to be closed.
    """

    approved: Approved
    dockerfile: bytes
    sources: tuple[str, ...]
    context_id: str
    open_context: Callable[[], AsyncGenerator[bytes]]


async def approved_contract(git: GitStore, repository: str, commit: str) -> Approved | None:
    """The contract in this commit; None when it has none.

    :raises RefusedError: ``contract_invalid``, or ``workspace_invalid``: no such commit.
    """
    content = await git.read_file(repository, commit, CONTRACT_PATH, MAX_CONTRACT_BYTES)
    if content is None:
        return None
    contract = await off_loop(partial(read_contract, content), len(content))
    return Approved(repository, commit, contract, content)


async def recipe_of(git: GitStore, approved: Approved) -> Recipe | None:
    """What the contract wants built; None: the tooling image will do.

    A reference is built too, as the one line that it is: so it is fetched, judged and recorded
    like any other image.

    :raises RefusedError: ``contract_invalid``, ``image_policy_denied``, or ``workspace_invalid``.
    """
    image = approved.contract.image
    if image is None:
        return None
    if image.reference is not None:
        dockerfile = f"FROM {image.reference}\n".encode()
        return _without_context(approved, dockerfile, (image.reference,))
    return await _from_dockerfile(git, approved)


async def _from_dockerfile(git: GitStore, approved: Approved) -> Recipe:
    repository, commit = approved.repository, approved.commit
    files = await git.read_files(repository, commit, MAX_BYTES)
    dockerfile = files[DOCKERFILE_PATH]
    if dockerfile is None:
        raise RefusedError(
            f"cannot use {CONTRACT_PATH}: it names {DOCKERFILE_PATH}, which is not in commit "
            f"{commit}; add it, or take image.dockerfile out",
            code="contract_invalid",
            field="image.dockerfile",
        )
    analysis = await off_loop(partial(analyse_dockerfile, dockerfile), len(dockerfile))
    if not analysis.reads_context:
        # What is not in the key is not sent either.
        return _without_context(approved, dockerfile, analysis.external)
    size_bytes = sum(len(files[path] or b"") for path in IGNORE_PATHS)
    ignore = await off_loop(partial(first_ignore, files), size_bytes)
    if ignore is None:
        sent = await git.tree_id(repository, commit)
    else:
        listing = await git.tree_listing(repository, commit)
        sent = await anyio.to_thread.run_sync(_context_id, listing, ignore)
    context = partial(
        git.build_context, repository, commit, ignore=ignore, max_bytes=MAX_CONTEXT_BYTES
    )
    return Recipe(approved, dockerfile, analysis.external, sent, context)


def _context_id(listing: bytes, ignore: Ignore) -> str:
    """In a worker thread, which an attempt that ends does not wait for."""

    def excludes(path: str) -> bool:
        from_thread.check_cancelled()
        return ignore.excludes(path)

    return context_id(listing, excludes)


def _without_context(approved: Approved, dockerfile: bytes, sources: tuple[str, ...]) -> Recipe:
    context = partial(context_of, DOCKERFILE_PATH, dockerfile)
    return Recipe(approved, dockerfile, sources, NO_CONTEXT, context)
