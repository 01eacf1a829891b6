"""A branch of a remote, seen and moved: the only Git commands that carry a publish credential.

The credential is in the environment of these programs and nowhere else: Git takes it as
configuration from there (``GIT_CONFIG_COUNT``, git-config(1), since 2.31), for the one URL that it
is meant for.  No argument, file or hook ever has it; the repository is a bare store of ours,
whose configuration we wrote, and neither the system's, the account's nor a clone's configuration
is read, so that no ``insteadOf``, helper or hook of anybody has a say.  Redirects are not
followed, certificates are verified, one protocol is allowed, traces cannot be switched on.

Git runs below a launcher that dies with us and then kills what is left
(:mod:`forge_supervisor.host_command`): no push outlives the bridge that began it.
Source: requirement rows B-62, B-63; docs/how-to/publish-results.md.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import anyio.to_thread

from forge_core.errors import RefusedError
from forge_core.publication import Pushed, Remote, RemoteUnreachable, Seen, is_loopback
from forge_core.tree_rules import is_object_id
from forge_edges.git import GIT, SAFE_CONFIG, clean_environment
from forge_edges.process import Bounds, Outcome, OutputOverflow, ProcessTimedOut, run

LOOK_TIMEOUT_MS: Final = 30_000
STALL_S: Final = 60
"""A transfer that moves less than a byte a second for so long is given up."""

TERM_GRACE_MS: Final = 500
MAX_LISTED_BYTES: Final = 1 << 16
MAX_MEMORY_BYTES: Final = 2 << 30
MAX_SAID: Final = 500
NO_REPOSITORY: Final = Path(os.devnull)
"""Where Git finds no configuration, of a repository or of an account."""

_CERTIFICATES: Final = {"GIT_SSL_CAINFO": "SSL_CERT_FILE", "GIT_SSL_CAPATH": "SSL_CERT_DIR"}
_PROXIES: Final = tuple(
    name for word in ("https_proxy", "no_proxy", "all_proxy") for name in (word, word.upper())
)
_NOT_NOW: Final = re.compile(
    r"could not resolve (?:host|proxy)|failed to connect|couldn't connect|timed out|connection re"
    r"|empty reply|early eof|hung up|operation too slow|returned error: (?:429|5\d\d)",
    re.IGNORECASE,
)


async def remote_branch(remote: Remote, branch: str) -> Seen:
    """Look at a branch (git-ls-remote(1)).

    :raises RemoteUnreachable: the remote does not answer, or cannot do so now.
    :raises RefusedError: code ``remote_refused``: it does not let us in, or answers nonsense.
    """
    what = f"cannot look at branch {branch} of {remote.url}"
    ref = f"refs/heads/{branch}"
    bounds = Bounds(
        timeout_ms=LOOK_TIMEOUT_MS,
        stdout_bytes=MAX_LISTED_BYTES,
        memory_bytes=MAX_MEMORY_BYTES,
        grace_ms=TERM_GRACE_MS,
    )
    command = ["ls-remote", "--quiet", "--", remote.url, ref]
    outcome = await _run(remote, NO_REPOSITORY, command, bounds, what)
    if outcome.exit_code != 0:
        raise _failure(what, _said(remote, outcome))
    for line in outcome.stdout.decode("utf-8", "replace").splitlines():
        commit, _, name = line.partition("\t")
        if name == ref and is_object_id(commit):
            return Seen(commit)
    return Seen(None)


async def push(
    store: Path,
    remote: Remote,
    *,
    branch: str,
    commit: str,
    expected: Seen,
    timeout_ms: int,
) -> Pushed:
    """Move a branch to exactly ``commit`` if it still is what was seen (git-push(1)).

    Large files are pushed as the pointers that the commit holds, submodules as the commits that
    it names; neither's content is.

    :param store: the bare store that has the commit.
    :param expected: the lease: the remote refuses when the branch is anything else.
    :param timeout_ms: for everything; what the remote has got by then it may still take.
    :raises RemoteUnreachable: Git was ended at the deadline: nobody knows what came of it.
    """
    ref = f"refs/heads/{branch}"
    arguments = [
        *("push", "--porcelain", "--no-progress", "--no-verify", "--no-signed", "--no-follow-tags"),
        *("--recurse-submodules=no", f"--force-with-lease={ref}:{expected.commit or ''}"),
        *("--", remote.url, f"{commit}:{ref}"),
    ]
    bounds = Bounds(timeout_ms=timeout_ms, memory_bytes=MAX_MEMORY_BYTES, grace_ms=TERM_GRACE_MS)
    what = f"cannot push to branch {branch} of {remote.url}"
    outcome = await _run(remote, store, arguments, bounds, what)
    if outcome.exit_code == 0 and _moved(outcome.stdout, f"{commit}:{ref}"):
        return Pushed(accepted=True)
    return Pushed(accepted=False, said=_said(remote, outcome))


async def missing_for_push() -> str | None:
    """Why this host's Git cannot push like this, tried and not looked up; None: it can."""
    probe = {"GIT_CONFIG_KEY_0": "forge.probe", "GIT_CONFIG_VALUE_0": "seen"}
    asked = await _local(["config", "--get", "forge.probe"], {"GIT_CONFIG_COUNT": "1", **probe})
    if asked != "seen":
        return "it takes no configuration from its environment (GIT_CONFIG_COUNT, Git 2.31)"
    helper = Path(await _local(["--exec-path"])) / "git-remote-https"
    if not await anyio.to_thread.run_sync(os.access, helper, os.X_OK):
        return f"it does not speak https: there is no {helper}"
    return None


