"""The ``GitStore`` port over one bare store per registered repository."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from forge_core.dockerignore import Ignore
from forge_core.errors import RefusedError
from forge_core.ports import ImportedOutput
from forge_core.publication import Pushed, Remote, Seen
from forge_edges.build_context import build_context
from forge_edges.git import remove_leftovers, tree_listing
from forge_edges.git_import import ImportLimits, import_bundle
from forge_edges.git_input import FetchLimits, ensure_commit
from forge_edges.git_push import push, remote_branch
from forge_edges.git_read import read_file, read_files, tree_id
from forge_edges.workspace_archive import workspace_archive


@dataclass(frozen=True, slots=True)
class GitStores:
    """Stores under ``<state root>/repositories``, and the operator's clones that feed them.

    :param directory: where the stores are, and the quarantines beside them.
    :param clones: the operator's clones by registered name (B-40).
    :param max_workspace_bytes: of all blobs of an input commit.
    :param max_workspace_entries: files, links and directories of an input commit, and of a context.
    """

    directory: Path
    clones: Mapping[str, Path]
    max_workspace_bytes: int = 4 << 30
    max_workspace_entries: int = 500_000
    fetch_limits: FetchLimits = field(default_factory=FetchLimits)
    import_limits: ImportLimits = field(default_factory=ImportLimits)

    async def remove_leftovers(self) -> None:
        """Remove what a crash left half-made; at the start, before any use."""
        await anyio.to_thread.run_sync(remove_leftovers, self.directory)

    async def ensure_commit(self, repository: str, commit: str) -> None:
        """See :func:`forge_edges.git_input.ensure_commit`."""
        clone = self.clones.get(repository)
        if clone is None:
            raise RefusedError(
                f"cannot prepare {repository}: no such repository; register it with add-repo",
                code="workspace_invalid",
                field="repository",
            )
        await ensure_commit(clone, self._store(repository), commit, limits=self.fetch_limits)

    def workspace_archive(
        self, repository: str, commit: str, *, uid: int, gid: int, directory: str = "."
    ) -> AsyncGenerator[bytes]:
        """See :func:`forge_edges.workspace_archive.workspace_archive`."""
        return workspace_archive(
            self._store(repository),
            commit,
            uid=uid,
            gid=gid,
            directory=directory,
            max_bytes=self.max_workspace_bytes,
            max_entries=self.max_workspace_entries,
        )

    async def read_file(
        self, repository: str, commit: str, path: str, max_bytes: int
    ) -> bytes | None:
        """See :func:`forge_edges.git_read.read_file`."""
        return await read_file(self._store(repository), commit, path, max_bytes)

    async def read_files(
        self, repository: str, commit: str, max_bytes: Mapping[str, int]
    ) -> Mapping[str, bytes | None]:
        """See :func:`forge_edges.git_read.read_files`."""
        return await read_files(self._store(repository), commit, max_bytes)

    async def tree_id(self, repository: str, commit: str) -> str:
        """See :func:`forge_edges.git_read.tree_id`."""
        return await tree_id(self._store(repository), commit)

    def build_context(
        self, repository: str, commit: str, *, ignore: Ignore | None, max_bytes: int
    ) -> AsyncGenerator[bytes]:
        """See :func:`forge_edges.build_context.build_context`."""
        return build_context(
            self._store(repository),
            commit,
            ignore=ignore,
            max_bytes=max_bytes,
            max_entries=self.max_workspace_entries,
        )

    async def tree_listing(self, repository: str, commit: str) -> bytes:
        """See :func:`forge_edges.git.tree_listing`."""
        return await tree_listing(self._store(repository), commit)

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
        """See :func:`forge_edges.git_import.import_bundle`."""
        return await import_bundle(
            self._store(repository),
            bundle,
            input_commit=input_commit,
            bundle_ref=bundle_ref,
            claimed_commit=claimed_commit,
            target_ref=target_ref,
            limits=self.import_limits,
        )

    async def remote_branch(self, remote: Remote, branch: str) -> Seen:
        """See :func:`forge_edges.git_push.remote_branch`."""
        return await remote_branch(remote, branch)

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
        """See :func:`forge_edges.git_push.push`."""
        return await push(
            self._store(repository),
            remote,
            branch=branch,
            commit=commit,
            expected=expected,
            timeout_ms=timeout_ms,
        )

    def _store(self, repository: str) -> Path:
        return self.directory / f"{repository}.git"
