"""Input commits on their way from an operator's clone into a bare store.

The clone is never opened *as a repository*: only its object directory is read, as an alternate
of a quarantine of ours, so its configuration, hooks and refs are not even parsed.  What it lacks
is asked of its origin in one call, the only one that sees the operator's Git configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from forge_core.errors import ForgeError, RefusedError
from forge_core.tree_rules import is_object_id, object_format
from forge_edges.git import (
    GIT,
    SAFE_CONFIG,
    Repository,
    add_shallow,
    adopt_pack,
    clean_environment,
    create_repository,
    disk_errors,
    quarantine,
)
from forge_edges.git_layout import common_directory
from forge_edges.process import Bounds, run

_OPERATOR_VARIABLES = frozenset(
    {"HOME", "PATH", "USER", "LOGNAME", "XDG_CONFIG_HOME", "SSH_AUTH_SOCK"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO"}
    | {name for word in ("http", "https", "no", "all") for name in (f"{word}_proxy",)}
    | {name for word in ("HTTP", "HTTPS", "NO", "ALL") for name in (f"{word}_PROXY",)}
)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_EXCLUDED_INPUTS = 8


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How much bringing one commit in may take.

    :param timeout_ms: for each program run, milliseconds.
    :param pack_bytes: largest pack that is written.
    """

    timeout_ms: int = 600_000
    pack_bytes: int = 4 << 30


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
    :raises DiskUnusable: the store cannot be written.
    """
    if not is_object_id(commit):
        raise _invalid(f"cannot use input commit {commit[:80]!r}: it is not a full object id")
    limits = limits or FetchLimits()
    with disk_errors(store_path.parent):
        await anyio.to_thread.run_sync(
            partial(create_repository, store_path, object_format=object_format(commit))
        )
    bounds = Bounds(
        timeout_ms=limits.timeout_ms, stdout_bytes=64 << 20, file_bytes=limits.pack_bytes
    )
    store = Repository(store_path, bounds)
    if (await store.git("rev-parse", "--verify", "--quiet", _input_ref(commit))).exit_code == 0:
        return
    git_directory = await anyio.to_thread.run_sync(_common_directory, clone_path)
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


async def origin_url(clone: Path) -> str | None:
    """Where a clone was cloned from, by the one line of its configuration that says so.

    :param clone: a clone, a linked work tree of it, or a bare repository.
    :raises RefusedError: ``code="workspace_invalid"``: there is no clone.
    """
    git_directory = await anyio.to_thread.run_sync(_common_directory, clone)
    return await _origin(git_directory)


async def _origin(git_directory: Path) -> str | None:
    nowhere = Path(os.devnull)
    outcome = await run(
        [GIT, "config", "--file", git_directory / "config", "--no-includes", "remote.origin.url"],
        env=clean_environment(nowhere),
        cwd=Path("/"),
        bounds=Bounds(timeout_ms=10_000),
    )
    url = outcome.stdout.decode("utf-8", "surrogateescape").strip()
    return url if outcome.exit_code == 0 and url else None


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
        async with await anyio.open_file(arrivals.path / "arriving", "w+b") as pack:
            packed = await lender.git(
                *("pack-objects", "--revs", "--stdout", "--shallow", "--delta-base-offset", "-q"),
                input="\n".join([*wanted, ""]).encode(),
                stdout=pack.wrapped,
            )
            if packed.exit_code != 0:
                return packed.complaint()
            await pack.seek(0)
            indexed = await arrivals.git("index-pack", "--stdin", input=pack.wrapped)
            if indexed.exit_code != 0:
                return indexed.complaint()
        with disk_errors(arrivals.path):
            await anyio.to_thread.run_sync(add_shallow, arrivals.path, commit)
        whole = await arrivals.git(
            "rev-list", "--objects", "--quiet", "--stdin", input=f"{commit}\n".encode()
        )
        if whole.exit_code != 0:
            return whole.complaint()
        if await arrivals.output("cat-file", "-t", commit) != b"commit\n":
            return "it is not a commit"
        with anyio.CancelScope(shield=True), disk_errors(store.path):
            await anyio.to_thread.run_sync(
                adopt_pack, arrivals.path / "objects" / "pack", store.path
            )
            await anyio.to_thread.run_sync(add_shallow, store.path, commit)
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
    url = await _origin(git_directory)
    if url is None:
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
    argv = [GIT, *SAFE_CONFIG, "-c", "transfer.fsckObjects=false", f"--git-dir={arrivals.path}"]
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
    try:
        return common_directory(clone)
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:
        why = str(error)
    raise _invalid(f"cannot use the clone {clone}: {why}; mend it with add-repo")


def _input_ref(commit: str) -> str:
    return f"refs/forge/inputs/{commit}"


def _invalid(message: str) -> RefusedError:
    return RefusedError(message, code="workspace_invalid", field="inputCommit")
