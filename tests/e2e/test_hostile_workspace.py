"""What an agent may leave in its workspace: taken as it is, left out, or refused by name.

Whatever it is, nothing of it runs on the host, and neither the operator's clone nor the store's
own files change (docs/explanation/output.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import Engine
from rig import Rig, git, running_rig

pytestmark = [pytest.mark.engine("d26"), pytest.mark.requirement("B-04", "A-09")]
on_both = pytest.mark.engine("d26", "r26")


@pytest.fixture(scope="module")
def rig(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Rig]:
    with running_rig(tmp_path_factory.mktemp("rig"), engine, module_runner_id) as rig:
        rig.wait_over(rig.dispatch("true"))  # the first attempt makes the store
        yield rig


def canary(rig: Rig) -> Path:
    """A path of the host that every hostile command would make."""
    return rig.directory / "executed"


def digest(directory: Path, *left_out: str) -> dict[str, str]:
    """Every file and link below, by content."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(directory.rglob("*"))
        if path.relative_to(directory).parts[0] not in left_out
    }


@pytest.fixture(autouse=True)
def _nothing_happens_on_the_host(rig: Rig) -> Iterator[None]:
    store = rig.state_root / "repositories" / "sample.git"
    before = digest(rig.repository), digest(store, "objects", "refs")
    yield
    assert not canary(rig).exists()
    assert (digest(rig.repository), digest(store, "objects", "refs")) == before
    assert list((rig.state_root / "repositories" / ".quarantine").iterdir()) == []
    git(store, "fsck", "--strict")
    assert not rig.resources()


def leave(rig: Rig, script: str, **more: Any) -> dict[str, Any]:
    """The result of an attempt whose agent runs this and succeeds."""
    result = rig.wait_over(rig.dispatch("sh", "-ec", script, **more))
    assert result["exitCode"] == 0, result
    return result


def changes(rig: Rig, result: dict[str, Any]) -> list[str]:
    """``git diff --raw`` of the result, as mode and path."""
    assert result["outcome"] == "succeeded", result
    store = rig.state_root / "repositories" / "sample.git"
    raw = git(store, "diff", "--raw", "--no-renames", rig.commit, result["resultCommit"])
    return [f"{line.split()[1]} {line.partition(chr(9))[2]}" for line in raw.splitlines()]


