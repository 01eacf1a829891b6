"""Git, run so that nothing but our own arguments has a say.

No system, user or foreign repository configuration is read, no hook, filter, pager, monitor,
prompt or lazy fetch can run, replace refs and grafts are off, no transport is allowed.  The one
exception is :func:`_fetch`, which asks the operator's origin with the operator's credentials.

The bare store (``<state root>/repositories/<name>.git``) is made and configured by us alone.
It is shallow: each input commit is there with its tree and without its ancestors.  Packs enter
it finished and by rename; a ref is what makes their objects count.

The operator's clone is never opened *as a repository*: only its object directory is read, as an
alternate of a quarantine of ours, so its configuration, hooks and refs are not even parsed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import anyio
import anyio.to_thread

from forge_core.errors import ForgeError, RefusedError
from forge_core.tree_rules import is_object_id, object_format
from forge_edges.process import Bounds, Outcome, Process, run, start

_GIT = shutil.which("git", path=os.environ.get("PATH", os.defpath)) or "git"
_SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OPERATOR_VARIABLES = frozenset(
    {"HOME", "PATH", "USER", "LOGNAME", "XDG_CONFIG_HOME", "SSH_AUTH_SOCK"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO"}
    | {name for word in ("http", "https", "no", "all") for name in (f"{word}_proxy",)}
    | {name for word in ("HTTP", "HTTPS", "NO", "ALL") for name in (f"{word}_PROXY",)}
)
_SAFE_CONFIG = (
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
    *("-c", "gc.auto=0"),
    *("-c", "maintenance.auto=false"),
    *("-c", "pack.threads=2"),
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
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_SHALLOW_WRITES = threading.Lock()
_EXCLUDED_INPUTS = 8


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How much bringing one commit in may take.

    :param timeout_ms: for each program run, milliseconds.
    :param pack_bytes: largest pack that is written.
    """

    timeout_ms: int = 600_000
    pack_bytes: int = 4 << 30


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
            _GIT,
            *_SAFE_CONFIG,
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
        """Run one Git command to its end; a non-zero status is an answer, not an error."""
        return await run(
            self.argv(*arguments),
            env=self.environment(),
            cwd=self.path,
            bounds=self.bounds,
            input=input,
            stdout=stdout,
        )

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
    path = await anyio.to_thread.run_sync(_open_quarantine, store, object_format)
    try:
        yield Repository(path, bounds)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(shutil.rmtree, path.parent)


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


async def ensure_commit(
    clone_path: Path,
    store_path: Path,
    commit: str,
    *,
    limits: FetchLimits | None = None,
    operator_environment: Mapping[str, str] | None = None,
) -> None:
    """Have *commit* and its whole tree in the bare store, without its ancestors (B-52, B-61).

    Taken from the operator's clone, which is only read.  A commit that it lacks is fetched once
    from its ``origin``, never into the clone: that call uses the operator's own Git
    configuration and credentials (not the clone's, but for the URL).

    :param clone_path: the clone, a linked work tree of it, or a bare repository.
    :param store_path: the bare store; made when it is not there.
    :param commit: full lower-case SHA-1 or SHA-256 id.
    :param operator_environment: where the operator's variables come from; None: our own.
    :raises RefusedError: ``code="workspace_invalid"``: not a full id, no clone, not to be had.
    """
    if not is_object_id(commit):
        raise _invalid(f"cannot use input commit {commit[:80]!r}: it is not a full object id")
    limits = limits or FetchLimits()
    await anyio.to_thread.run_sync(
        partial(create_repository, store_path, object_format=object_format(commit))
    )
    bounds = Bounds(
        timeout_ms=limits.timeout_ms, stdout_bytes=64 << 20, file_bytes=limits.pack_bytes
    )
    store = Repository(store_path, bounds)
    if (await store.git("rev-parse", "--verify", "--quiet", _input_ref(commit))).exit_code == 0:
        return
    git_directory = _common_directory(clone_path)
    reason = await _take(store, git_directory / "objects", commit)
    if reason is None:
        return
    async with quarantine(
        store_path, object_format=object_format(commit), bounds=bounds
    ) as arrivals:
        why_not = await _fetch(
            arrivals, clone_path, git_directory, commit, operator_environment or os.environ
        )
        if why_not is None:
            why_not = await _take(store, arrivals.path / "objects", commit)
    if why_not is not None:
        raise _invalid(
            f"cannot prepare commit {commit}: {clone_path} does not have it ({reason}), "
            f"and its origin did not give it ({why_not})"
        )


async def tree_listing(store_path: Path, commit: str) -> bytes:
    """``git ls-tree -r -t -z`` of *commit*: every tree, blob and gitlink below its root."""
    bounds = Bounds(timeout_ms=60_000, stdout_bytes=256 << 20)
    return await Repository(store_path, bounds).output(
        "ls-tree", "-r", "-t", "-z", "--full-tree", commit
    )


