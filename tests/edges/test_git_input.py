"""Commits come out of an operator's clone that is only read, and that can run nothing."""

from __future__ import annotations

import os
import shutil
import tarfile
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from git_parts import Project, git, make_clone, make_project, on_disk, word
from hostile_bundles import EXECUTABLE, FILE, GITLINK, LINK, TREE, Forge

from forge_core import tree_rules
from forge_core.errors import RefusedError
from forge_edges.git import Repository, remove_leftovers, tree_listing
from forge_edges.git_input import ensure_commit
from forge_edges.git_stores import GitStores

Make = Callable[[Path, Path], Path]


def as_it_is(clone: Path, _: Path) -> Path:
    return clone


def bare(clone: Path, elsewhere: Path) -> Path:
    git(clone, "clone", "-q", "--bare", str(clone), str(elsewhere / "bare"))
    return elsewhere / "bare"


def worktree(clone: Path, elsewhere: Path) -> Path:
    git(clone, "worktree", "add", "-q", str(elsewhere / "tree"))
    return elsewhere / "tree"


def shared(clone: Path, elsewhere: Path) -> Path:
    git(clone, "clone", "-q", "--shared", str(clone), str(elsewhere / "shared: a\"b'"))
    return elsewhere / "shared: a\"b'"


def shallow(clone: Path, elsewhere: Path) -> Path:
    git(clone, "clone", "-q", "--depth=1", f"file://{clone}", str(elsewhere / "shallow"))
    return elsewhere / "shallow"


def packed(clone: Path, _: Path) -> Path:
    git(clone, "gc", "-q", "--aggressive")
    git(clone, "commit-graph", "write", "--reachable")
    git(clone, "multi-pack-index", "write")
    return clone


@pytest.mark.parametrize("object_format", ["sha1", "sha256"])
@pytest.mark.parametrize("make", [as_it_is, bare, worktree, shared, shallow, packed])
@pytest.mark.requirement("B-52")
async def test_a_commit_comes_from_any_kind_of_clone(
    tmp_path: Path, make: Make, object_format: str
) -> None:
    original = make_clone(tmp_path / "original", object_format)
    clone = make(original, tmp_path)
    commit = word(clone, "rev-parse", "HEAD")
    before = on_disk(tmp_path)
    store = tmp_path / "state" / "repositories" / "project.git"
    await ensure_commit(clone, store, commit)
    shutil.move(tmp_path / "state", tmp_path.parent / f"{tmp_path.name}-state")
    assert on_disk(tmp_path) == before, "the clone was only read"
    shutil.move(tmp_path.parent / f"{tmp_path.name}-state", tmp_path / "state")
    shutil.rmtree(original)
    assert word(store, "rev-list", "--count", commit) == "1"
    git(store, "fsck", "--full")


