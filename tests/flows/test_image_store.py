"""The image index and the evidence of images on disk: whole, private, bounded, never trusted."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from forge_bridge.state_root import StateRoot
from forge_bridge.state_root.evidence import EvidenceStore
from forge_bridge.state_root.images import ImageIndex
from forge_core.errors import DiskUnusable, RefusedError
from forge_core.image_ports import Evidence
from forge_core.image_retention import CachedImage, KeptEvidence
from forge_core.sealed import encode, seal
from forge_edges.clock import SystemClock

KEY, OTHER = "a" * 64, "b" * 64
IMAGE = CachedImage(KEY, f"sha256:{'1' * 64}", "project", 1_000, 2_000)
DOCUMENTS = (Evidence("sbom.spdx.json", b"{}"), Evidence("provenance.dsse.json", b"[]"))


async def opened(directory: Path) -> StateRoot:
    directory.mkdir(mode=0o700, exist_ok=True)
    return await StateRoot.open(directory, clock=SystemClock())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.requirement("B-27", "B-90")
async def test_everything_of_images_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        root = await opened(tmp_path / "state")
        await root.images.put(IMAGE)
        await root.build_logs.put(KEY, Evidence("project.log", b"failed"))
        await root.attestations.put_set(KEY, DOCUMENTS)
    finally:
        os.umask(before)
    written = [
        path
        for part in ("images", "build-logs", "attestations")
        for path in (root.path / part, *(root.path / part).rglob("*"))
    ]
    assert len(written) == 9
    assert {mode(path) for path in written if path.is_dir()} == {0o700}
    assert {mode(path) for path in written if path.is_file()} == {0o600}


async def test_records_come_back_and_go(tmp_path: Path) -> None:
    index = ImageIndex(tmp_path)
    await index.put(IMAGE)
    again = ImageIndex(tmp_path)
    await again.load()
    assert again.images == {KEY: IMAGE}
    await again.remove(KEY)
    await again.remove(KEY)
    await index.load()
    assert index.images == {}


@pytest.mark.requirement("B-27")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}\n",
        seal(encode({"imageKey": OTHER})),
        seal(encode({"imageKey": KEY, "imageId": "sha256:x", "projectId": "p"})),
        seal(
            encode(
                {
                    "imageKey": OTHER,
                    "imageId": IMAGE.image_id,
                    "projectId": "p",
                    "builtAtMs": 1,
                    "usedAtMs": 1,
                }
            )
        ),
    ],
    ids=["empty", "unsealed", "another shape", "another id", "of another key"],
)
async def test_a_damaged_record_is_set_aside_and_the_others_are_kept(
    tmp_path: Path, content: bytes
) -> None:
    index = ImageIndex(tmp_path)
    other = CachedImage(OTHER, IMAGE.image_id, "project", 1, 1)
    await index.put(other)
    (tmp_path / f"{KEY}.json").write_bytes(content)
    again = ImageIndex(tmp_path)
    await again.load()
    assert again.images == {OTHER: other}
    assert (tmp_path / f"{KEY}.suspect").read_bytes() == content


@pytest.mark.requirement("B-27")
async def test_a_record_that_the_disk_does_not_give_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = ImageIndex(tmp_path)
    await index.put(IMAGE)
    other = CachedImage(OTHER, IMAGE.image_id, "project", 1, 1)
    await index.put(other)
    real_open = os.open

    def faulty(path: Path, *arguments: int) -> int:
        if path == tmp_path / f"{KEY}.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real_open(path, *arguments)

    monkeypatch.setattr(os, "open", faulty)
    await index.load()
    assert index.images == {OTHER: other}
    monkeypatch.undo()
    await index.load()
    assert index.images == {KEY: IMAGE, OTHER: other}, "the next start has it again"


@pytest.mark.requirement("B-27")
async def test_a_damaged_record_that_cannot_be_set_aside_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{KEY}.json").write_bytes(b"")

    def read_only(self: Path, _target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "replace", read_only)
    index = ImageIndex(tmp_path)
    await index.load()
    assert index.images == {}


async def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    index = ImageIndex(tmp_path)
    await index.put(IMAGE)
    path = tmp_path / f"{KEY}.json"
    line = bytearray(path.read_bytes())
    line[line.index(b"sha256:1") + 7] ^= 1
    path.write_bytes(line)
    await index.load()
    assert index.images == {}


async def test_what_could_not_be_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    index, attestations = ImageIndex(tmp_path), EvidenceStore(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskUnusable):
        await index.put(IMAGE)
    with pytest.raises(DiskUnusable):
        await attestations.put_set(KEY, DOCUMENTS)
    monkeypatch.undo()
    assert index.images == {}
    assert list(tmp_path.iterdir()) == []


async def test_a_set_replaces_the_one_before_as_a_whole(tmp_path: Path) -> None:
    attestations = EvidenceStore(tmp_path)
    await attestations.put_set(KEY, DOCUMENTS)
    await attestations.put_set(KEY, (Evidence("sbom.spdx.json", b"new"),))
    found = {path.name: path.read_bytes() for path in (tmp_path / KEY).iterdir()}
    assert found == {"sbom.spdx.json": b"new"}
    assert [path.name for path in tmp_path.iterdir()] == [KEY]
    assert await attestations.read(KEY) == (Evidence("sbom.spdx.json", b"new"),)
    assert await attestations.read(OTHER) == ()


async def test_a_log_is_replaced_alone(tmp_path: Path) -> None:
    logs = EvidenceStore(tmp_path)
    await logs.put(KEY, Evidence("project.log", b"one"))
    await logs.put(KEY, Evidence("sbom.log", b"two"))
    await logs.put(KEY, Evidence("project.log", b"three"))
    found = {path.name: path.read_bytes() for path in (tmp_path / KEY).iterdir()}
    assert found == {"project.log": b"three", "sbom.log": b"two"}


async def test_what_is_kept_is_listed_with_age_and_size_and_can_go(tmp_path: Path) -> None:
    logs = EvidenceStore(tmp_path)
    await logs.put(KEY, Evidence("project.log", b"one"))
    await logs.put(KEY, Evidence("sbom.log", b"three"))
    os.utime(tmp_path / KEY, (5, 5))
    (tmp_path / "something else").mkdir()
    assert await logs.kept() == (KeptEvidence(KEY, 5_000, 8),)
    await logs.remove(KEY)
    await logs.remove(KEY)
    assert await logs.kept() == ()


async def test_who_takes_the_locks_sweeps_what_a_crash_left(tmp_path: Path) -> None:
    root = await opened(tmp_path / "state")
    (root.path / "attestations" / ".tmp-1").mkdir()
    (root.path / "attestations" / ".tmp-1" / "half").write_bytes(b"x")
    (root.path / "images" / ".tmp-2").write_bytes(b"x")
    await root.build_logs.put(KEY, Evidence("project.log", b"one"))
    (root.path / "build-logs" / KEY / ".tmp-3").write_bytes(b"x")
    lock = await root.acquire_engine_lock("engine", "runner", instance_id="instance")
    lock.release()
    assert list(root.path.rglob(".tmp-*")) == []
    assert (root.path / "build-logs" / KEY / "project.log").exists()


@pytest.mark.requirement("B-27", "B-90")
async def test_what_somebody_put_in_the_place_of_evidence_is_not_followed(tmp_path: Path) -> None:
    root = await opened(tmp_path / "state")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".tmp-theirs").write_text("theirs")
    (outside / "sbom.spdx.json").write_text("theirs")
    for part in ("build-logs", "attestations"):
        (root.path / part / KEY).symlink_to(outside)
        (root.path / part / OTHER).write_text("no directory")
        (root.path / part / "notes").write_text("nothing of ours")
        (root.path / part / ".tmp-link").symlink_to(outside)
    (await root.acquire_engine_lock("engine", "runner", instance_id="one")).release()
    for key in (KEY, OTHER):
        with pytest.raises(RefusedError, match="not a directory"):
            await root.attestations.read(key)
        await root.build_logs.put(key, Evidence("project.log", b"failed"))
        await root.attestations.put_set(key, DOCUMENTS)
        assert set(await root.attestations.read(key)) == set(DOCUMENTS)
        assert mode(root.path / "build-logs" / key) == 0o700
    (root.path / "attestations" / ("c" * 64)).symlink_to(outside)
    await root.attestations.remove("c" * 64)
    names = {path.name for path in (root.path / "attestations").iterdir()}
    assert names == {KEY, OTHER, "notes"}
    assert {path.name: path.read_text() for path in outside.iterdir()} == {
        ".tmp-theirs": "theirs",
        "sbom.spdx.json": "theirs",
    }