def adopt_pack(finished: Path, store: Path) -> None:
    """Move the packs in *finished* into *store*, each index last, and make that durable."""
    packs = store / "objects" / "pack"
    for index in sorted(finished.glob("pack-*.idx")):
        for suffix in (".pack", ".rev", ".idx"):
            part = index.with_suffix(suffix)
            if part.exists():
                part.rename(packs / part.name)
    _sync_directory(packs)


async def _take(store: Repository, objects: Path, commit: str) -> str | None:
    """Copy *commit* and its tree out of *objects* into the store; the reason why not, or None.

    pack-objects reuses what it reads; index-pack hashes all of it again; rev-list proves that
    nothing is missing.  Only then does the pack enter the store.
    """
    known = await store.output(
        *("for-each-ref", "--sort=-creatordate", f"--count={_EXCLUDED_INPUTS}"),
        *("--format=%(objectname)", "refs/forge/inputs/"),
    )
    async with quarantine(
        store.path, object_format=object_format(commit), bounds=store.bounds
    ) as arrivals:
        wanted = [
            f"--shallow {commit}",
            commit,
            *(f"^{old}^{{tree}}" for old in known.decode().split()),
        ]
        lender = Repository(arrivals.path, store.bounds, borrowed=objects)
        with (arrivals.path / "arriving").open("w+b") as pack:
            packed = await lender.git(
                *("pack-objects", "--revs", "--stdout", "--shallow", "--delta-base-offset", "-q"),
                input="\n".join([*wanted, ""]).encode(),
                stdout=pack,
            )
            if packed.exit_code != 0:
                return packed.complaint()
            pack.seek(0)
            await arrivals.output("index-pack", "--stdin", input=pack)
        _add_shallow(arrivals.path, commit)
        whole = await arrivals.git(
            "rev-list", "--objects", "--quiet", "--stdin", input=f"{commit}\n".encode()
        )
        if whole.exit_code != 0:
            return whole.complaint()
        if await arrivals.output("cat-file", "-t", commit) != b"commit\n":
            return "it is not a commit"
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(
                adopt_pack, arrivals.path / "objects" / "pack", store.path
            )
            await anyio.to_thread.run_sync(_add_shallow, store.path, commit)
            await store.output("update-ref", _input_ref(commit), commit)
    return None


async def _fetch(
    arrivals: Repository,
    clone: Path,
    git_directory: Path,
    commit: str,
    operator_environment: Mapping[str, str],
) -> str | None:
    """Fetch *commit* from the clone's origin into a quarantine; the reason why not, or None.

    The URL travels in the environment, not in our argument vector: it may carry a password.
    """
    configured = await arrivals.git(
        "config", "--file", str(git_directory / "config"), "--no-includes", "remote.origin.url"
    )
    url = configured.stdout.decode("utf-8", "surrogateescape").strip()
    if configured.exit_code != 0 or not url:
        return "it has no origin"
    environment = {
        **{k: v for k, v in operator_environment.items() if k in _OPERATOR_VARIABLES},
        "LC_ALL": "C",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "SSH_ASKPASS_REQUIRE": "never",
        "GIT_ALLOW_PROTOCOL": "file:http:https:ssh",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "remote.origin.url",
        "GIT_CONFIG_VALUE_0": url,
    }
    argv = [_GIT, *_SAFE_CONFIG, "-c", "transfer.fsckObjects=false", f"--git-dir={arrivals.path}"]
    options = ("--depth=1", "--no-tags", "--no-write-fetch-head", "--no-recurse-submodules", "-q")
    try:
        outcome = await run(
            [*argv, "fetch", *options, "origin", f"{commit}:refs/heads/arrived"],
            env=environment,
            cwd=clone,
            bounds=arrivals.bounds,
        )
    except ForgeError as error:
        return str(error)
    return None if outcome.exit_code == 0 else _CREDENTIALS.sub("***@", outcome.complaint())


def _common_directory(clone: Path) -> Path:
    """The directory that holds ``objects`` and ``config``: gitrepository-layout(5), worktrees."""
    git_directory = clone if (clone / "objects").is_dir() else clone / ".git"
    try:
        if git_directory.is_file():
            pointer = git_directory.read_bytes()[:4096].decode("utf-8", "surrogateescape")
            git_directory = clone / pointer.removeprefix("gitdir:").strip()
        common = git_directory / "commondir"
        if common.is_file():
            pointer = common.read_bytes()[:4096].decode("utf-8", "surrogateescape")
            git_directory = git_directory / pointer.strip()
    except OSError as error:
        raise _invalid(f"cannot read the clone {clone}: {error.strerror}") from error
    if not (git_directory / "objects").is_dir():
        raise _invalid(f"cannot use {clone}: it is not a Git repository; mend it with add-repo")
    return git_directory.resolve()


def _add_shallow(repository: Path, commit: str) -> None:
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


def _input_ref(commit: str) -> str:
    return f"refs/forge/inputs/{commit}"


def _invalid(message: str) -> RefusedError:
    return RefusedError(message, code="workspace_invalid", field="inputCommit")
