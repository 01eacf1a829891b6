"""Images go under disk pressure only, only the expendable ones, and only ours."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from bridge_parts import TRUST_DOMAIN, Bridge, HastyClock, memory_bridge, wait_for
from image_doubles import ScriptedBuilder
from memory_engine import MemoryEngine

from forge_bridge.flows import disk as disk_flow
from forge_bridge.state_root.evidence import EvidenceStore
from forge_core.errors import DiskUnusable, EngineConflict, EngineUnreachable
from forge_core.image_names import ImageIdentity
from forge_core.image_ports import Evidence
from forge_core.image_retention import MAX_EVIDENCE_BYTES, CachedImage
from forge_core.ports import DiskUsage, EngineImage

DAY_MS = 86_400_000
NOW_MS = HastyClock().unix_seconds() * 1000
FULL, HALF = DiskUsage(100, 1), DiskUsage(50, 1 << 40)


@dataclass
class ScriptedDisk:
    """As full as a test says, one look after the other; then as at last."""

    looks: list[DiskUsage] = field(default_factory=lambda: [HALF])

    async def usage(self) -> DiskUsage:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


@dataclass
class Store:
    """A bridge with images, and the disk that it looks at."""

    bridge: Bridge
    engine: MemoryEngine
    builder: ScriptedBuilder
    disk: ScriptedDisk

    @property
    def index(self) -> dict[str, CachedImage]:
        return dict(self.bridge.service.images.pipeline.records.index.images)

    async def add(self, number: int, days: float, project: str = "project") -> CachedImage:
        """A promoted image that was last used so many days ago."""
        used_ms = NOW_MS - int(days * DAY_MS)
        image = CachedImage(f"{number:064x}", f"sha256:{number:064x}", project, used_ms, used_ms)
        await self.bridge.service.images.pipeline.records.index.put(image)
        self.put_into_engine(image)
        return image

    def put_into_engine(self, image: CachedImage, *names: str) -> None:
        identity = self.identity(image)
        named = names or (identity.promoted,)
        self.engine.images[image.image_id] = EngineImage(image.image_id, named, identity.labels)

    def identity(self, image: CachedImage) -> ImageIdentity:
        runner = self.bridge.runner.identity.runner_id
        return ImageIdentity(runner, TRUST_DOMAIN, image.project_id, image.image_key)

    async def relieve(self, *looks: DiskUsage) -> None:
        """The disk is full; then it looks like this, look by look."""
        self.disk.looks = [FULL, *looks]
        runner = self.bridge.runner
        await disk_flow.look(runner, self.disk)
        assert runner.disk.latched

        async def is_pressed() -> bool:
            await disk_flow.look(runner, self.disk)
            return runner.disk.latched

        await self.bridge.service.images.relieve(is_pressed)


@asynccontextmanager
async def store(directory: Path) -> AsyncIterator[Store]:
    engine, disk = MemoryEngine(), ScriptedDisk()
    builder = ScriptedBuilder(engine)
    async with memory_bridge(
        directory, engine=engine, builder=builder, disk=disk, minimum_workspace_bytes=1 << 30
    ) as bridge:
        yield Store(bridge, engine, builder, disk)


@pytest.mark.requirement("B-27", "B-89")
async def test_under_pressure_the_expired_surplus_goes_and_nothing_else(tmp_path: Path) -> None:
    async with store(tmp_path) as images:
        kept = [await images.add(n, days) for n, days in enumerate((1, 8, 9))]
        for number, days in ((10, 20), (11, 30)):
            await images.add(number, days)
        other = await images.add(20, 90, "another")
        await images.relieve(FULL)
        left = {image.image_key for image in (*kept, other)}
        assert set(images.index) == left
        assert set(images.engine.images) == {f"sha256:{key}" for key in left}


@pytest.mark.requirement("B-34", "B-89")
async def test_the_cache_goes_first_and_it_stops_when_there_is_room(tmp_path: Path) -> None:
    async with store(tmp_path) as images:
        for number in range(6):
            await images.add(number, 10 + number)
        await images.relieve(HALF)
        assert images.builder.pruned == [(20 << 30, 1 << 30)]
        assert len(images.index) == 6
        await images.relieve(FULL, FULL, FULL, HALF)
        assert images.builder.pruned[1:] == [(20 << 30, 1 << 30), (2 << 30, 1 << 30)]
        assert set(images.index) == {f"{n:064x}" for n in range(5)}


@pytest.mark.requirement("B-89")
async def test_without_pressure_nothing_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_flow, "LOOK_EVERY_MS", 1)
    async with store(tmp_path) as images:
        for number in range(6):
            await images.add(number, 10 + number)
        looked = images.bridge.runner.clock.now_ms()
        await images.bridge.runner.clock.sleep_until_ms(looked + 50)
        assert len(images.index) == 6
        assert images.builder.pruned == []


@pytest.mark.requirement("B-89")
async def test_the_watch_gives_space_back_while_pressure_is_latched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_flow, "LOOK_EVERY_MS", 1)
    async with store(tmp_path) as images:
        for number in range(5):
            await images.add(number, 10 + number)
        images.disk.looks = [FULL, FULL, FULL, FULL, HALF]
        await wait_for(lambda: len(images.index) == 4)
        await wait_for(lambda: not images.bridge.runner.disk.latched)
        assert len(images.index) == 4


@pytest.mark.requirement("B-89")
async def test_an_image_of_an_attempt_stays(tmp_path: Path) -> None:
    async with store(tmp_path) as images:
        old = [await images.add(n, 10 + n) for n in range(5)]
        attempt = await images.bridge.run("wait")
        pipeline = images.bridge.service.images.pipeline
        pipeline._held[attempt, 1] = old[4].image_key
        await images.relieve(FULL)
        assert set(images.index) == {image.image_key for image in (*old[:3], old[4])}
        images.bridge.hub.send("Cancel", {"attemptId": attempt, "fence": 1, "reason": "enough"})
        await images.bridge.until_idle()
        await images.relieve(FULL)
        assert set(images.index) == {image.image_key for image in old[:3]}


@pytest.mark.requirement("B-89")
async def test_what_is_being_worked_on_stays(tmp_path: Path) -> None:
    async with store(tmp_path) as images:
        old = [await images.add(n, 10 + n) for n in range(5)]
        with images.bridge.service.images.pipeline.once.claimed(old[4].image_key):
            await images.relieve(FULL)
            assert old[4].image_key in images.index
        await images.relieve(FULL)
        assert old[4].image_key not in images.index


@pytest.mark.requirement("B-89")
@pytest.mark.parametrize("error", [EngineConflict("in use"), EngineUnreachable("gone")])
async def test_what_resists_is_kept_in_the_index_too(tmp_path: Path, error: Exception) -> None:
    async with store(tmp_path) as images:
        for number in range(5):
            await images.add(number, 10 + number)
        images.engine.faults["remove_image"] = error
        await images.relieve(FULL)
        assert len(images.index) == 5
        del images.engine.faults["remove_image"]


@pytest.mark.requirement("B-89")
async def test_a_name_of_ours_that_stands_for_another_image_is_not_touched(tmp_path: Path) -> None:
    async with store(tmp_path) as images:
        for number in range(3):
            await images.add(number, 10 + number)
        moved = await images.add(4, 20)
        stranger = replace(moved, image_id=f"sha256:{5:064x}")
        del images.engine.images[moved.image_id]
        images.put_into_engine(stranger)
        await images.relieve(FULL)
        assert stranger.image_id in images.engine.images


@pytest.mark.requirement("B-80", "B-89")
async def test_the_start_removes_what_was_never_promoted(tmp_path: Path) -> None:
    engine = MemoryEngine()
    disk = ScriptedDisk()
    builder = ScriptedBuilder(engine)
    async with memory_bridge(tmp_path, engine=engine, builder=builder, disk=disk) as bridge:
        images = Store(bridge, engine, builder, disk)
        whole, lost = await images.add(1, 0), await images.add(2, 0)
        candidate = replace(whole, image_key=f"{3:064x}", image_id=f"sha256:{3:064x}")
        promoted = replace(whole, image_key=f"{4:064x}", image_id=f"sha256:{4:064x}")
        mine = images.identity(whole)
        images.put_into_engine(whole, mine.promoted, mine.candidate("0" * 32))
        again = replace(candidate, image_id=f"sha256:{5:064x}")
        images.put_into_engine(candidate, images.identity(candidate).candidate("0" * 32))
        images.put_into_engine(again, images.identity(candidate).candidate("1" * 32))
        images.put_into_engine(promoted, images.identity(promoted).promoted, "somebody:else")
        foreign = ImageIdentity("another-runner", TRUST_DOMAIN, "project", candidate.image_key)
        theirs = foreign.candidate("0" * 32)
        engine.images["sha256:f"] = EngineImage("sha256:f", (theirs,), foreign.labels)
        strange = EngineImage("sha256:e", ("my:own",), images.identity(candidate).labels)
        engine.images["sha256:e"] = strange
        del engine.images[lost.image_id]
    async with memory_bridge(tmp_path, engine=engine, builder=builder, disk=disk) as bridge:
        images = Store(bridge, engine, builder, disk)
        assert set(images.index) == {whole.image_key}
        assert engine.images[whole.image_id].names == (mine.promoted,)
        assert not {candidate.image_id, again.image_id} & {*engine.images}
        assert engine.images[promoted.image_id].names == ("somebody:else",)
        assert engine.images["sha256:f"].names == (theirs,)
        assert engine.images["sha256:e"] == strange


@pytest.mark.requirement("B-80")
async def test_what_is_promoted_after_the_look_at_the_engine_keeps_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store(tmp_path) as images:
        lost, rebuilt = await images.add(1, 0), await images.add(2, 0)
        for image in (lost, rebuilt):
            del images.engine.images[image.image_id]
        again = replace(rebuilt, image_id=f"sha256:{4:064x}")
        records = images.bridge.service.images.pipeline.records
        look = images.engine.list_images

        async def looked(labels: Mapping[str, str]) -> Sequence[EngineImage]:
            found = await look(labels)
            await images.add(3, 0)
            images.put_into_engine(again)
            await records.index.put(again)
            return found

        monkeypatch.setattr(images.engine, "list_images", looked)
        await images.bridge.service.images.recover()
        assert {key: image.image_id for key, image in images.index.items()} == {
            again.image_key: again.image_id,
            f"{3:064x}": f"sha256:{3:064x}",
        }


@pytest.mark.requirement("B-80")
async def test_an_engine_that_gives_no_list_costs_no_image(tmp_path: Path) -> None:
    engine = MemoryEngine()
    builder = ScriptedBuilder(engine)
    async with memory_bridge(tmp_path, engine=engine, builder=builder) as bridge:
        await Store(bridge, engine, builder, ScriptedDisk()).add(1, 0)
    engine.faults["list_images"] = EngineUnreachable("no answer")
    async with memory_bridge(tmp_path, engine=engine, builder=builder) as bridge:
        assert len(Store(bridge, engine, builder, ScriptedDisk()).index) == 1
        assert len(engine.images) == 1


@pytest.mark.requirement("B-28", "B-91")
async def test_evidence_has_its_own_age_and_that_of_a_usable_image_stays(tmp_path: Path) -> None:
    async with store(tmp_path) as images:
        usable = await images.add(1, 0)
        records = images.bridge.service.images.pipeline.records
        old, new = f"{2:064x}", f"{3:064x}"
        for key in (usable.image_key, old, new):
            await records.attestations.put_set(key, (Evidence("sbom.spdx.json", b"{}"),))
            await records.build_logs.put(key, Evidence("project.log", b"failed"))
        for part in ("attestations", "build-logs"):
            for key in (usable.image_key, old):
                path = images.bridge.state_root / part / key
                os.utime(path, ns=(0, (NOW_MS - 31 * DAY_MS) * 1_000_000))
        await records.prune(NOW_MS)
        for part in ("attestations", "build-logs"):
            left = {path.name for path in (images.bridge.state_root / part).iterdir()}
            assert left == {usable.image_key, new}


@pytest.mark.requirement("B-28", "B-91")
async def test_evidence_that_has_no_record_yet_stays_while_another_build_ends(
    tmp_path: Path,
) -> None:
    """With a count of 0 everything without a record goes, but not before it can have one."""
    engine = MemoryEngine()
    builder = ScriptedBuilder(engine)
    async with memory_bridge(
        tmp_path, engine=engine, builder=builder, sandbox_audit_retention_count=0
    ) as bridge:
        records = bridge.service.images.pipeline.records
        key, path = f"{1:064x}", bridge.state_root / "attestations" / f"{1:064x}"
        with records.in_work(key):
            await records.attestations.put_set(key, (Evidence("sbom.spdx.json", b"{}"),))
            await records.prune(NOW_MS)
            assert path.exists()
        await records.prune(NOW_MS)
        assert not path.exists()


@pytest.mark.requirement("B-28", "B-91")
async def test_what_goes_spares_a_build_that_begins_meanwhile_and_outlasts_what_resists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MemoryEngine()
    builder = ScriptedBuilder(engine)
    async with memory_bridge(
        tmp_path, engine=engine, builder=builder, sandbox_audit_retention_count=0
    ) as bridge:
        records = bridge.service.images.pipeline.records
        resists, goes, begins = (f"{number:064x}" for number in range(1, 4))
        directory = bridge.state_root / "attestations"
        for age, key in enumerate((begins, goes, resists)):
            await records.attestations.put_set(key, (Evidence("sbom.spdx.json", b"{}"),))
            os.utime(directory / key, ns=(0, (NOW_MS - age * DAY_MS) * 1_000_000))
        remove = EvidenceStore.remove

        with ExitStack() as builds:

            async def removed(store: EvidenceStore, image_key: str) -> None:
                if image_key == resists:
                    builds.enter_context(records.in_work(begins))
                    raise DiskUnusable("cannot remove it")
                await remove(store, image_key)

            monkeypatch.setattr(EvidenceStore, "remove", removed)
            await records.prune(NOW_MS)
        assert {path.name for path in directory.iterdir()} == {resists, begins}


@pytest.mark.requirement("B-28", "B-91")
async def test_a_start_lets_go_of_evidence_beyond_its_bytes_but_not_of_a_usable_images(
    tmp_path: Path,
) -> None:
    """What an earlier life left is counted as it is on disk; the files have holes for contents."""
    usable, oldest, *newer = (f"{number:064x}" for number in range(1, 6))
    by_age = (*reversed(newer), oldest, usable)
    engine = MemoryEngine()
    builder = ScriptedBuilder(engine)
    async with memory_bridge(tmp_path, engine=engine, builder=builder) as bridge:
        await Store(bridge, engine, builder, ScriptedDisk()).add(1, 0)
        attestations = bridge.state_root / "attestations"
        records = bridge.service.images.pipeline.records
        for key in by_age:
            await records.attestations.put_set(key, (Evidence("sbom.spdx.json", b"{}"),))
    for days, key in enumerate(by_age):
        os.truncate(attestations / key / "sbom.spdx.json", MAX_EVIDENCE_BYTES // 4)
        os.utime(attestations / key, ns=(0, (NOW_MS - days * DAY_MS) * 1_000_000))
    async with memory_bridge(tmp_path, engine=engine, builder=builder):
        left = {path.name: path for path in attestations.iterdir()}
        for path in left.values():
            os.truncate(path / "sbom.spdx.json", 0)
    assert set(left) == {usable, *newer}
