"""Passes and the command that runs one: what resists, what is believed, who may clean up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from bridge_parts import Bridge, memory_bridge
from memory_engine import CREATED_AT, MemoryEngine
from scripted_hub import ScriptedHub

from forge_bridge.flows.reap import DISPATCHES_AT_ONCE
from forge_bridge.state_root.ledgers import LedgerStore
from forge_bridge.state_root.locks import take_locks
from forge_core.errors import DiskUnusable, EngineRefused, EngineTimedOut
from forge_core.labels import TOOLING, Owner
from forge_core.ports import EngineResource
from forge_core.ready import Record, RecordKind
from forge_core.reap import removals_of_all
from forge_core.teardown import Removal
from forge_core.wire.codes import ResourceKind
from forge_edges.clock import SystemClock
from forge_edges.ledger_file import LedgerFile

RUNNER = "runner-1"
OLD = Owner(RUNNER, "an-earlier-instance", "attempt-0", 3, "project", "domain")
RESISTS = EngineRefused("cannot remove it: the engine says no")


async def reap(bridge: Bridge, request_id: str) -> dict[str, object]:
    """The hub's reap action, and its outcome."""
    bridge.hub.send(
        "Reap",
        {
            "requestId": request_id,
            "runnerId": bridge.runner.identity.runner_id,
            "runnerInstanceId": bridge.runner.identity.runner_instance_id,
            "scope": "orphans",
        },
    )
    outcome = await bridge.hub.next("SubmitReapOutcome", requestId=request_id)
    return {name: outcome[name] for name in ("removed", "absent", "failed")}


def reports_of(hub: ScriptedHub, attempt_id: str) -> list[dict[str, str]]:
    """By name without its digest, what each cleanup report of this attempt says."""
    return [
        {r["name"].rpartition("-")[0]: r["outcome"] for r in report["resources"]}
        for report in hub.of("SubmitCleanupReport", attemptId=attempt_id)
    ]


@pytest.mark.requirement("B-86", "B-88", "B-08")
async def test_what_resists_keeps_its_capacity_until_a_pass_frees_it(tmp_path: Path) -> None:
    engine = MemoryEngine()
    async with memory_bridge(tmp_path, engine=engine, max_concurrent_sandboxes=1) as bridge:
        engine.faults["remove_container"] = RESISTS
        attempt_id = await bridge.run("true")
        told = await bridge.hub.next("Heartbeat", degradedReservationCount=1)
        assert told["usedResources"]["slots"] == 1
        refused = bridge.offer()
        bridge.hub.send("Offer", refused)
        assert (await bridge.hub.decision(refused))["reasonCode"] == "capacity_slots"
        assert (await reap(bridge, "first"))["failed"] == 2
        assert (await reap(bridge, "second"))["failed"] == 2
        del engine.faults["remove_container"]
        assert await reap(bridge, "third") == {"removed": 2, "absent": 1, "failed": 0}
        await bridge.hub.over(attempt_id)
        await bridge.until_idle()
        await bridge.hub.until(lambda: len(reports_of(bridge.hub, attempt_id)) == 3)
        failed, without_volume, removed = reports_of(bridge.hub, attempt_id)
        assert failed["forge-agent"] == without_volume["forge-agent"] == "failed"
        assert removed == {
            "forge-agent": "removed",
            "forge-helper": "removed",
            "forge-workspace": "absent",
        }
    assert engine.is_empty


@pytest.mark.requirement("B-82", "B-86")
async def test_an_orphan_that_resists_and_has_no_ledger_holds_the_whole_capacity(
    tmp_path: Path,
) -> None:
    engine = MemoryEngine()
    engine.volumes[OLD.name("workspace")] = OLD.labels("workspace")
    engine.faults["remove_volume"] = RESISTS
    async with memory_bridge(tmp_path, engine=engine, runner_id=RUNNER) as bridge:
        first = bridge.hub.of("Heartbeat")[0]
        assert first["degradedReservationCount"] == 1
        assert first["usedResources"]["slots"] == first["resourceCapacity"]["slots"] == 2
        refused = bridge.offer()
        bridge.hub.send("Offer", refused)
        assert (await bridge.hub.decision(refused))["reasonCode"] == "capacity_slots"
        assert (await reap(bridge, "again"))["failed"] == 1
        engine.faults.clear()
        assert (await reap(bridge, "at-last"))["removed"] == 1
        await bridge.until_idle()
        await bridge.accept()
        await bridge.hub.until(lambda: len(reports_of(bridge.hub, OLD.attempt_id)) == 2)
        told = reports_of(bridge.hub, OLD.attempt_id)
        assert told == [{"forge-workspace": "failed"}, {"forge-workspace": "removed"}]


