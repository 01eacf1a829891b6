"""Git, run so that nothing but our own arguments has a say.

No system, user or foreign repository configuration is read, no hook, filter, pager, monitor,
prompt or lazy fetch can run, replace refs and grafts are off, no transport is allowed.

Every repository here is made and configured by us.  The bare stores
(``<state root>/repositories/<name>.git``) are shallow: each input commit is there with its tree
and without its ancestors.  Packs enter them finished and by rename; a ref is what makes their
objects count.  Source: sandbox.md, Output; docs/explanation/output.md.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import anyio
import anyio.to_thread

from forge_core.errors import DiskUnusable, RefusedError
from forge_core.tree_rules import need_few_entries
from forge_edges.process import Bounds, Outcome, Process, run, start

GIT = shutil.which("git", path=os.environ.get("PATH", os.defpath)) or "git"
_SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SAFE_CONFIG = (
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.attributesFile=/dev/null"),
    *("-c", "core.excludesFile=/dev/null"),
    *("-c", "core.alternateRefsCommand=true"),
    *("-c", "core.commitGraph=false"),
    *("-c", "core.multiPackIndex=false"),
    *("-c", "core.packedGitWindowSize=16m"),
    *("-c", "core.packedGitLimit=256m"),
    *("-c", "core.fsync=all"),
    *("-c", "advice.graftFileDeprecated=false"),  # said before every reason, for GIT_GRAFT_FILE
    *("-c", "gc.auto=0"),
    *("-c", "maintenance.auto=false"),
    *("-c", "pack.threads=2"),
    *("-c", "pack.window=0"),
    *("-c", "pack.compression=1"),
    *("-c", "pack.useBitmaps=false"),
)
_REPOSITORY_CONFIG = """\
[core]
	repositoryformatversion = 1
	bare = true
	filemode = true
	logallrefupdates = false
	hooksPath = /dev/null
[extensions]
	objectformat = {object_format}
[gc]
	auto = 0
[transfer]
	fsckObjects = true
[receive]
	denyCurrentBranch = refuse
	denyNonFastForwards = true
[uploadpack]
	allowFilter = false
"""
_SHALLOW_WRITES = threading.Lock()


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of ours and how Git is run in it.

    :param path: the bare repository.
    :param bounds: for each program.
    :param borrowed: an object directory that is read besides, as an alternate; None: none.
    """

    path: Path
    bounds: Bounds = field(default_factory=lambda: Bounds(timeout_ms=60_000))
    borrowed: Path | None = None

    def argv(self, *arguments: str) -> list[str]:
        """The whole argument vector of a Git command in this repository."""
        return [
            GIT,
            *SAFE_CONFIG,
            *("-c", "protocol.allow=never"),
            f"--git-dir={self.path}",
            "--no-pager",
            "--literal-pathspecs",
            *arguments,
        ]

    def environment(self) -> dict[str, str]:
        """The whole environment of a Git command in this repository."""
        environment = clean_environment(self.path)
        if self.borrowed is not None:
            quoted = re.sub(r'(["\\])', r"\\\1", str(self.borrowed)).replace("\n", "\\n")
            environment["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = f'"{quoted}"'
        return environment

    async def git(
        self,
        *arguments: str,
        input: bytes | IO[bytes] = b"",  # noqa: A002 - the word of the standard library
        stdout: IO[bytes] | None = None,
    ) -> Outcome:
        """Run one Git command to its end; a non-zero status is an answer, not an error.

        :raises DiskUnusable: Git says that the disk is full.
        """
        outcome = await run(
            self.argv(*arguments),
            env=self.environment(),
            cwd=self.path,
            bounds=self.bounds,
            input=input,
            stdout=stdout,
        )
        if outcome.exit_code != 0 and os.strerror(errno.ENOSPC).encode() in outcome.stderr:
            raise DiskUnusable(f"cannot write under {self.path}: {outcome.complaint()}")
        return outcome

    async def output(self, *arguments: str, input: bytes | IO[bytes] = b"") -> bytes:  # noqa: A002
        """Standard output of a Git command that must succeed.

        :raises RefusedError: it did not (``code="git_failed"``).
        """
        outcome = await self.git(*arguments, input=input)
        if outcome.exit_code != 0:
            raise RefusedError(
                f"git {arguments[0]} failed in {self.path.name}: {outcome.complaint()}",
                code="git_failed",
            )
        return outcome.stdout

    def start(self, *arguments: str, stdin: IO[bytes]) -> Process:
        """Start a Git command whose output is read as it comes."""
        return start(
            self.argv(*arguments),
            env=self.environment(),
            cwd=self.path,
            bounds=self.bounds,
            stdin=stdin,
        )


def clean_environment(home: Path) -> dict[str, str]:
    """The environment of every Git command but :func:`_fetch`; *home* holds no configuration."""
    return {
        "PATH": _SEARCH_PATH,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_GRAFT_FILE": os.devnull,
        "GIT_PROTOCOL_FROM_USER": "0",
    }


def create_repository(path: Path, *, object_format: str, alternate: Path | None = None) -> None:
    """Make an empty bare repository of ours: gitrepository-layout(5), no templates, no hooks.

    Atomic and idempotent: it is built beside *path* and renamed; one that is there stays.
    """
    if (path / "HEAD").exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".creating-", dir=path.parent))
    for name in ("objects/info", "objects/pack", "refs"):
        (draft / name).mkdir(parents=True)
    (draft / "config").write_text(_REPOSITORY_CONFIG.format(object_format=object_format))
    if alternate is not None:
        (draft / "objects/info/alternates").write_bytes(os.fsencode(alternate) + b"\n")
    (draft / "HEAD").write_text("ref: refs/heads/none\n")
    try:
        draft.rename(path)
    except OSError:
        shutil.rmtree(draft)
        if not (path / "HEAD").exists():
            raise


