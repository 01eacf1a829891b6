"""Files and build contexts are what the approved commit has, whatever else a repository says."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import threading
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import from_thread
from git_parts import Project, git, make_clone, make_project, on_disk, word
from hostile_bundles import FILE, GITLINK, LINK, TREE, Forge

from forge_bridge.images import recipe
from forge_bridge.images.recipe import Approved
from forge_core.contract import Contract
from forge_core.dockerfile import DockerfileAnalysis
from forge_core.dockerignore import Ignore
from forge_core.errors import RefusedError
from forge_edges.git_input import ensure_commit
from forge_edges.git_stores import GitStores
from forge_edges.tree_archive import CHUNK_BYTES

pytestmark = pytest.mark.requirement("B-52")

README = b"$Id$ $Format:%H$\n"
DOCKERFILE = ".forge/Dockerfile"
MIB = 1 << 20


def stores_of(project: Project) -> GitStores:
    return GitStores(project.store.parent, {"project": project.clone})


async def read(project: Project, path: str, max_bytes: int = MIB) -> bytes | None:
    return await stores_of(project).read_file("project", project.commit, path, max_bytes)


async def context(project: Project, rules: str | None = None, max_bytes: int = MIB) -> bytes:
    ignore = None if rules is None else Ignore.parse(rules.encode())
    chunks = stores_of(project).build_context(
        "project", project.commit, ignore=ignore, max_bytes=max_bytes
    )
    return b"".join([chunk async for chunk in chunks])


def names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return sorted(tar.getnames())


def contents(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = [member for member in tar.getmembers() if member.isfile()]
        return {m.name: read.read() for m in files if (read := tar.extractfile(m)) is not None}


async def with_dockerfile(directory: Path, object_format: str = "sha1") -> Project:
    clone = make_clone(directory / "clone", object_format)
    (clone / ".forge").mkdir()
    (clone / DOCKERFILE).write_text("FROM scratch\n")
    (clone / ".dockerignore").write_text("link\n")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "three")
    project = Project(clone, directory / "state" / "project.git", word(clone, "rev-parse", "HEAD"))
    await ensure_commit(clone, project.store, project.commit)
    return project


# what a hostile or careless clone says, each before the commit is taken in


def working_tree(clone: Path) -> None:
    (clone / "README").write_text("changed after approval\n")
    (clone / "untracked").write_text("x")
    shutil.rmtree(clone / "dir")


def index(clone: Path) -> None:
    other = word(clone, "hash-object", "-w", "--stdin", data=b"staged\n")
    git(clone, "update-index", "--cacheinfo", f"100644,{other},README")
    git(clone, "update-index", "--add", "--cacheinfo", f"100644,{other},staged")
    git(clone, "update-index", "--assume-unchanged", "second")
    git(clone, "update-index", "--skip-worktree", "dir/inner")
    git(clone, "rm", "-q", "--cached", "dir/run")


def filters(clone: Path) -> None:
    program = clone.parent / "filter"
    program.write_text(f"#!/bin/sh\ntouch {clone.parent}/canary\necho smudged\n")
    program.chmod(0o755)
    for key in ("clean", "smudge", "process"):
        git(clone, "config", f"filter.evil.{key}", str(program))
    for key in ("textconv", "command"):
        git(clone, "config", f"diff.evil.{key}", str(program))
    (clone / ".git/info/attributes").write_text(
        "* filter=evil diff=evil working-tree-encoding=UTF-16 text eol=crlf ident export-subst\n"
        "second export-ignore\n"
    )
    git(clone, "config", "core.autocrlf", "true")
    git(clone, "config", "core.symlinks", "false")
    git(clone, "config", "core.attributesFile", str(clone / ".git/info/attributes"))


def replace_refs(clone: Path) -> None:
    blob = word(clone, "rev-parse", "HEAD:README")
    other = word(clone, "hash-object", "-w", "--stdin", data=b"replaced\n")
    git(clone, "replace", blob, other)
    git(clone, "replace", "HEAD", "HEAD^")


def graft(clone: Path) -> None:
    (clone / ".git/info/grafts").write_text(f"{word(clone, 'rev-parse', 'HEAD')}\n")


def alternates(clone: Path) -> None:
    """Every object comes from elsewhere, and one of them lies there in two versions."""
    elsewhere = clone.parent / "elsewhere"
    shutil.move(clone / ".git/objects", elsewhere)
    for name in ("info", "pack"):
        (clone / ".git/objects" / name).mkdir(parents=True)
    (clone / ".git/objects/info/alternates").write_text(f"{elsewhere}\n/nowhere\n")


def export_rules(clone: Path) -> None:
    """Nothing more: the clone's own .gitattributes has export-subst, export-ignore and eol."""
    assert b"export-ignore" in git(clone, "show", "HEAD:.gitattributes")