@pytest.mark.requirement("B-86")
async def test_an_orphan_that_vanishes_by_itself_gives_the_capacity_back(tmp_path: Path) -> None:
    engine = MemoryEngine()
    engine.volumes[OLD.name("workspace")] = OLD.labels("workspace")
    engine.faults["remove_volume"] = RESISTS
    async with memory_bridge(tmp_path, engine=engine, runner_id=RUNNER) as bridge:
        assert not bridge.is_idle
        engine.volumes.clear()
        engine.faults.clear()
        assert await reap(bridge, "pass") == {"removed": 0, "absent": 1, "failed": 0}
        await bridge.until_idle()
        await bridge.hub.until(lambda: len(reports_of(bridge.hub, OLD.attempt_id)) == 2)
        told = reports_of(bridge.hub, OLD.attempt_id)
        assert told == [{"forge-workspace": "failed"}, {"forge-workspace": "absent"}]


class OneListEngine(MemoryEngine):
    """Once what is held resists, lists one dispatch no more."""

    async def list_resources(self, labels: Mapping[str, str]) -> Sequence[EngineResource]:
        if "dev.forge.attempt-id" in labels and "remove_volume" in self.faults:
            raise EngineTimedOut("cannot list: no answer within 5 s")
        return await super().list_resources(labels)


@pytest.mark.requirement("B-86")
async def test_what_is_of_no_dispatch_holds_the_capacity_while_it_cannot_be_listed(
    tmp_path: Path,
) -> None:
    engine = OneListEngine()
    tooling = Owner.of_runner(TOOLING, RUNNER, "an-earlier-instance", "domain")
    engine.volumes[tooling.name("tooling")] = tooling.labels("tooling")
    engine.faults["remove_volume"] = RESISTS
    async with memory_bridge(tmp_path, engine=engine, runner_id=RUNNER) as bridge:
        assert not bridge.is_idle
        assert await reap(bridge, "again") == {"removed": 0, "absent": 0, "failed": 1}
        assert not bridge.is_idle
        engine.faults.clear()
        assert await reap(bridge, "at-last") == {"removed": 1, "absent": 0, "failed": 0}
        await bridge.until_idle()


class CrowdedEngine(MemoryEngine):
    """Removes a volume once as many as can be are asked for, and notes how many that were."""

    def __init__(self, expected: int) -> None:
        super().__init__()
        self.expected = expected
        self.most_removals = self.removals = 0
        self.crowd = anyio.Event()

    async def remove_volume(self, name: str) -> None:
        self.removals += 1
        self.most_removals = max(self.most_removals, self.removals)
        if self.removals == self.expected:
            self.crowd.set()
        await self.crowd.wait()
        await anyio.wait_all_tasks_blocked()
        await super().remove_volume(name)
        self.removals -= 1


@pytest.mark.requirement("B-80", "B-83")
async def test_a_pass_removes_what_is_of_several_dispatches_at_a_time(tmp_path: Path) -> None:
    engine = CrowdedEngine(DISPATCHES_AT_ONCE)
    owners = [replace(OLD, attempt_id=f"attempt-{n}") for n in range(3 * DISPATCHES_AT_ONCE)]
    for owner in owners:
        engine.volumes[owner.name("workspace")] = owner.labels("workspace")
    async with memory_bridge(tmp_path, engine=engine, runner_id=RUNNER) as bridge:
        assert engine.most_removals == DISPATCHES_AT_ONCE
        assert bridge.hub.of("Heartbeat")[0]["degradedReservationCount"] == 0
        for owner in owners:
            await bridge.hub.next("SubmitCleanupReport", attemptId=owner.attempt_id)
            told = reports_of(bridge.hub, owner.attempt_id)
            assert told == [{"forge-workspace": "removed"}]
        await bridge.until_idle()
    assert engine.is_empty


