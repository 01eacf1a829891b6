"""The simulated Git store: commits that are there or not, bundles that are accepted or not."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping

import anyio

from forge_core.dockerignore import Ignore
from forge_core.errors import RefusedError
from forge_core.ports import ImportedOutput
from forge_core.publication import Pushed, Remote, Seen

from .faults import Faults
from .remote import SimulatedRemote
from .world import World


class SimulatedGit:
    """:class:`forge_core.ports.GitStore`; the store outlives the process.

    :ivar refs: what was imported, by ref.
    :ivar commits: what a commit has, by path, where it has anything.
    :ivar on_push: told of a push before it leaves: branch and commit.
    """

    def __init__(self, world: World, faults: Faults, remote: SimulatedRemote) -> None:
        self.on_push: Callable[[str, str], None] = lambda *_: None
        self._remote = remote
        self.refs: dict[str, str] = {}
        self.commits: Mapping[str, Mapping[str, bytes]] = {}
        self._world = world
        self._faults = faults
        self._rng = world.rng("git")

    async def ensure_commit(self, repository: str, commit: str) -> None:
        """See the port."""
        await anyio.sleep(self._rng.uniform(0.01, 2.0))
        if self._rng.random() < self._faults.git_refuses:
            raise RefusedError(f"cannot have {commit} of {repository}", code="workspace_invalid")

    async def workspace_archive(
        self, repository: str, commit: str, *, uid: int, gid: int, directory: str
    ) -> AsyncGenerator[bytes]:
        """See the port; it is no tar, since nobody unpacks it."""
        for part in (repository, commit, directory):
            await anyio.sleep(self._rng.uniform(0.01, 0.2))
            yield f"{part}\0{uid}\0{gid}".encode()

    async def tree_listing(self, repository: str, commit: str) -> bytes:
        """See the port."""
        await anyio.sleep(self._rng.uniform(0.01, 0.2))
        return f"{repository} {commit}".encode()

    async def tree_id(self, repository: str, commit: str) -> str:
        """See the port."""
        await anyio.sleep(self._rng.uniform(0.01, 0.2))
        return hashlib.sha1(f"{repository} {commit}".encode(), usedforsecurity=False).hexdigest()

    async def read_file(
        self, repository: str, commit: str, path: str, max_bytes: int
    ) -> bytes | None:
        """See the port."""
        await anyio.sleep(self._rng.uniform(0.01, 0.2))
        return self.commits.get(commit, {}).get(path)

    async def read_files(
        self, repository: str, commit: str, max_bytes: Mapping[str, int]
    ) -> Mapping[str, bytes | None]:
        """See the port."""
        await anyio.sleep(self._rng.uniform(0.01, 0.2))
        return {path: self.commits.get(commit, {}).get(path) for path in max_bytes}

    async def build_context(
        self, repository: str, commit: str, *, ignore: Ignore | None, max_bytes: int
    ) -> AsyncGenerator[bytes]:
        """See the port; it is no tar, since nobody unpacks it."""
        for path, content in sorted(self.commits.get(commit, {}).items()):
            await anyio.sleep(self._rng.uniform(0.01, 0.2))
            if ignore is None or not ignore.excludes(path):
                yield path.encode() + content

    async def import_bundle(
        self,
        repository: str,
        bundle: AsyncIterable[bytes],
        *,
        input_commit: str,
        bundle_ref: str,
        claimed_commit: str,
        target_ref: str,
    ) -> ImportedOutput:
        """See the port."""
        content = b"".join([piece async for piece in bundle])
        await anyio.sleep(self._rng.uniform(0.01, 0.5))
        if self._rng.random() < self._faults.git_refuses or not content:
            raise RefusedError(f"cannot import {claimed_commit}", code="output_invalid")
        self.refs[target_ref] = claimed_commit
        self._world.note("git", f"imports {target_ref}")
        return ImportedOutput(claimed_commit, 1, len(content))

    async def remote_branch(self, remote: Remote, branch: str) -> Seen:
        """See the port."""
        return await self._remote.look(remote, branch)

    async def push(
        self,
        repository: str,
        remote: Remote,
        *,
        branch: str,
        commit: str,
        expected: Seen,
        timeout_ms: int,
    ) -> Pushed:
        """See the port."""
        self.on_push(branch, commit)
        return await self._remote.push(remote, branch, commit, expected, timeout_ms)