@asynccontextmanager
async def quarantine(
    store: Path, *, object_format: str, bounds: Bounds
) -> AsyncIterator[Repository]:
    """A repository of its own beside the stores that borrows *store*'s objects; gone at the end."""
    with disk_errors(store.parent):
        path = await anyio.to_thread.run_sync(_open_quarantine, store, object_format)
    try:
        yield Repository(path, bounds)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(shutil.rmtree, path.parent)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns errors of file calls under *path* into :class:`DiskUnusable`."""
    try:
        yield
    except TimeoutError:  # of a deadline around us, not of a disk
        raise
    except OSError as error:
        raise DiskUnusable(f"cannot write under {path}: {error.strerror}") from error


def _open_quarantine(store: Path, object_format: str) -> Path:
    nursery = store.parent / ".quarantine"
    nursery.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(dir=nursery)) / "repository.git"
    create_repository(path, object_format=object_format, alternate=store / "objects")
    if (store / "shallow").exists():
        shutil.copyfile(store / "shallow", path / "shallow")
    return path


def remove_leftovers(repositories: Path) -> None:
    """Remove what a crash left half-made under *repositories*; for the start, before any use."""
    for path in (repositories / ".quarantine", *repositories.glob(".creating-*")):
        shutil.rmtree(path, ignore_errors=True)


async def tree_listing(store_path: Path, commit: str) -> bytes:
    """``git ls-tree -r -t -z`` of *commit*: every tree, blob and gitlink below its root.

    :raises RefusedError: ``code="workspace_invalid"``: no such commit, or too many entries.
    """
    store = Repository(store_path, Bounds(timeout_ms=60_000, stdout_bytes=256 << 20))
    try:
        listing = await store.output("ls-tree", "-r", "-t", "-z", "--full-tree", commit)
        await anyio.to_thread.run_sync(need_few_entries, listing)
    except RefusedError as error:
        why = f"cannot read commit {commit}: {error}"
        raise RefusedError(why, code="workspace_invalid", field="inputCommit") from error
    return listing


def adopt_pack(finished: Path, store: Path) -> None:
    """Move the packs in *finished* into *store*, each index last, and make that durable."""
    packs = store / "objects" / "pack"
    for index in sorted(finished.glob("pack-*.idx")):
        for suffix in (".pack", ".rev", ".idx"):
            part = index.with_suffix(suffix)
            if part.exists():
                part.rename(packs / part.name)
    _sync_directory(packs)


def add_shallow(repository: Path, commit: str) -> None:
    """Add *commit* to the ``shallow`` file, under Git's own lock name, by rename."""
    shallow = repository / "shallow"
    lock = repository / "shallow.lock"
    with _SHALLOW_WRITES:
        known = shallow.read_text().split() if shallow.exists() else []
        if commit in known:
            return
        with lock.open("w") as file:
            file.write("".join(f"{line}\n" for line in sorted({*known, commit})))
            file.flush()
            os.fsync(file.fileno())
        lock.rename(shallow)
        _sync_directory(repository)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
