"""What an agent leaves in its workspace comes back as one commit, whatever the workspace is."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import anyio
import pytest
from git_parts import REF, Project, git, make_project, on_disk, word
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_core.errors import RefusedError
from forge_edges import git_import, tree_archive
from forge_edges.git_input import ensure_commit

pytestmark = pytest.mark.requirement("B-61")


async def workspace_of(project: Project, directory: Path) -> Path:
    return await project.unpack(directory / "workspace")


def as_git_sees_it(workspace: Path, *options: str) -> str:
    """The tree that ``git add -A`` makes of *workspace*, without attributes or filters."""
    (workspace / ".git/info").mkdir(exist_ok=True)
    (workspace / ".git/info/attributes").write_text("* -text -ident -filter\n")
    git(workspace, "-c", "core.excludesFile=/dev/null", *options, "add", "-A")
    return word(workspace, "write-tree")


async def taken_tree(project: Project, workspace: Path) -> str:
    """The tree of what comes back; the input's own when nothing does."""
    reply, bundle = await project.bundle(workspace)
    assert reply.refused is None
    if reply.result_commit is None:
        assert (bundle, reply.files) == (b"", 0)
        return word(project.store, "rev-parse", f"{project.commit}^{{tree}}")
    output = await project.take(bundle, reply.result_commit)
    assert (output.result_commit, output.files) == (reply.result_commit, reply.files)
    return word(project.store, "rev-parse", f"{REF}^{{tree}}")


@pytest.mark.parametrize("object_format", ["sha1", "sha256"])
async def test_every_kind_of_change_comes_back(tmp_path: Path, object_format: str) -> None:
    project = await make_project(tmp_path, object_format)
    workspace = await workspace_of(project, tmp_path)
    (workspace / "README").write_bytes(b"$Id$ changed\r\n")
    (workspace / "dir/run").chmod(0o644)
    (workspace / "dir/inner").chmod(0o755)
    (workspace / "second").unlink()
    (workspace / "second").mkdir()
    (workspace / "second/now a directory").write_text("x")
    (workspace / "second.sorts before it").write_text("x")
    (workspace / "second0").write_text("sorts after it")
    shutil.rmtree(workspace / "objects")
    shutil.rmtree(workspace / "dir/deep")
    (workspace / "dir/deep").write_text("now a file")
    (workspace / "link").unlink()
    (workspace / "link").symlink_to("dir/run")
    (workspace / "copy").write_text("inner\n")
    (workspace / "build").mkdir()
    (workspace / "build/ignored").write_text("x")
    (workspace / "x.o").write_text("ignored")
    (workspace / "a/b/c").mkdir(parents=True)
    (workspace / "a/b/c/-n :(top)").write_text("new")
    assert await taken_tree(project, workspace) == as_git_sees_it(workspace)
    shown = git(project.store, "show", "-s", "--format=%an <%ae>%n%ct%n%P%n%B", REF)
    assert shown.decode().split("\n")[:4] == [
        "Forge <forge@example.org>",
        "1700000000",
        project.commit,
        "Result of attempt att-1",
    ]