@pytest.mark.requirement("B-80", "B-83")
async def test_one_pass_removes_what_two_instances_left_of_one_dispatch(tmp_path: Path) -> None:
    engine = MemoryEngine()
    owners = [replace(OLD, runner_instance_id=f"instance-{n}") for n in range(2)]
    for owner in owners:
        engine.volumes[owner.name("workspace")] = owner.labels("workspace")
    async with memory_bridge(tmp_path, engine=engine, runner_id=RUNNER) as bridge:
        await bridge.hub.until(lambda: len(reports_of(bridge.hub, OLD.attempt_id)) == 2)
        reports = bridge.hub.of("SubmitCleanupReport", attemptId=OLD.attempt_id)
        told = {r["resourceRunnerInstanceId"]: r["resources"][0]["outcome"] for r in reports}
        assert told == {owner.runner_instance_id: "removed" for owner in owners}
        await bridge.until_idle()
    assert engine.is_empty


@pytest.mark.requirement("B-83", "B-86")
async def test_nothing_is_removed_while_it_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MemoryEngine()
    engine.volumes[OLD.name("workspace")] = OLD.labels("workspace")

    async def full(*_: object) -> LedgerFile:
        raise DiskUnusable("cannot create a ledger: no space left on device")

    monkeypatch.setattr(LedgerStore, "create", full)
    async with memory_bridge(tmp_path, engine=engine, runner_id=RUNNER) as bridge:
        first = bridge.hub.of("Heartbeat")[0]
        assert first["usedResources"]["slots"] == first["resourceCapacity"]["slots"] == 2
        assert await reap(bridge, "in-vain") == {"removed": 0, "absent": 0, "failed": 1}
        assert len(engine.volumes) == 1
        monkeypatch.undo()
        assert (await reap(bridge, "at-last"))["removed"] == 1
        await bridge.hub.next("SubmitCleanupReport", attemptId=OLD.attempt_id)
        await bridge.until_idle()
        assert reports_of(bridge.hub, OLD.attempt_id) == [{"forge-workspace": "removed"}]


@pytest.mark.requirement("B-83", "B-86")
async def test_what_could_not_be_recorded_and_vanishes_gives_the_capacity_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MemoryEngine()
    engine.volumes[OLD.name("workspace")] = OLD.labels("workspace")

    async def full(*_: object) -> None:
        raise DiskUnusable("cannot append: no space left on device")

    monkeypatch.setattr(LedgerFile, "append_all", full)
    async with memory_bridge(tmp_path, engine=engine, runner_id=RUNNER) as bridge:
        assert not bridge.is_idle
        assert not list((bridge.state_root / "attempts").iterdir())
        engine.volumes.clear()
        assert (await reap(bridge, "pass"))["failed"] == 0
        await bridge.until_idle()


@pytest.mark.requirement("B-83")
async def test_reports_of_one_dispatch_are_told_apart_though_the_clock_steps_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MemoryEngine()
    monkeypatch.setattr(SystemClock, "utc", lambda _self: CREATED_AT)
    async with memory_bridge(tmp_path, engine=engine, runner_id=RUNNER) as bridge:
        for number in range(1, 4):
            engine.volumes[OLD.name("workspace")] = OLD.labels("workspace")
            assert (await reap(bridge, f"pass-{number}"))["removed"] == 1
            await bridge.hub.next("SubmitCleanupReport", count=number)
        reports = bridge.hub.of("SubmitCleanupReport")
        assert len({report["reportId"] for report in reports}) == 3


@pytest.mark.requirement("B-04", "B-86")
async def test_a_dispatch_whose_remains_resist_is_not_taken_on_again(tmp_path: Path) -> None:
    engine = MemoryEngine()
    engine.volumes[OLD.name("workspace")] = OLD.labels("workspace")
    engine.faults["remove_volume"] = RESISTS
    async with memory_bridge(tmp_path, engine=engine, runner_id=RUNNER) as bridge:
        again = bridge.offer(OLD.attempt_id, OLD.fence)
        bridge.hub.send("Offer", again)
        assert (await bridge.hub.decision(again))["reasonCode"] == "stale_fence"
        engine.faults.clear()
        assert (await reap(bridge, "pass"))["removed"] == 1
        await bridge.until_idle()


