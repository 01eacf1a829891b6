"""The registry of repositories: names, paths, durability, many writers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge_bridge.repositories import (
    REGISTRY_FILE,
    Registered,
    add_repository,
    list_repositories,
    pushable_origin,
    remove_repository,
    require_repository,
)
from forge_core.errors import RefusedError
from forge_core.wire.limits import MAX_MESSAGE_BYTES, measured_size_bytes
from needs import require_root

pytestmark = pytest.mark.requirement("B-40")


def git(*arguments: str, cwd: Path | None = None) -> None:
    """Run git with the identity of nobody in particular."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"} | {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "a"), ("EMAIL", "a@example.org"))
    }
    subprocess.run(["git", *arguments], cwd=cwd, env=environment, check=True, timeout=60)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    path = tmp_path / "clone"
    git("init", "-q", "-b", "main", str(path))
    git("commit", "-q", "--allow-empty", "-m", "first", cwd=path)
    return path


@pytest.fixture
def state_root(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


def test_clones_bare_repositories_and_work_trees_are_served(
    tmp_path: Path, clone: Path, state_root: Path
) -> None:
    git("clone", "-q", "--bare", str(clone), str(tmp_path / "bare.git"))
    git("worktree", "add", "-q", str(tmp_path / "tree"), cwd=clone)
    (tmp_path / "link").symlink_to(clone)
    assert add_repository(state_root, "clone", clone)
    assert add_repository(state_root, "bare", tmp_path / "bare.git")
    assert add_repository(state_root, "tree", tmp_path / "tree")
    assert add_repository(state_root, "link", tmp_path / "link")
    assert {name: entry.path for name, entry in list_repositories(state_root).items()} == {
        "bare": tmp_path / "bare.git",
        "clone": clone,
        "link": clone,
        "tree": tmp_path / "tree",
    }
    assert (state_root / REGISTRY_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("length", [8, 128])
def test_all_names_together_fit_into_one_registration(
    clone: Path, state_root: Path, length: int
) -> None:
    several = {f"{n:0{length}}": str(clone) for n in range(150 if length == 128 else 1_000)}
    registry = {"version": 1, "repositories": several}
    (state_root / REGISTRY_FILE).write_text(json.dumps(registry))
    for n in range(2 if length == 128 else 0):
        assert add_repository(state_root, f"y{n}".ljust(length, "y"), clone)
    with pytest.raises(RefusedError) as refused:
        add_repository(state_root, "z" * length, clone)
    assert refused.value.code == "repositories_full"
    names = tuple(list_repositories(state_root))
    assert len(names) >= len(several)
    room_for_all_else_bytes = 8_000
    used_bytes = measured_size_bytes({"repositories": list(names)})
    assert used_bytes < MAX_MESSAGE_BYTES - room_for_all_else_bytes


def test_adding_and_removing_twice_changes_nothing(clone: Path, state_root: Path) -> None:
    assert add_repository(state_root, "a", clone)
    before = (state_root / REGISTRY_FILE).stat()
    assert not add_repository(state_root, "a", clone)
    assert (state_root / REGISTRY_FILE).stat().st_ino == before.st_ino
    assert remove_repository(state_root, "a")
    assert not remove_repository(state_root, "a")
    assert (clone / ".git").is_dir()


def test_a_name_is_never_moved_to_another_path(
    tmp_path: Path, clone: Path, state_root: Path
) -> None:
    git("init", "-q", str(tmp_path / "other"))
    add_repository(state_root, "a", clone)
    with pytest.raises(RefusedError, match=r"already names .*remove-repo a") as refused:
        add_repository(state_root, "a", tmp_path / "other")
    assert refused.value.field == "name"
    assert list_repositories(state_root) == {"a": Registered(clone)}


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/b", "-a", ".a", "a b", "a\n", "ä", "a.git", "a" * 129]
)
def test_names_that_could_be_something_else_are_refused(
    name: str, clone: Path, state_root: Path
) -> None:
    with pytest.raises(RefusedError) as refused:
        add_repository(state_root, name, clone)
    assert (refused.value.code, refused.value.field) == ("malformed", "name")
    assert list_repositories(state_root) == {}


def test_what_is_no_repository_is_refused(tmp_path: Path, state_root: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "pointer").mkdir()
    (tmp_path / "pointer/.git").write_text("gitdir: /nowhere\n")
    for name in ("empty", "file", "pointer", "missing"):
        with pytest.raises(RefusedError, match=f"cannot add {tmp_path}/{name}") as refused:
            add_repository(state_root, "a", tmp_path / name)
        assert (refused.value.code, refused.value.field) == ("not_a_repository", "path")


def test_a_repository_that_this_account_cannot_read_is_refused(
    tmp_path: Path, clone: Path, state_root: Path
) -> None:
    require_root("become another account")
    for directory in (tmp_path, *(p for p in tmp_path.parents if str(p).startswith("/tmp/"))):
        directory.chmod(0o755)
    (clone / ".git/objects").chmod(0o700)
    (clone / ".git").chmod(0o755)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            add_repository(state_root, "a", clone)
            os.write(write, b"accepted")
        except RefusedError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(pid, 0)
    assert "this account cannot read" in text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 64,
        b"[]",
        b"{}",
        b'{"repositories": {"../x": "/a"}}',
        b'{"repositories": {"a": "relative"}}',
        b'{"repositories": {"a": 1}}',
        b'{"repositories": {"a": {"remote": null}}}',
        b'{"repositories": {"a": {"path": "/a", "remote": 1}}}',
        b'{"repositories": {"a": {"path": "/a", "remote": "ssh://x/y"}}}',
        b'{"repositories": {"a": {"path": "/a", "remote": "https://u:p@x/y"}}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_registry_is_named_and_left_alone(
    content: bytes, clone: Path, state_root: Path
) -> None:
    (state_root / REGISTRY_FILE).write_bytes(content)
    for change in (
        lambda: list_repositories(state_root),
        lambda: add_repository(state_root, "a", clone),
        lambda: remove_repository(state_root, "a"),
    ):
        with pytest.raises(RefusedError, match=str(state_root / REGISTRY_FILE)):
            change()
    assert (state_root / REGISTRY_FILE).read_bytes() == content