def packed(clone: Path) -> None:
    git(clone, "gc", "-q", "--aggressive")


TRICKS = [
    *(working_tree, index, filters, replace_refs, graft, alternates, export_rules, packed),
]


async def test_a_context_comes_in_chunks_whatever_is_in_it(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    forge = Forge(project.clone, project.commit)
    blob = forge.blob(b"")
    target = forge.blob(b"README")
    inner = forge.tree([(FILE, b"file", blob)])
    for mode, what in ((TREE, inner), (FILE, blob), (LINK, target)):
        many = forge.tree([(mode, b"%05d" % number, what) for number in range(2_000)])
        commit = forge.commit(forge.with_row(TREE, b"many", many))
        await ensure_commit(project.clone, project.store, commit)
        chunks = stores_of(project).build_context("project", commit, ignore=None, max_bytes=MIB)
        sizes = [len(chunk) async for chunk in chunks]
        assert sum(sizes) > 2_000 * 512
        assert min(sizes) > 0
        assert max(sizes) < 2 * CHUNK_BYTES


@pytest.mark.parametrize("object_format", ["sha1", "sha256"])
async def test_a_context_is_the_commit_byte_for_byte(tmp_path: Path, object_format: str) -> None:
    project = await with_dockerfile(tmp_path, object_format)
    archive = await context(project)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = {member.name: member for member in tar.getmembers()}
        order = [member.issym() for member in tar.getmembers()]
    tracked = git(project.clone, "ls-tree", "-r", "-t", "-z", "--name-only", "HEAD").split(b"\0")
    assert sorted(members) == sorted(path.decode() for path in tracked[:-1])
    assert {(m.uid, m.gid, m.mtime, m.uname, m.gname) for m in members.values()} == {
        (0, 0, 0, "", "")
    }
    modes = {"dir/run": 0o755, "README": 0o644, "dir": 0o755, "module": 0o755}
    assert {name: members[name].mode for name in modes} == modes
    assert members["module"].isdir()
    assert (members["link"].linkname, members["dir/absolute"].linkname) == (
        "dir/inner",
        "/dev/null",
    )
    assert order == sorted(order), "links come last"
    for path, content in contents(archive).items():
        assert content == git(project.clone, "cat-file", "blob", f"HEAD:{path}")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("trick", TRICKS)
async def test_only_the_commit_has_a_say(
    tmp_path: Path, trick: Callable[[Path], None], when: str
) -> None:
    honest = await with_dockerfile(tmp_path / "honest")
    expected = await context(honest)
    clone = tmp_path / "hostile" / "clone"
    shutil.copytree(honest.clone, clone, symlinks=True)
    project = Project(clone, tmp_path / "hostile" / "state" / "project.git", honest.commit)
    if when == "before":
        trick(clone)
    before = on_disk(clone)
    await ensure_commit(clone, project.store, project.commit)
    if when == "after":
        trick(clone)
        before = on_disk(clone)
    assert await context(project) == expected
    assert await read(project, "README") == README
    assert await read(project, "second") == b"2\n"
    assert await stores_of(project).tree_id("project", project.commit) == word(
        honest.clone, "rev-parse", "HEAD^{tree}"
    )
    assert on_disk(clone) == before, "the clone was only read"
    assert not (clone.parent / "canary").exists()


async def test_replace_refs_and_attributes_have_no_say_in_a_store_either(tmp_path: Path) -> None:
    project = await with_dockerfile(tmp_path)
    expected = await context(project)
    for trick in (replace_refs, graft):
        (project.store / "info").mkdir(exist_ok=True)
        bare = project.store.parent / "link"
        bare.mkdir(exist_ok=True)
        if not (bare / ".git").is_symlink():
            (bare / ".git").symlink_to(project.store)
        git(project.store, "update-ref", "refs/heads/none", project.commit)
        if trick is replace_refs:
            other = word(project.store, "hash-object", "-w", "--stdin", data=b"replaced\n")
            git(project.store, "replace", word(project.store, "rev-parse", "HEAD:README"), other)
        else:
            trick(bare)
    (project.store / "info/attributes").write_text("* text eol=crlf export-ignore filter=x\n")
    assert git(project.store, "cat-file", "blob", "HEAD:README") == b"replaced\n"
    assert await context(project) == expected
    assert await read(project, "README") == README


async def test_the_same_tree_gives_the_same_bytes(tmp_path: Path) -> None:
    project = await with_dockerfile(tmp_path)
    first = await context(project)
    git(project.store, "repack", "-q", "-a", "-d", "-f")
    assert await context(project) == first
    later = word(
        project.clone,
        "commit-tree",
        "-m",
        "another day",
        "-p",
        "HEAD",
        f"{project.commit}^{{tree}}",
    )
    await ensure_commit(project.clone, project.store, later)
    again = Project(project.clone, project.store, later)
    assert await context(again) == first
    stores = stores_of(project)
    assert await stores.tree_id("project", later) == await stores.tree_id("project", project.commit)


async def test_ignored_files_stay_out_and_their_directories_with_them(tmp_path: Path) -> None:
    project = await with_dockerfile(tmp_path)
    everything = names(await context(project))
    assert names(await context(project, "")) == everything
    assert names(await context(project, "dir\nlink\nmodule\n")) == [
        name for name in everything if name.split("/")[0] not in ("dir", "link", "module")
    ]
    assert names(await context(project, "*\n!dir/deep/file\n")) == [
        *(".forge", DOCKERFILE, "dir", "dir/deep", "dir/deep/file")
    ]
    assert names(await context(project, "**\n.forge\n")) == [".forge", DOCKERFILE]
    assert names(await context(project, "dir/*\n!dir/run")) == [
        name for name in everything if not name.startswith("dir/") or name == "dir/run"
    ]


async def test_a_context_has_limits(tmp_path: Path) -> None:
    project = await with_dockerfile(tmp_path)
    (project.clone / "large").write_bytes(os.urandom(MIB))
    git(project.clone, "add", "large")
    git(project.clone, "commit", "-qm", "large")
    project = Project(project.clone, project.store, word(project.clone, "rev-parse", "HEAD"))
    await ensure_commit(project.clone, project.store, project.commit)
    with pytest.raises(RefusedError, match=r"bytes, 1048576 are allowed") as refused:
        await context(project)
    assert refused.value.code == "workspace_invalid"
    assert ".dockerignore" in str(refused.value)
    assert "large" not in names(await context(project, "large"))
    few = GitStores(project.store.parent, {}, max_workspace_entries=3)
    with pytest.raises(RefusedError, match=r"entries, 3 are allowed"):
        await anext(
            aiter(few.build_context("project", project.commit, ignore=None, max_bytes=9 * MIB))
        )
    with pytest.raises(RefusedError, match="cannot read commit"):
        await context(Project(project.clone, project.store, "1" * 40))


async def test_a_context_that_is_not_read_to_its_end_leaves_nothing(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    (clone / "large").write_bytes(os.urandom(4 * MIB))
    git(clone, "add", "large")
    git(clone, "commit", "-qm", "large")
    project = Project(clone, tmp_path / "r" / "project.git", word(clone, "rev-parse", "HEAD"))
    await ensure_commit(clone, project.store, project.commit)
    before = on_disk(tmp_path / "r")
    chunks = stores_of(project).build_context(
        "project", project.commit, ignore=None, max_bytes=9 * MIB
    )
    async with aclosing(chunks):
        assert len(await anext(aiter(chunks))) < MIB
    assert on_disk(tmp_path / "r") == before


async def test_no_thread_goes_on_judging_paths_for_an_attempt_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = await with_dockerfile(tmp_path)
    stores = stores_of(project)
    contract = Contract.model_validate({"version": 1, "image": {"dockerfile": DOCKERFILE}})
    approved = Approved("project", project.commit, contract, b"")
    monkeypatch.setattr(recipe, "analyse_dockerfile", lambda _: DockerfileAnalysis(()))
    for work in partial(context, project, "*x"), partial(recipe.recipe_of, stores, approved):
        asked: list[str] = []
        begun, ended = anyio.Event(), threading.Event()

        def excludes(
            _: Ignore,
            path: str,
            asked: list[str] = asked,
            begun: anyio.Event = begun,
            ended: threading.Event = ended,
        ) -> bool:
            asked.append(path)
            from_thread.run_sync(begun.set)
            assert ended.wait(30)
            return False

        monkeypatch.setattr(Ignore, "excludes", excludes)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await begun.wait()
            tasks.cancel_scope.cancel()
            ended.set()
        assert len(asked) == 1


async def test_a_tree_that_leaves_its_directory_is_no_context(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    forge = Forge(project.clone, project.commit)
    blob = forge.blob(b"x")
    inner = forge.tree([(FILE, b"config", blob)])
    for row in ((FILE, b"..", blob), (TREE, b".GIT", inner), (LINK, b".git", blob)):
        commit = forge.commit(forge.with_row(*row))
        await ensure_commit(project.clone, project.store, commit)
        with pytest.raises(RefusedError, match="cannot use commit") as refused:
            await context(Project(project.clone, project.store, commit), "**")
        assert refused.value.code == "workspace_invalid"


@pytest.mark.parametrize("object_format", ["sha1", "sha256"])
async def test_a_file_is_its_blob(tmp_path: Path, object_format: str) -> None:
    project = await with_dockerfile(tmp_path, object_format)
    assert await read(project, DOCKERFILE) == b"FROM scratch\n"
    assert await read(project, "dir/run") == b"#!/bin/sh\n"
    assert await read(project, "README", len(README)) == README
    for path in (
        "nothing",
        ".forge/nothing",
        "nothing/at/all",
        "README*",
        ":(top)README",
        "DIR/run",
    ):
        assert await read(project, path) is None, path


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("dir", 'cannot read "dir" of commit .*: it is a directory'),
        ("link", "it is a symbolic link"),
        ("module", "it is a submodule"),
        ("link/file", '"link" of commit .*: it is a symbolic link'),
        ("module/file", '"module" .*: it is a submodule'),
        ("README/file", '"README" .*: it is a file'),
        ("README", "17 bytes, 16 are allowed"),
        ("../README", r"has an empty, '\.' or '\.\.' component"),
        ("/README", "component"),
        (".git/config", "takes for .git"),
        ("a\0b", "has a NUL"),
    ],
)
async def test_what_is_no_plain_file_is_refused(tmp_path: Path, path: str, why: str) -> None:
    project = await make_project(tmp_path)
    with pytest.raises(RefusedError, match=why) as refused:
        await read(project, path, 16)
    assert refused.value.code == "workspace_invalid"


async def test_a_file_is_found_among_many(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    forge = Forge(project.clone, project.commit)
    blob = forge.blob(b"x")
    inner = forge.tree([(FILE, b"%05d" % number, blob) for number in range(30_000)])
    commit = forge.commit(forge.with_row(TREE, b".forge", inner))
    await ensure_commit(project.clone, project.store, commit)
    many = Project(project.clone, project.store, commit)
    assert await read(many, ".forge/29999", 1) == b"x"
    assert await read(many, ".forge/30000") is None


@pytest.mark.parametrize("name", ["HEAD", "main", "--all", "", "f" * 39])
async def test_nothing_but_a_full_id_names_a_commit(tmp_path: Path, name: str) -> None:
    project = await make_project(tmp_path)
    git(project.store, "update-ref", "HEAD", project.commit)
    git(project.store, "update-ref", "refs/heads/main", project.commit)
    named = Project(project.clone, project.store, name)
    with pytest.raises(RefusedError, match="not a full object id"):
        await read(named, "README")
    with pytest.raises(RefusedError, match="not a full object id"):
        await context(named)
    with pytest.raises(RefusedError, match="not a full object id"):
        await stores_of(named).tree_id("project", name)


async def test_no_commit_no_file(tmp_path: Path) -> None:
    project = await make_project(tmp_path)
    nothing = Project(project.clone, project.store, "1" * 40)
    with pytest.raises(RefusedError, match="cannot read commit 1111") as refused:
        await read(nothing, "README")
    assert refused.value.code == "workspace_invalid"
    with pytest.raises(RefusedError, match="cannot read commit 1111"):
        await stores_of(nothing).tree_id("project", nothing.commit)


async def test_a_link_above_a_file_leads_nowhere(tmp_path: Path) -> None:
    """``.forge`` as a link to a directory that has a Dockerfile: the kernel would follow it."""
    project = await with_dockerfile(tmp_path)
    git(project.clone, "mv", ".forge", "elsewhere")
    (project.clone / ".forge").symlink_to("elsewhere")
    git(project.clone, "add", "-A")
    git(project.clone, "commit", "-qm", "link")
    assert (project.clone / DOCKERFILE).read_text() == "FROM scratch\n"
    linked = Project(project.clone, project.store, word(project.clone, "rev-parse", "HEAD"))
    await ensure_commit(linked.clone, linked.store, linked.commit)
    with pytest.raises(RefusedError, match=r'"\.forge" of commit .* it is a symbolic link'):
        await read(linked, DOCKERFILE)
    forge = Forge(project.clone, project.commit)
    commit = forge.commit(forge.with_row(GITLINK, b".forge", "1" * 40))
    await ensure_commit(project.clone, project.store, commit)
    with pytest.raises(RefusedError, match="it is a submodule"):
        await read(Project(project.clone, project.store, commit), DOCKERFILE)


async def test_several_files_are_read_as_each_alone(tmp_path: Path) -> None:
    project = await with_dockerfile(tmp_path)
    absent = (".forge/none", "none", "none/at/all")
    there = (DOCKERFILE, ".dockerignore", "README")
    bounds = dict.fromkeys((*there, *absent), MIB)
    found = await stores_of(project).read_files("project", project.commit, bounds)
    assert list(found) == list(bounds)
    assert found == {path: await read(project, path) for path in bounds}
    assert all(found[path] is None for path in absent)
    assert all(found[path] for path in there)


async def test_one_file_that_cannot_be_read_is_named_among_many(tmp_path: Path) -> None:
    project = await with_dockerfile(tmp_path)
    bounds = {DOCKERFILE: MIB, ".dockerignore": 1}
    with pytest.raises(RefusedError, match=r"dockerignore.* 1 are allowed") as refused:
        await stores_of(project).read_files("project", project.commit, bounds)
    assert refused.value.code == "workspace_invalid"