REFUSED = {
    # the rule's words, what the agent does
    "an absolute link": ("is an absolute symbolic link", "ln -s / a"),
    "a link to a file of the host": ("is an absolute symbolic link", "ln -s /etc/passwd a"),
    "a link through /proc": ("is an absolute symbolic link", "ln -s /proc/1/root a"),
    "a link out of the tree": ("leads out of the tree", "ln -s ../../etc/passwd a"),
    "a link through a link": (
        "leads out of the tree",
        "mkdir -p d/e; ln -s d/e a; ln -s a/../../../x b",
    ),
    "a link into .git": ("is a symbolic link into .git", "ln -s .git/config a"),
    "a loop of links": ("never ends", "ln -s b a; ln -s a b"),
    ".git in capitals": ("hasDotgit", "mkdir .GIT; echo x > .GIT/config"),
    "a short name of .git": ("hasDotgit", "mkdir git~1; echo x > git~1/config"),
    ".git that HFS+ sees": ("hasDotgit", "printf x > $(printf '.g\\342\\200\\214it')"),
    "a submodule with a command": (
        "gitmodulesUrl",
        "printf '[submodule \"s\"]\\npath=s\\nurl=--upload-pack=x\\n' > .gitmodules",
    ),
    "a link for .gitmodules": ("gitmodulesSymlink", "ln -s README.md .gitmodules"),
    "a link for .gitignore": ("must not be a symbolic link", "ln -sf README.md .gitignore"),
    "a pipe for .gitignore": ("ignore: ", "rm .gitignore; mkfifo .gitignore"),
    "an endless .gitignore": ("ignore: ", "truncate -s 2M .gitignore"),
    "a newline in a name": ("has a control character", "echo > \"$(printf 'a\\nb')\""),
    "an escape in a name": ("has a control character", "echo > \"$(printf 'a\\033[2Jb')\""),
    "a name that is no text": ("is not UTF-8", "echo > \"$(printf 'a\\377b')\""),
    "a backslash in a name": ("has a backslash", "echo > 'a\\b'"),
    "a link in another case": ("differs from", "mkdir A; echo x > A/f; ln -s A a"),
    "a deep tree": (
        "path: ",
        "i=0; while [ $i -lt 300 ]; do mkdir d; cd d; i=$((i+1)); done; echo x > f",
    ),
    "a hole of 4 GiB": ("size: ", "truncate -s 4G hole"),
    "a tracked file with a hole of 12 TiB": ("size: ", "truncate -s 12T README.md"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(rig: Rig, what: str) -> None:
    words, script = REFUSED[what]
    result = leave(rig, script)
    assert (result["outcome"], result["failureCode"]) == ("failed", "output_invalid")
    assert words in result["summary"], result["summary"]
    assert result["summary"].isprintable()
    assert "hint:" not in result["summary"]
    assert result["resultCommit"] is None


@on_both
@pytest.mark.parametrize("script", ["mkdir d; echo x > d/f; chmod 0 d", "echo x > f; chmod 0 f"])
def test_what_its_own_user_cannot_read_is_refused(rig: Rig, script: str) -> None:
    result = leave(rig, script)
    assert result["failureCode"] == "output_invalid"
    assert "read: " in result["summary"]


HOSTILE_GIT = """
touch='touch CANARY'
git config core.fsmonitor "$touch"
git config core.hooksPath hooks
git config core.sshCommand "$touch"
git config core.worktree /etc
git config filter.f.clean "$touch"
git config filter.f.process "$touch"
git config diff.external "$touch"
git config uploadpack.packObjectsHook "$touch"
mkdir -p .git/info .git/objects/info
printf '* filter=f\\n' > .git/info/attributes
printf '* filter=f diff=f\\n' > .gitattributes
printf '/\\n' > .git/objects/info/alternates
mkdir -p hooks .git/hooks
for hook in pre-commit post-checkout post-index-change reference-transaction update post-update
do
    printf '#!/bin/sh\\n%s\\n' "$touch" > hooks/$hook
    cp hooks/$hook .git/hooks/$hook
done
chmod -R 755 hooks .git/hooks
mkdir sub
git -C sub init -q
printf '#!/bin/sh\\n%s\\n' "$touch" > sub/.git/hooks/post-checkout
chmod 755 sub/.git/hooks/post-checkout
git config include.path /etc/passwd
echo changed > VERSION
"""


@on_both
def test_a_hostile_repository_runs_nothing(rig: Rig) -> None:
    result = leave(rig, HOSTILE_GIT.replace("CANARY", str(canary(rig))))
    paths = {line.split()[1] for line in changes(rig, result)}
    assert {"VERSION", ".gitattributes"} < paths
    assert all(path.startswith("hooks/") for path in paths - {"VERSION", ".gitattributes"})


@pytest.mark.parametrize(
    "replace",
    [
        "ln -s /etc .git",
        "mkfifo .git",
        "echo 'gitdir: /etc' > .git",
        "echo x > .git",
        "true",
    ],
)
def test_its_git_may_be_anything_or_nothing(rig: Rig, replace: str) -> None:
    result = leave(rig, f"rm -rf .git; {replace}; echo changed > VERSION")
    assert changes(rig, result) == ["100644 VERSION"]


SPECIAL = """
import os, socket
os.mkfifo("fifo")
socket.socket(socket.AF_UNIX).bind("socket")
os.link("VERSION", "hard link")
os.open("set-id", os.O_CREAT, 0o600)
os.chmod("set-id", 0o6755)
for name in ("n" * 255, "case", "CASE", "ünï cöde", "-rf", ":!x", "a;touch b", "$(touch b)"):
    open(name, "w").write(name)
open("binary", "wb").write(bytes(range(256)) * 4096)
os.makedirs("/".join("d" * 100))
"""


@on_both
def test_what_is_odd_but_harmless_comes_back_exactly(rig: Rig) -> None:
    session_id = rig.dispatch("python3", "-c", SPECIAL)
    result = rig.wait_over(session_id)
    assert result["outcome"] == "succeeded", result
    store = rig.state_root / "repositories" / "sample.git"
    listing = git(store, "diff", "--raw", "-z", rig.commit, result["resultCommit"]).split("\0")
    found = {path: head.split()[1] for head, path in zip(listing[::2], listing[1::2], strict=False)}
    plain = ("n" * 255, "case", "CASE", "ünï cöde", "-rf", ":!x", "a;touch b", "$(touch b)")
    expected = dict.fromkeys((*plain, "hard link", "binary"), "100644")
    assert found == {**expected, "set-id": "100755"}
    events = rig.diagnostics(session_id)["timeline"]
    said = [event["payload"]["detail"] for event in events if event["type"] == "warning"]
    assert sorted(said) == ["special file left out: 'fifo'", "special file left out: 'socket'"]


def test_everything_may_be_removed(rig: Rig) -> None:
    result = leave(rig, "rm -rf ./* .git .gitignore")
    assert len(changes(rig, result)) == len(git(rig.repository, "ls-files").splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("for n in range(100_001): open(str(n), 'w').close()", "files: more than 100000 files"),
        ("for n in range(99): open(str(n), 'w').truncate(1 << 30)", "has 1073741824 bytes"),
    ],
)
def test_what_is_many_or_large_together_is_refused(rig: Rig, script: str, words: str) -> None:
    result = leave(rig, f'python3 -c "{script}"')
    assert result["failureCode"] == "output_invalid"
    assert words in result["summary"], result["summary"]