@pytest.mark.requirement("B-61", "B-63")
async def test_results_go_to_the_remote_that_the_operator_named_else_to_the_origin(
    clone: Path, state_root: Path
) -> None:
    git("remote", "add", "origin", "https://Example.ORG/a/b.git/", cwd=clone)
    origin = await pushable_origin(clone)
    assert origin == "https://example.org/a/b.git"
    assert add_repository(state_root, "a", clone, origin=origin)
    assert list_repositories(state_root) == {"a": Registered(clone, origin)}
    assert add_repository(state_root, "a", clone, remote="https://example.org/other")
    assert not add_repository(state_root, "a", clone, origin=origin)
    assert list_repositories(state_root)["a"].remote == "https://example.org/other"
    with pytest.raises(RefusedError) as refused:
        add_repository(state_root, "a", clone, remote="ssh://example.org/a")
    assert refused.value.code == "remote_refused"


@pytest.mark.requirement("B-61", "B-62")
@pytest.mark.parametrize(
    ("url", "remote"),
    [
        ("https://user:password@example.org/a", "https://example.org/a"),
        ("git@example.org:a.git", None),
        ("../elsewhere", None),
        ("http://example.org/a", None),
        ("ext::sh -c 'touch /tmp/pwned'", None),
        (None, None),
    ],
)
async def test_an_origin_is_text_and_never_run(
    clone: Path, url: str | None, remote: str | None
) -> None:
    included = clone.parent / "included"
    included.write_text('[remote "origin"]\n\turl = https://included.example/a\n')
    git("config", "include.path", str(included), cwd=clone)
    git("config", "url.https://evil.example/.insteadOf", "https://example.org/", cwd=clone)
    if url is not None:
        git("config", "remote.origin.url", url, cwd=clone)
    assert await pushable_origin(clone) == remote


def test_a_registry_of_an_earlier_version_has_paths_only(clone: Path, state_root: Path) -> None:
    earlier = {"version": 1, "repositories": {"a": str(clone)}}
    (state_root / REGISTRY_FILE).write_text(json.dumps(earlier))
    assert list_repositories(state_root) == {"a": Registered(clone)}
    assert not add_repository(state_root, "a", clone)
    assert add_repository(state_root, "a", clone, origin="https://example.org/a")
    assert list_repositories(state_root) == {"a": Registered(clone, "https://example.org/a")}


def test_writers_at_the_same_time_lose_nothing(clone: Path, state_root: Path) -> None:
    script = (
        "import sys; from pathlib import Path; "
        "from forge_bridge.repositories import add_repository; "
        "[add_repository(Path(sys.argv[1]), f'{sys.argv[3]}-{n}', Path(sys.argv[2]))"
        " for n in range(10)]"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(state_root), str(clone), name])
        for name in ("x", "y", "z")
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert len(list_repositories(state_root)) == 30
    assert json.loads((state_root / REGISTRY_FILE).read_text())["version"] == 2
    assert sorted(p.name for p in state_root.iterdir()) == [
        "repositories.json",
        "repositories.lock",
    ]


@pytest.mark.requirement("B-40")
def test_a_project_with_a_folder_named_objects_is_a_repository(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "init", "--quiet", str(clone)], check=True)
    (clone / "objects").mkdir()
    (clone / "HEAD").write_text("not git's\n")
    require_repository(clone)