async def git_version() -> str:
    """As Git tells it, for people."""
    return await _local(["version"])


async def _local(arguments: list[str], more: Mapping[str, str] | None = None) -> str:
    """What a command that reaches nothing prints."""
    outcome = await run(
        [GIT, f"--git-dir={NO_REPOSITORY}", *arguments],
        env={**clean_environment(NO_REPOSITORY), **(more or {})},
        cwd=Path("/"),
        bounds=Bounds(timeout_ms=LOOK_TIMEOUT_MS),
    )
    return outcome.stdout.decode("utf-8", "replace").strip()


async def _run(
    remote: Remote, repository: Path, arguments: list[str], bounds: Bounds, what: str
) -> Outcome:
    """:raises RemoteUnreachable: it took too long."""
    launcher = [sys.executable, "-I", "-S", "-c", _launcher()]
    git = [GIT, *SAFE_CONFIG, f"--git-dir={repository}", "--no-pager"]
    environment = _environment(remote, os.environ)
    try:
        return await run(
            [*launcher, *git, *arguments], env=environment, cwd=Path("/"), bounds=bounds
        )
    except ProcessTimedOut:
        raise RemoteUnreachable(f"{what}: no end within {bounds.timeout_ms} ms") from None
    except OutputOverflow as error:
        raise RefusedError(f"{what}: {error}", code="remote_refused") from None


@cache
def _launcher() -> str:
    return (files("forge_supervisor") / "host_command.py").read_text("utf-8")


def _environment(remote: Remote, operator: Mapping[str, str]) -> dict[str, str]:
    """The whole environment, and with it the whole configuration but for what ``-c`` says."""
    settings = {
        f"http.{remote.url}.extraHeader": remote.credential.header,
        "http.followRedirects": "false",
        "http.sslVerify": "true",
        "http.lowSpeedLimit": "1",
        "http.lowSpeedTime": str(STALL_S),
        "credential.helper": "",
        "credential.interactive": "false",
    }
    environment = clean_environment(NO_REPOSITORY)
    environment["GIT_ALLOW_PROTOCOL"] = urlsplit(remote.url).scheme
    if not is_loopback(remote.url):
        environment |= {name: operator[name] for name in _PROXIES if name in operator}
    for name, standard in _CERTIFICATES.items():
        if value := operator.get(name) or operator.get(standard):
            environment[name] = value
    environment["GIT_CONFIG_COUNT"] = str(len(settings))
    for number, (key, value) in enumerate(settings.items()):
        environment[f"GIT_CONFIG_KEY_{number}"] = key
        environment[f"GIT_CONFIG_VALUE_{number}"] = value
    return environment


def _moved(porcelain: bytes, refspec: str) -> bool:
    """Whether the remote has reported that it moved exactly this ref (git-push(1), OUTPUT)."""
    for line in porcelain.decode("utf-8", "replace").splitlines():
        flag, _, rest = line.partition("\t")
        if rest.partition("\t")[0] == refspec:
            return flag in {" ", "+", "*"}
    return False


def _said(remote: Remote, outcome: Outcome) -> str:
    """What Git and the remote complain of: masked whole, then one line that a terminal may show."""
    reports = outcome.stdout.decode("utf-8", "replace").splitlines()
    refusals = [line.partition("\t")[2] for line in reports if line.startswith("!")]
    complaints = outcome.stderr.decode("utf-8", "replace").splitlines()
    text = remote.credential.mask("; ".join(filter(None, [*complaints, *refusals])))
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown[-MAX_SAID:].strip() or f"exit code {outcome.exit_code}"


def _failure(what: str, said: str) -> RefusedError | RemoteUnreachable:
    message = f"{what}: {said}"
    if _NOT_NOW.search(said):
        return RemoteUnreachable(message)
    return RefusedError(message, code="remote_refused")