@pytest.mark.requirement("B-52")
async def test_a_hostile_clone_runs_nothing(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    canary = tmp_path / "canary"
    evil = tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {canary}\nexit 1\n")
    evil.chmod(0o755)
    for hook in ("post-checkout", "pre-auto-gc", "reference-transaction", "fsmonitor-watchman"):
        shutil.copy(evil, clone / ".git/hooks" / hook)
    for key in (
        *("core.fsmonitor", "core.sshCommand", "core.gitProxy", "core.alternateRefsCommand"),
        *("core.pager", "core.editor", "core.askPass", "credential.helper", "diff.external"),
        *("uploadpack.packObjectsHook", "filter.evil.clean", "filter.evil.smudge"),
        *("filter.evil.process", "gpg.program", "remote.origin.uploadpack", "remote.origin.vcs"),
    ):
        git(clone, "config", key, str(evil))
    git(clone, "config", "extensions.partialClone", "origin")
    (clone / ".git/info/attributes").write_text("* filter=evil\n")
    commit = word(clone, "rev-parse", "main")
    git(clone, "config", "include.path", "/dev/full")
    store = tmp_path / "state" / "repositories" / "project.git"
    before = on_disk(clone)
    await ensure_commit(clone, store, commit)
    await Project(clone, store, commit).archive()
    with pytest.raises(RefusedError):
        await ensure_commit(clone, store, "1" * 40)
    assert not canary.exists()
    assert on_disk(clone) == before


@pytest.mark.requirement("B-52")
async def test_replace_refs_and_grafts_have_no_say(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    commit, blob, other = word(clone, "rev-parse", "HEAD", "HEAD:second", "HEAD:README").split()
    git(clone, "replace", blob, other)
    git(clone, "replace", commit, f"{commit}^")
    (clone / ".git/info/grafts").write_text(f"{commit} {commit}\n")
    project = Project(clone, tmp_path / "r" / "p.git", commit)
    await ensure_commit(clone, project.store, commit)
    workspace = await project.unpack(tmp_path / "workspace")
    assert (workspace / "second").read_text() == "2\n"


@pytest.mark.requirement("B-61")
async def test_what_the_clone_lacks_is_fetched_from_its_origin(tmp_path: Path) -> None:
    origin = make_clone(tmp_path / "origin")
    clone = shallow(origin, tmp_path)
    older = word(origin, "rev-parse", "HEAD^")
    before = on_disk(clone)
    store = tmp_path / "r" / "p.git"
    await ensure_commit(clone, store, older)
    assert on_disk(clone) == before
    assert word(store, "rev-list", older) == older
    shutil.rmtree(origin)
    await ensure_commit(clone, store, older)


@pytest.mark.requirement("B-61")
async def test_the_operators_configuration_serves_that_one_fetch(tmp_path: Path) -> None:
    origin = make_clone(tmp_path / "origin")
    clone = shallow(origin, tmp_path)
    older = word(origin, "rev-parse", "HEAD^")
    git(clone, "config", "remote.origin.url", "https://user:hunter2@forge.invalid/p.git")
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "http_proxy": "", "https_proxy": ""}
    store = tmp_path / "r" / "p.git"
    with pytest.raises(RefusedError) as refused:
        await ensure_commit(clone, store, older, operator_environment=environment)
    assert refused.value.code == "workspace_invalid"
    assert "hunter2" not in str(refused.value)
    for bad in ("file:///nowhere/https://user:hunter2@x", "ftp://user:hunter2@forge.invalid/p.git"):
        git(clone, "config", "remote.origin.url", bad)
        with pytest.raises(RefusedError, match="its origin did not give it") as refused:
            await ensure_commit(clone, store, older, operator_environment=environment)
        assert "hunter2" not in str(refused.value)
    git(clone, "config", "remote.origin.url", "https://user:hunter2@forge.invalid/p.git")
    key = f"url.file://{origin}.insteadOf"
    git(home, "config", "--file", ".gitconfig", key, "https://user:hunter2@forge.invalid/p.git")
    await ensure_commit(clone, store, older, operator_environment=environment)


@pytest.mark.requirement("B-52")
@pytest.mark.parametrize(
    "commit",
    ["", "HEAD", "main", "abc1234", "A" * 40, "1" * 39, "--all", "1" * 40 + "\n", "1" * 64],
)
async def test_only_a_full_id_that_exists_will_do(tmp_path: Path, commit: str) -> None:
    clone = make_clone(tmp_path / "clone")
    with pytest.raises(RefusedError) as refused:
        await ensure_commit(clone, tmp_path / "r" / "p.git", commit)
    assert refused.value.code == "workspace_invalid"


@pytest.mark.requirement("B-52")
async def test_a_clone_with_holes_is_refused_and_named(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    commit = word(clone, "rev-parse", "HEAD")
    tree = word(clone, "rev-parse", "HEAD^{tree}")
    blob = word(clone, "rev-parse", "HEAD:dir/deep/file")
    store = tmp_path / "r" / "p.git"
    with pytest.raises(RefusedError, match="cannot prepare commit"):
        await ensure_commit(clone, store, tree)
    loose = clone / ".git/objects" / blob[:2] / blob[2:]
    loose.chmod(0o644)
    loose.write_bytes(zlib.compress(b"blob 5\0rotte"))
    with pytest.raises(RefusedError, match="its origin did not give it"):
        await ensure_commit(clone, store, commit)
    loose.unlink()
    with pytest.raises(RefusedError, match="its origin did not give it"):
        await ensure_commit(clone, store, commit)
    assert word(store, "for-each-ref") == ""
    with pytest.raises(RefusedError, match="there is no directory"):
        await ensure_commit(tmp_path / "nowhere", store, commit)


@pytest.mark.requirement("B-61")
async def test_the_next_input_costs_what_it_changes(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    (clone / "large").write_bytes(os.urandom(1 << 20))
    git(clone, "add", "large")
    git(clone, "commit", "-qm", "large")
    store = tmp_path / "r" / "p.git"
    await ensure_commit(clone, store, word(clone, "rev-parse", "HEAD"))
    (clone / "small").write_text("x")
    git(clone, "add", "small")
    git(clone, "commit", "-qm", "small")
    await ensure_commit(clone, store, word(clone, "rev-parse", "HEAD"))
    sizes = sorted(pack.stat().st_size for pack in (store / "objects/pack").glob("*.pack"))
    assert sizes[0] < 2000 < 1 << 20 < sizes[1]
    git(store, "fsck", "--full")


@pytest.mark.parametrize("object_format", ["sha1", "sha256"])
@pytest.mark.requirement("B-52")
async def test_a_workspace_is_the_exact_tree_and_a_clean_clone(
    tmp_path: Path, object_format: str
) -> None:
    project = await make_project(tmp_path, object_format)
    workspace = await project.unpack(tmp_path / "workspace")
    assert (workspace / "README").read_bytes() == b"$Id$ $Format:%H$\n"
    assert (workspace / "dir/inner").exists(), "export-ignore has no say"
    assert os.access(workspace / "dir/run", os.X_OK)
    assert not os.access(workspace / "dir/inner", os.X_OK)
    assert (workspace / "link").readlink() == Path("dir/inner")
    assert (workspace / "dir/absolute").readlink() == Path("/dev/null")
    assert list((workspace / "module").iterdir()) == []
    assert word(workspace, "status", "--porcelain", "--ignored") == ""
    assert word(workspace, "rev-list", "--all") == project.commit
    assert word(workspace, "remote") == ""
    git(workspace, "fsck", "--full", "--strict")
    assert sorted(p.name for p in (workspace / ".git").iterdir()) == [
        *("HEAD", "config", "index", "objects", "refs", "shallow")
    ]


@pytest.mark.requirement("B-52")
async def test_a_workspace_belongs_to_its_user_and_begins_with_its_root(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    stores = GitStores(project.store.parent, {"project": project.clone})
    await stores.ensure_commit("project", project.commit)
    chunks = stores.workspace_archive("project", project.commit, uid=1000, gid=1001)
    archive = BytesIO(b"".join([chunk async for chunk in chunks]))
    with tarfile.open(fileobj=archive) as tar:
        members = tar.getmembers()
    assert {(member.uid, member.gid) for member in members} == {(1000, 1001)}
    assert (members[0].name, members[0].isdir(), members[0].mode) == (".", True, 0o755)
    assert {member.mtime for member in members} == {1_700_000_000}
    kinds = [member.issym() for member in members]
    assert kinds == sorted(kinds), "links come last"
    with pytest.raises(RefusedError, match="register it with add-repo"):
        await stores.ensure_commit("other", project.commit)


@pytest.mark.requirement("B-52")
async def test_an_input_tree_that_leaves_its_directory_is_refused(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    forge = Forge(project.clone, project.commit)
    blob = forge.blob(b"x")
    inner = forge.tree([(FILE, b"config", blob)])
    rows = (
        *((FILE, b"..", blob), (FILE, b"../x", blob), (TREE, b".git", inner), (FILE, b".", blob)),
        *((TREE, b"GIT~1", inner), (FILE, b"", blob), (TREE, b".g\xe2\x80\x8cit", inner)),
        *((EXECUTABLE, b"/abs", blob), (LINK, b".git", blob), (GITLINK, b".git", "1" * 40)),
    )
    for row in rows:
        commit = forge.commit(forge.with_row(*row))
        with pytest.raises(RefusedError, match=r"cannot use commit|empty filename") as refused:
            await _bring(project, commit)
        assert refused.value.code == "workspace_invalid", row
    twice = [*forge.rows, (LINK, b"zz", forge.blob(b"/etc")), (TREE, b"zz", inner)]
    commit = forge.commit(forge.tree(twice, sort=False))
    await ensure_commit(project.clone, project.store, commit)
    with pytest.raises(RefusedError, match="zz"):
        await Project(project.clone, project.store, commit).archive()


async def _bring(project: Project, commit: str) -> None:
    await ensure_commit(project.clone, project.store, commit)
    await Project(project.clone, project.store, commit).archive()


@pytest.mark.requirement("B-52")
async def test_a_workspace_has_limits(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    with pytest.raises(RefusedError, match="bytes, 10 are allowed"):
        await project.archive(max_bytes=10)
    with pytest.raises(RefusedError, match="entries, 5 are allowed"):
        await project.archive(max_entries=5)
    with pytest.raises(RefusedError, match="cannot read commit"):
        await Project(project.clone, project.store, "1" * 40).archive()


@pytest.mark.requirement("B-52")
async def test_a_tree_of_few_objects_and_millions_of_paths_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = await make_project(tmp_path)
    forge = Forge(project.clone, project.commit)
    tree = forge.tree((FILE, b"%02d" % n, forge.blob(b"x")) for n in range(20))
    for _ in range(3):
        tree = forge.tree((TREE, b"%02d" % n, tree) for n in range(20))
    bomb = Project(project.clone, project.store, forge.commit(tree))
    await ensure_commit(project.clone, project.store, bomb.commit)
    monkeypatch.setattr(tree_rules, "TreeEntry", None)  # not one may be made
    with pytest.raises(RefusedError, match="168420 entries, 1000 are allowed") as refused:
        await bomb.archive(max_entries=1_000)
    assert refused.value.code == "workspace_invalid"
    monkeypatch.setattr(tree_rules.need_few_entries, "__defaults__", (1_000,))
    with pytest.raises(RefusedError, match="168420 entries, 1000 are allowed") as refused:
        await tree_listing(project.store, bomb.commit)
    assert refused.value.code == "workspace_invalid"


@pytest.mark.requirement("B-52")
async def test_a_link_whose_target_is_a_large_blob_is_refused_unread(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    forge = Forge(project.clone, project.commit)
    for target in (b"x" * 4096, b""):
        commit = forge.commit(forge.with_row(LINK, b"link", forge.blob(target)))
        await ensure_commit(project.clone, project.store, commit)
        with pytest.raises(RefusedError, match='"link" has an empty or over-long target'):
            await Project(project.clone, project.store, commit).archive()


@pytest.mark.requirement("B-52")
async def test_an_archive_that_is_not_read_to_its_end_leaves_nothing(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    (clone / "large").write_bytes(os.urandom(4 << 20))
    git(clone, "add", "large")
    git(clone, "commit", "-qm", "large")
    commit = word(clone, "rev-parse", "HEAD")
    project = Project(clone, tmp_path / "r" / "p.git", commit)
    await ensure_commit(clone, project.store, commit)
    stores = GitStores(project.store.parent, {})
    chunks = stores.workspace_archive("p", commit, uid=0, gid=0)
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        assert len(chunk) <= 1 << 19
        if size > 5 << 20:
            break
    await chunks.aclose()
    assert list((project.store.parent / ".quarantine").iterdir()) == []


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    for name in (".quarantine/x/repository.git", ".creating-y", "project.git"):
        (tmp_path / name).mkdir(parents=True)
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["project.git"]


def test_git_gets_no_variable_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_DIR", "/elsewhere")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "/bin/false")
    monkeypatch.setenv("FORGE_API_TOKEN", "secret")
    environment = Repository(tmp_path).environment()
    assert "secret" not in environment.values()
    assert not {"GIT_DIR", "GIT_EXTERNAL_DIFF"} & environment.keys()