class LateEngine(MemoryEngine):
    """Gives no list the first times that it is asked."""

    refusals = 3

    def __init__(self, hub: ScriptedHub) -> None:
        super().__init__()
        self._hub = hub

    async def list_resources(self, labels: Mapping[str, str]) -> Sequence[EngineResource]:
        assert self._hub.connected == 0 or not self.volumes
        if self.refusals:
            self.refusals -= 1
            raise EngineTimedOut("cannot list containers: the engine did not answer in time")
        return await super().list_resources(labels)


@pytest.mark.requirement("B-80", "B-82", "B-05")
async def test_nothing_is_advertised_before_the_engine_has_listed_what_is_there(
    tmp_path: Path,
) -> None:
    hub = ScriptedHub()
    engine = LateEngine(hub)
    engine.volumes[OLD.name("workspace")] = OLD.labels("workspace")
    async with memory_bridge(tmp_path, hub, engine, runner_id=RUNNER) as bridge:
        assert (engine.refusals, engine.volumes, bridge.is_idle) == (0, {}, True)


@pytest.mark.requirement("B-80")
async def test_names_that_disagree_with_their_labels_are_warned_of_and_kept(
    tmp_path: Path,
) -> None:
    engine = MemoryEngine()
    engine.volumes["precious"] = OLD.labels("workspace")
    engine.volumes["similar"] = {"dev.forge.managed": "bridge", "dev.forge.runner-id": RUNNER}
    async with memory_bridge(tmp_path, engine=engine, runner_id=RUNNER) as bridge:
        warned = bridge.logged("a resource carries our labels under a foreign name; not touched")
        assert [entry["name"] for entry in warned] == ["precious"]
        assert bridge.is_idle
    assert set(engine.volumes) == {"precious", "similar"}


def test_the_plan_names_what_is_listed_and_what_only_a_ledger_knows() -> None:
    name, gone = OLD.name("agent"), OLD.name("workspace")
    records = [
        Record(RecordKind.INTENT, {"kind": "container", "name": name, "role": "agent"}),
        Record(RecordKind.INTENT, {"kind": "volume", "name": gone, "role": "workspace"}),
    ]
    other = Owner("runner-2", "i", "attempt-0", 3, "project", "domain")
    listed = [
        EngineResource(ResourceKind.CONTAINER, "c1", owner.name("agent"), labels, CREATED_AT)
        for owner, labels in (
            (OLD, OLD.labels("agent")),
            (other, other.labels("agent")),
        )
    ]
    assert removals_of_all({OLD: records}, listed, runner_id=RUNNER) == (
        (OLD, Removal(ResourceKind.CONTAINER, "c1", name, "agent")),
        (OLD, Removal(ResourceKind.VOLUME, gone, gone, "workspace")),
    )


def sandbox_reap(state_root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, on a machine where no engine answers."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "forge_bridge", "sandbox", "reap", *arguments],
        env=kept
        | {
            "FORGE_SANDBOX_STATE_ROOT": str(state_root),
            "DOCKER_HOST": f"unix://{state_root.parent}/no.sock",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.requirement("B-42")
@pytest.mark.parametrize("arguments", [(), ("--dry-run",), ("--quiet", "--json")])
def test_while_a_process_owns_the_state_root_nothing_is_touched(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    root = tmp_path / "state"
    root.mkdir(mode=0o700)
    lock = take_locks(root, engine_id="e", runner_id="r", instance_id="i", since="now")
    try:
        before = sorted(root.rglob("*"))
        ended = sandbox_reap(root, *arguments)
        assert (ended.returncode, ended.stdout) == (75, "")
        assert sorted(root.rglob("*")) == before
        if "--quiet" in arguments:
            assert ended.stderr == ""
        else:
            assert ended.stderr.startswith("nothing was touched: ")
            assert f"process {os.getpid()} holds it" in ended.stderr
    finally:
        lock.release()


@pytest.mark.requirement("B-42")
def test_an_engine_that_does_not_answer_is_a_failure_and_not_an_empty_one(tmp_path: Path) -> None:
    ended = sandbox_reap(tmp_path / "state", "--json")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: cannot reach the Docker Engine at ")


@pytest.mark.requirement("B-42")
def test_a_dry_run_makes_nothing_not_even_a_state_root(tmp_path: Path) -> None:
    ended = sandbox_reap(tmp_path / "state", "--dry-run", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {
        "dryRun": True,
        "runnerId": None,
        "dispatches": [],
        "resources": [],
    }
    assert list(tmp_path.iterdir()) == []