async def test_the_event_loop_judges_no_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand paths take seconds, in which leases must be kept."""
    judges: dict[ModuleType, tuple[str, ...]] = {}
    judges[git_import] = ("parse_changes", "parse_listing", "changes_violation")
    judges[tree_archive] = ("parse_listing", "input_violation")
    on_the_loop, seen = [], set()

    def watched(name: str, judge: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **bounds: object) -> object:
            seen.add(name)
            if threading.current_thread() is threading.main_thread():
                on_the_loop.append(name)
            return judge(*arguments, **bounds)

        return call

    for module, names in judges.items():
        for name in names:
            monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    project = await make_project(tmp_path)
    workspace = await workspace_of(project, tmp_path)
    (workspace / "new").write_text("x")
    await taken_tree(project, workspace)
    assert seen == {"parse_changes", "parse_listing", "changes_violation", "input_violation"}
    assert on_the_loop == []


TOUCHES = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}
_touched: list[str] | None = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _touched is None or event not in TOUCHES:
        return
    is_path = isinstance(arguments[0], str | bytes | Path)  # and no descriptor of a pipe
    if is_path and threading.current_thread() is threading.main_thread():
        _touched.append(f"{event} {arguments[0]!r}")


sys.addaudithook(_audit)  # cannot be taken back (PEP 578), so it listens only when it is told to


async def test_the_event_loop_touches_no_file(tmp_path: Path) -> None:
    global _touched
    project = await make_project(tmp_path)
    workspace = await workspace_of(project, tmp_path)
    (workspace / "README").write_text("changed")
    reply, bundle = await project.bundle(workspace)
    assert reply.result_commit is not None
    other = tmp_path / "other" / "repositories" / "project.git"
    _touched = []
    try:
        await ensure_commit(project.clone, other, project.commit)
        await project.archive()
        await project.take(bundle, reply.result_commit)
        touched = _touched
    finally:
        _touched = None
    assert touched == []


async def test_nothing_changed_is_no_bundle(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    workspace = await workspace_of(project, tmp_path)
    (workspace / "dir/inner").touch()
    (workspace / "an empty directory").mkdir()
    assert (await project.bundle(workspace))[0].result_commit is None


async def test_the_same_workspace_makes_the_same_commit(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    workspace = await workspace_of(project, tmp_path)
    (workspace / "new").write_text("x")
    assert await project.bundle(workspace) == await project.bundle(workspace)


async def test_a_hostile_workspace_runs_nothing_and_changes_nothing(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    workspace = await workspace_of(project, tmp_path)
    canary = tmp_path / "canary"
    evil = workspace / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {canary}\ncat\n")
    evil.chmod(0o755)
    (workspace / ".gitattributes").write_text("* filter=evil ident text eol=crlf diff=evil\n")
    (workspace / "text").write_bytes(b"$Id$\r\nmixed\n")
    (workspace / "dir/new.txt").write_text("new")
    (workspace / "dir/.gitignore").write_text("*.txt\n!new.txt\n")
    twin = tmp_path / "twin"
    shutil.copytree(workspace, twin, symlinks=True)
    expected = as_git_sees_it(twin)
    for hook in ("pre-commit", "post-index-change", "reference-transaction", "fsmonitor"):
        (workspace / ".git/hooks").mkdir(exist_ok=True)
        shutil.copy(evil, workspace / ".git/hooks" / hook)
    (workspace / ".git/config").write_text(
        f'[core]\n\tfsmonitor = "{evil}"\n\tworktree = /\n\thooksPath = .git/hooks\n'
        f'\texcludesFile = "{workspace}/all"\n\tpager = "{evil}"\n\tbare = true\n'
        f'[filter "evil"]\n\tclean = "{evil}"\n\tsmudge = "{evil}"\n\trequired = true\n'
        f'[diff "evil"]\n\ttextconv = "{evil}"\n[include]\n\tpath = /dev/zero\n'
    )
    (workspace / "all").write_text("*\n")
    shutil.copy(workspace / "all", twin / "all")
    (workspace / ".git/objects/info/alternates").write_text("/\n")
    (workspace / ".git/info").mkdir(exist_ok=True)
    (workspace / ".git/info/exclude").write_text("*\n")
    (workspace / ".git/index").write_bytes(b"garbage")
    (workspace / ".git/HEAD").unlink()
    os.mkfifo(workspace / ".git/HEAD")
    (workspace / ".git/commondir").write_text("/\n")
    expected = as_git_sees_it(twin)
    before = on_disk(workspace)
    assert await taken_tree(project, workspace) == expected
    assert not canary.exists()
    assert on_disk(workspace) == before
    assert git(project.store, "show", f"{REF}:text") == b"$Id$\r\nmixed\n"


async def test_the_workspaces_git_may_be_anything(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    workspace = await workspace_of(project, tmp_path)
    (workspace / "new").write_text("x")
    expected, _ = await project.bundle(workspace)
    shutil.rmtree(workspace / ".git")
    for make in (
        lambda git_: None,
        lambda git_: git_.write_text("gitdir: /etc\n"),
        lambda git_: git_.symlink_to("/"),
        os.mkfifo,
    ):
        make(workspace / ".git")
        assert await project.bundle(workspace) == (expected, (await project.bundle(workspace))[1])
        if os.path.lexists(workspace / ".git"):
            (workspace / ".git").unlink()


async def test_what_cannot_be_committed_is_left_out_and_named(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    workspace = await workspace_of(project, tmp_path)
    os.mkfifo(workspace / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(workspace / "dir/s"))
    (workspace / "nested/.git").mkdir(parents=True)
    (workspace / "nested/file").write_text("x")
    (workspace / "dir/.git").mkdir()
    (workspace / "dir/beside").write_text("tracked directory: kept\n")
    (workspace / "module/inside").write_text("of a submodule")
    reply, bundle = await project.bundle(workspace)
    assert sorted(reply.warnings) == [
        "nested repository left out: 'nested'",
        "special file left out: 'dir/s'",
        "special file left out: 'fifo'",
    ]
    assert reply.result_commit is not None
    await project.take(bundle, reply.result_commit)
    changed = word(project.store, "diff-tree", "-r", "--name-status", project.commit, REF)
    assert changed.split() == ["A", "dir/beside"]


async def test_a_submodule_may_go_but_not_come(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    workspace = await workspace_of(project, tmp_path)
    (workspace / "module").rmdir()
    assert await taken_tree(project, workspace) == as_git_sees_it(workspace)


def fifo_as_ignore(workspace: Path) -> None:
    (workspace / ".gitignore").unlink()
    os.mkfifo(workspace / ".gitignore")


def huge_ignore(workspace: Path) -> None:
    (workspace / ".gitignore").write_bytes(b"x\n" * (1 << 20))


def deep(workspace: Path) -> None:
    descriptor = os.open(workspace, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d" * 200, dir_fd=descriptor)
        inner = os.open("d" * 200, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
    os.close(descriptor)


def large(workspace: Path) -> None:
    with (workspace / "sparse").open("wb") as file:
        file.truncate(1 << 40)


def many(workspace: Path) -> None:
    for number in range(101):
        (workspace / str(number)).write_bytes(b"")


def sum_is_large(workspace: Path) -> None:
    for number in range(3):
        (workspace / str(number)).write_bytes(bytes([number]) * 500_000)


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (fifo_as_ignore, "ignore"),
        (huge_ignore, "ignore"),
        (deep, "path"),
        (large, "size"),
        (sum_is_large, "size"),
        (many, "files"),
    ],
)
async def test_a_workspace_without_measure_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], None], rule: str
) -> None:
    project = await make_project(tmp_path)
    workspace = await workspace_of(project, tmp_path)
    spoil(workspace)
    try:
        reply, bundle = await project.bundle(workspace, max_bytes=1_000_000, max_files=100)
        assert (bundle, reply.result_commit) == (b"", None)
        assert reply.refused is not None
        assert reply.refused.startswith(f"{rule}: ")
    finally:
        subprocess.run(["rm", "-rf", workspace], check=True)


async def test_names_that_only_the_import_refuses_are_refused_there(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    for name, field in ((b".GIT", "fsck"), (b"bell\x07", "path"), (b"\xff", "path")):
        workspace = await project.unpack(Path(tempfile.mkdtemp(dir=tmp_path)))
        with open(os.fsencode(workspace) + b"/" + name, "wb"):
            pass
        reply, bundle = await project.bundle(workspace)
        assert reply.result_commit is not None
        with pytest.raises(RefusedError) as refused:
            await project.take(bundle, reply.result_commit)
        assert refused.value.field == field


NAMES = st.sampled_from(
    ["a", "b", "B", "c.o", "build", "dir", "README", "x y", "ä", "-", ":m", "é*"]
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
RULES = st.sampled_from(
    ["*.o", "!c.o", "/a", "build/", "dir/*", "!dir/b", "**/b", "\\!x", "# x", "é*"]
)
EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), PATHS, st.binary(max_size=20)),
        st.tuples(st.just("run"), PATHS, st.binary(max_size=3)),
        st.tuples(st.just("link"), PATHS, st.sampled_from([b"a", b"dir", b"./b/c"])),
        st.tuples(st.just("remove"), PATHS | st.just("dir/deep") | st.just("second"), st.just(b"")),
        st.tuples(
            st.just("ignore"),
            st.sampled_from(["", "dir/", "a/", "dir/a/"]),
            st.lists(RULES, max_size=3).map(lambda rules: "\n".join(rules).encode()),
        ),
    ),
    max_size=12,
)


def apply(workspace: Path, kind: str, name: str, content: bytes) -> None:
    path = workspace / (name + ".gitignore" if kind == "ignore" else name)
    for parent in reversed(path.relative_to(workspace).parents):
        at = workspace / parent
        if at.is_symlink() or (at.exists() and not at.is_dir()):
            at.unlink()
        at.mkdir(exist_ok=True)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    if kind == "link":
        path.symlink_to(os.fsdecode(content))
    elif kind != "remove":
        path.write_bytes(content)
        path.chmod(0o755 if kind == "run" else 0o644)


@pytest.fixture(scope="module", params=["sha1", "sha256"])
def origin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Project:
    directory = tmp_path_factory.mktemp("origin")
    return anyio.run(functools.partial(make_project, directory, request.param))


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(EDITS)
def test_what_comes_back_is_what_git_sees(
    origin: Project, edits: list[tuple[str, str, bytes]]
) -> None:
    async def round_trip() -> None:
        workspace = await origin.unpack(scratch / "workspace")
        for edit in edits:
            apply(workspace, *edit)
        try:
            taken = await taken_tree(project, workspace)
        except RefusedError as refused:
            if refused.field not in ("symlink", "duplicate"):  # a loop, or b beside a link B
                raise
            return
        assert taken == as_git_sees_it(workspace)

    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        store = scratch / "repositories" / "project.git"
        shutil.copytree(origin.store, store)
        project = Project(origin.clone, store, origin.commit)
        anyio.run(round_trip)
