"""Hostile bundles are refused by name and leave the store as it was; good ones come in whole."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest
from git_parts import REF, Project, git, make_project, on_disk, word
from hostile_bundles import FILE, Forge, corpus

from forge_core.errors import DiskUnusable, RefusedError
from forge_edges.git_import import ImportLimits, import_bundle
from forge_edges.git_input import ensure_commit
from needs import tmpfs

LIMITS = ImportLimits(
    bundle_bytes=4 << 20,
    object_bytes=4 << 20,
    inflated_bytes=6 << 20,
    objects=1000,
    files=100,
    timeout_ms=30_000,
)


@pytest.fixture
async def project(tmp_path: Path) -> Project:
    return await make_project(tmp_path)


@pytest.mark.requirement("B-61")
async def test_every_hostile_bundle_is_refused_by_name_and_changes_nothing(
    project: Project,
) -> None:
    older = word(project.clone, "rev-parse", f"{project.commit}^")
    await ensure_commit(project.clone, project.store, older)  # a parent that could be had
    before = on_disk(project.store)
    surprises: list[tuple[object, ...]] = []
    for hostile in corpus(project.clone, project.commit):
        try:
            await project.take(hostile.bundle, hostile.claimed, LIMITS)
            surprises.append((hostile.name, "accepted", sorted(hostile.fields)))
        except RefusedError as error:
            if error.code != "output_invalid" or error.field not in hostile.fields:
                surprises.append((hostile.name, error.field, str(error)[-120:]))
    assert surprises == [], "\n".join(map(str, surprises))
    assert on_disk(project.store) == before
    assert list((project.store.parent / ".quarantine").iterdir()) == []


@pytest.mark.requirement("B-61")
async def test_a_bundle_of_git_itself_is_accepted(project: Project) -> None:
    work = project.clone
    (work / "dir/inner").write_text("changed\n")
    (work / "dir/new").symlink_to("deep/../inner")
    (work / "second").unlink()
    git(work, "add", "-A")
    git(work, "commit", "-qm", "three")
    git(work, "update-ref", REF, "HEAD")
    git(work, "bundle", "create", "-q", "../bundle", REF, f"^{project.commit}")
    result = word(work, "rev-parse", "HEAD")
    bundle = (work.parent / "bundle").read_bytes()
    output = await project.take(bundle, result, LIMITS)
    assert (output.result_commit, output.files, output.size_bytes) == (result, 3, 8 + 13)
    assert word(project.store, "rev-parse", REF) == result
    assert word(project.store, "log", "--format=%H", REF).split() == [result, project.commit]
    git(project.store, "fsck", "--strict", "--full")
    assert await project.take(bundle, result, LIMITS) == output, "a second time changes nothing"


@pytest.mark.requirement("B-61")
async def test_objects_that_the_commit_does_not_reach_stay_behind(project: Project) -> None:
    forge = Forge(project.clone, project.commit)
    result = forge.commit(forge.with_row(FILE, b"new", forge.blob(b"new\n")))
    stowaway = forge.blob(b"stowaway\n")
    await project.take(forge.bundle(result, forge.pack(result, stowaway)), result, LIMITS)
    objects = word(project.store, "cat-file", "--batch-all-objects", "--batch-check")
    assert result in objects
    assert stowaway not in objects


@pytest.mark.requirement("B-61")
async def test_a_ref_is_never_moved(project: Project) -> None:
    forge = Forge(project.clone, project.commit)
    first, second = (
        forge.commit(forge.with_row(FILE, name, forge.blob(name))) for name in (b"a", b"b")
    )
    await project.take(forge.bundle(first), first, LIMITS)
    before = on_disk(project.store)
    with pytest.raises(RefusedError, match="already has another result") as refused:
        await project.take(forge.bundle(second), second, LIMITS)
    assert refused.value.field == "refs"
    assert on_disk(project.store) == before


@pytest.mark.parametrize(
    ("field", "limits"),
    [
        ("size", dataclasses.replace(LIMITS, bundle_bytes=100)),
        ("size", dataclasses.replace(LIMITS, object_bytes=100)),
        ("size", dataclasses.replace(LIMITS, inflated_bytes=200)),
        ("objects", dataclasses.replace(LIMITS, objects=2)),
        ("files", dataclasses.replace(LIMITS, files=0)),
        ("time", dataclasses.replace(LIMITS, timeout_ms=0)),
    ],
)
@pytest.mark.requirement("B-61")
async def test_each_limit_has_its_name(project: Project, field: str, limits: ImportLimits) -> None:
    forge = Forge(project.clone, project.commit)
    result = forge.commit(forge.with_row(FILE, b"new", forge.blob(b"new\n")))
    with pytest.raises(RefusedError) as refused:
        await project.take(forge.bundle(result), result, limits)
    assert refused.value.field == field


@pytest.mark.requirement("B-61")
async def test_what_the_input_already_had_refuses_nothing(tmp_path: Path) -> None:
    """Odd names and absolute links of the input stay, and may be changed in content."""
    project = await make_project(tmp_path)
    forge = Forge(project.clone, project.commit)
    odd = forge.commit(forge.with_row(FILE, b"back\\slash\xff", forge.blob(b"1\n")))
    git(project.clone, "update-ref", "refs/heads/odd", odd)
    await ensure_commit(project.clone, project.store, odd)
    project = dataclasses.replace(project, commit=odd)
    forge = Forge(project.clone, odd)
    result = forge.commit(forge.with_row(FILE, b"back\\slash\xff", forge.blob(b"2\n")))
    output = await project.take(forge.bundle(result), result, LIMITS)
    assert output.files == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of two mebibytes."""
    with tmpfs(tmp_path / "disk", "size=2m") as disk:
        yield disk


@pytest.mark.parametrize("compressible", [True, False])
@pytest.mark.requirement("B-61")
async def test_a_full_disk_is_our_trouble_and_no_fault_of_the_output(
    small_disk: Path, tmp_path: Path, compressible: bool
) -> None:
    """While receiving, or while Git unpacks what was received."""
    project = await make_project(tmp_path)
    small = dataclasses.replace(project, store=small_disk / "repositories" / "project.git")
    await ensure_commit(project.clone, small.store, project.commit)
    before = on_disk(small.store)
    forge = Forge(project.clone, project.commit)
    content = os.urandom(1_200_000) + (b"" if compressible else os.urandom(1_000_000))
    result = forge.commit(forge.with_row(FILE, b"large", forge.blob(content)))
    with pytest.raises(DiskUnusable, match="No space left on device"):
        await small.take(forge.bundle(result), result, LIMITS)
    assert on_disk(small.store) == before
    assert list((small.store.parent / ".quarantine").iterdir()) == []


@pytest.mark.requirement("B-61")
async def test_a_cancelled_import_leaves_nothing(project: Project) -> None:
    before = on_disk(project.store)
    forge = Forge(project.clone, project.commit)
    result = forge.commit(forge.with_row(FILE, b"new", forge.blob(b"new\n")))
    bundle = forge.bundle(result)
    reached = anyio.Event()

    async def endless() -> None:
        async def chunks() -> AsyncIterator[bytes]:
            yield bundle
            reached.set()
            await anyio.sleep_forever()

        await import_bundle(
            project.store,
            chunks(),
            input_commit=project.commit,
            bundle_ref=REF,
            claimed_commit=result,
            target_ref=REF,
            limits=LIMITS,
        )

    async with anyio.create_task_group() as group:
        group.start_soon(endless)
        await reached.wait()
        group.cancel_scope.cancel()
    assert on_disk(project.store) == before
    assert list((project.store.parent / ".quarantine").iterdir()) == []
