"""Attempts on the host: every end of a sandbox, and what an earlier life has left (B-53)."""

from __future__ import annotations

import base64
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from bridge_parts import (
    KEY,
    TRUST_DOMAIN,
    Bridge,
    prepared,
    settings_for,
    wait_for,
)
from host_parts import (
    DAEMON,
    STUBBORN,
    alive,
    held,
    nothing_is_left,
    on_host,
    output,
    require_nothing_marked,
    run,
)
from scripted_hub import ScriptedHub, renewal

from forge_bridge.state_root import StateRoot
from forge_core import attempt as core
from forge_core.attempt import Now
from forge_core.attempt_records import moment_record
from forge_core.errors import RefusedError
from forge_core.labels import Owner, attempt_filter
from forge_core.ports import HostProgram
from forge_core.ready import RecordKind
from forge_core.resources import ResourceVector
from forge_core.wire.codes import ReservationState, Runtime
from forge_edges import host_runtime
from forge_edges.clock import SystemClock
from forge_edges.host_runtime import LocalHost

pytestmark = pytest.mark.requirement("B-53")

SECRET = "s3cret-with-many-words-in-it"


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    require_nothing_marked(tmp_path)


@pytest.mark.requirement("B-04", "B-71")
@pytest.mark.parametrize(
    ("more", "ending", "code"),
    [
        ({}, "Cancel", "cancelled"),
        ({"limits": {"hardWallMs": 1_500}}, None, "hard_wall_expired"),
        ({"limits": {"idleMs": 1_500}}, None, "idle_expired"),
        ({"lease": {"ttlMs": 1_500}}, None, "lease_expired"),
    ],
)
async def test_whatever_ends_it_ends_all_of_it(
    tmp_path: Path, more: dict[str, Any], ending: str | None, code: str
) -> None:
    async with on_host(tmp_path) as bridge:
        limits = {"hardWallMs": 60_000, "idleMs": 60_000, "maxOutputBytes": 1 << 20}
        lease = {"ttlMs": 60_000, "sequence": 0, "key": base64.b64encode(KEY).decode()}
        attempt_id = await run(
            bridge,
            *("sh", "-c", STUBBORN),
            limits=limits | more.get("limits", {}),
            lease=lease | more.get("lease", {}),
        )
        await bridge.hub.until(lambda: "up" in output(bridge, attempt_id))
        assert await held(bridge) == ["host-agent", "host-workspace"]
        if ending:
            bridge.hub.send(ending, {"attemptId": attempt_id, "fence": 1, "reason": "enough"})
        assert (await bridge.hub.over(attempt_id))["failureCode"] == code
        await nothing_is_left(bridge, attempt_id)


@pytest.mark.requirement("B-70")
async def test_a_renewed_lease_outlives_its_first_ttl(tmp_path: Path) -> None:
    async with on_host(tmp_path) as bridge:
        lease = {"ttlMs": 2_000, "sequence": 0, "key": base64.b64encode(KEY).decode()}
        attempt_id = await run(bridge, "sleep", "3", lease=lease)
        await bridge.hub.event(attempt_id, "agent.started")
        bridge.hub.send("LeaseUpdate", renewal(attempt_id, 1, 1, KEY))
        assert (await bridge.hub.over(attempt_id))["outcome"] == "succeeded"


async def test_output_beyond_its_limit_ends_the_attempt(tmp_path: Path) -> None:
    async with on_host(tmp_path) as bridge:
        limits = {"hardWallMs": 60_000, "idleMs": 60_000, "maxOutputBytes": 100_000}
        attempt_id = await run(bridge, "yes", limits=limits)
        assert (await bridge.hub.over(attempt_id))["failureCode"] == "output_limit"
        await nothing_is_left(bridge, attempt_id)


async def test_the_output_is_taken_once_nobody_has_a_hand_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something of the agent's that its supervisor does not reach: no descendant, but marked."""
    script = 'echo "$FORGE_HOST_RESOURCE"; while [ ! -e go ]; do sleep 0.02; done'
    async with on_host(tmp_path) as bridge:
        create, seen = LocalHost.create_container, []

        async def watched(host: LocalHost, name: str, program: HostProgram) -> str:
            if "host-helper" in name:
                seen.append(survivor.poll())
            return await create(host, name, program)

        monkeypatch.setattr(LocalHost, "create_container", watched)
        attempt_id = await run(bridge, "sh", "-c", script)
        await bridge.hub.until(lambda: output(bridge, attempt_id).endswith("\n"))
        mark = {"FORGE_HOST_RESOURCE": output(bridge, attempt_id).strip()}
        survivor = subprocess.Popen(["sleep", "600"], env={**os.environ, **mark})
        try:
            (volume,) = (bridge.state_root / "host").glob("forge-host-workspace-*/tree")
            (volume / "go").touch()
            assert (await bridge.hub.over(attempt_id))["outcome"] == "succeeded"
            assert seen == [-9]
        finally:
            survivor.kill()
            survivor.wait()
        await nothing_is_left(bridge, attempt_id)


@pytest.mark.requirement("B-04")
@pytest.mark.parametrize("where", ["ensure_commit", "unpack", "create_container", "import_bundle"])
async def test_a_cancel_ends_it_whatever_it_is_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async with on_host(tmp_path) as bridge:
        reached = anyio.Event()

        async def stuck(*_: object, **__: object) -> None:
            reached.set()
            await anyio.sleep_forever()

        runner = bridge.runner
        owner: Any = type(runner.host if hasattr(runner.host, where) else runner.git)
        monkeypatch.setattr(owner, where, stuck)
        attempt_id = await run(bridge, "sh", "-c", "echo changed > README")
        await reached.wait()
        bridge.hub.send("Cancel", {"attemptId": attempt_id, "fence": 1, "reason": "enough"})
        assert (await bridge.hub.over(attempt_id))["failureCode"] == "cancelled"
        await nothing_is_left(bridge, attempt_id)


async def test_a_bridge_that_stops_ends_what_runs(tmp_path: Path) -> None:
    async with on_host(tmp_path) as bridge:
        attempt_id = await run(bridge, "sh", "-c", STUBBORN)
        await bridge.hub.until(lambda: "up" in output(bridge, attempt_id))
        bridge.stop.set()
        assert (await bridge.hub.over(attempt_id))["failureCode"] == "bridge_stopped"
        await nothing_is_left(bridge, attempt_id)


# -- secrets ----------------------------------------------------------------------------------


@pytest.mark.requirement("B-60")
async def test_secrets_are_in_the_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_API_TOKEN", "canary-of-the-bridge")
    async with on_host(tmp_path) as bridge:
        bridge.secrets |= {SECRET, "canary-of-the-bridge"}
        hub = bridge.hub
        hub.answers["RedeemSecretGrant"] = {"accepted": True, "secrets": {"DEPLOY_KEY": SECRET}}
        script = 'echo "it is $DEPLOY_KEY."; env; echo $$; while [ ! -e go ]; do sleep 0.02; done'
        attempt_id = await run(bridge, "sh", "-c", script, secretGrants=["handle"])
        await hub.until(lambda: output(bridge, attempt_id).strip().rpartition("\n")[2].isdigit())
        lines = output(bridge, attempt_id).splitlines()
        assert lines[0] == "it is ***."
        assert "DEPLOY_KEY=***" in lines
        home = Path(next(line for line in lines if line.startswith("HOME="))[5:])
        command_lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        assert SECRET not in command_lines
        files = [path for path in bridge.state_root.rglob("*") if path.is_file()]
        assert not [str(path) for path in files if SECRET.encode() in path.read_bytes()]
        (home.parent / "tree" / "go").touch()
        assert (await hub.over(attempt_id))["outcome"] == "succeeded"


# -- what an earlier life has left ------------------------------------------------------------


@pytest.mark.requirement("B-80", "B-82", "B-83")
async def test_the_next_life_finds_and_ends_what_a_dead_one_has_left(tmp_path: Path) -> None:
    hub = ScriptedHub(url="http://127.0.0.1:1")
    owner = Owner("runner-1", "an-earlier-life", "attempt-0", 3, "project", TRUST_DOMAIN)
    prepared(settings_for(tmp_path, hub))
    host, pids = await leave(tmp_path, owner, has_ledger=True)
    async with on_host(tmp_path, hub=hub, runner_id="runner-1") as bridge:
        result = await hub.over("attempt-0")
        assert (result["outcome"], result["failureCode"]) == ("failed", "bridge_stopped")
        report = await hub.next("SubmitCleanupReport", attemptId="attempt-0")
        outcomes = {item["role"]: item["outcome"] for item in report["resources"]}
        assert outcomes == {"host-agent": "removed", "host-workspace": "removed"}
        assert report["trigger"] == "startup"
        assert not any(map(alive, pids))
        assert await host.list_resources(attempt_filter(owner)) == []
        await bridge.until_idle()


@pytest.mark.requirement("B-80", "B-82", "B-83")
async def test_what_no_ledger_tells_of_is_found_by_its_mark(tmp_path: Path) -> None:
    hub = ScriptedHub(url="http://127.0.0.1:1")
    owner = Owner("runner-1", "an-earlier-life", "attempt-0", 3, "project", TRUST_DOMAIN)
    stranger = Owner("runner-2", "another", "attempt-0", 3, "project", TRUST_DOMAIN)
    prepared(settings_for(tmp_path, hub))
    host, pids = await leave(tmp_path, owner, has_ledger=False)
    _, others = await leave(tmp_path, stranger, has_ledger=False)
    try:
        async with on_host(tmp_path, hub=hub, runner_id="runner-1") as bridge:
            report = await hub.next("SubmitCleanupReport", attemptId="attempt-0")
            assert {item["outcome"] for item in report["resources"]} == {"removed"}
            assert len(report["resources"]) == 2
            assert not any(map(alive, pids))
            assert await host.list_resources(attempt_filter(owner)) == []
            await bridge.until_idle()
        assert all(map(alive, others))
        assert len(await host.list_resources(attempt_filter(stranger))) == 2
    finally:
        await host.remove_container(stranger.name("host-agent"))
        await host.remove_volume(stranger.name("host-workspace"))


async def leave(directory: Path, owner: Owner, *, has_ledger: bool) -> tuple[LocalHost, list[str]]:
    """A directory and a daemon whose bridge has died; the daemon's process ids."""
    root = await StateRoot.open(directory / "state", clock=SystemClock())
    if has_ledger:
        now = Now(0, "2026-11-29T14:00:00.000Z")
        resources = ResourceVector(slots=1)
        _, ready = core.reserve(owner, "offer", resources, now, Runtime.HOST)
        records = [*ready.records, moment_record(RecordKind.STARTED, now)]
        ledger = await root.ledgers.create(owner.attempt_id, owner.fence)
        await ledger.append_all([(record.kind, record.data) for record in records])
        await root.ledgers.close()
    host = LocalHost(root.host, SystemClock())
    volume = owner.name("host-workspace")
    await host.create_volume(volume, owner.labels("host-workspace"))
    pids = directory / f"pids-{owner.runner_id}"
    script = f"{DAEMON} echo $! > {pids}"
    program = HostProgram(
        argv=("sh", "-c", script),
        directory=host.path(volume),
        environment={"PATH": os.environ["PATH"]},
        labels=owner.labels("host-agent"),
    )
    name = owner.name("host-agent")
    await host.create_container(name, program)
    await host.wait_container(name, timeout_ms=10_000)
    host._programs.pop(name).close()
    found = pids.read_text().split()
    assert all(map(alive, found))
    return host, found


async def reap_orphans(bridge: Bridge) -> dict[str, Any]:
    """The hub's reap action; its outcome."""
    identity = bridge.runner.identity
    reap = {"requestId": "r", "runnerId": identity.runner_id, "scope": "orphans"}
    bridge.hub.send("Reap", {**reap, "runnerInstanceId": identity.runner_instance_id})
    return await bridge.hub.next("SubmitReapOutcome", requestId="r")


@pytest.mark.requirement("B-86")
async def test_what_resists_keeps_its_capacity_until_a_pass_has_removed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_host(tmp_path, max_concurrent_sandboxes=1) as bridge:

        def resist(path: Path) -> bool:
            raise PermissionError(errno.EPERM, "it is somebody else's")

        with monkeypatch.context() as patch:
            patch.setattr(host_runtime, "remove_tree", resist)
            attempt_id = await run(bridge, "true")
            report = await bridge.hub.next("SubmitCleanupReport", attemptId=attempt_id)
            failed = [i["role"] for i in report["resources"] if i["outcome"] == "failed"]
            assert failed == ["host-workspace"]
            runner = bridge.runner
            await wait_for(lambda: runner.admission.count(ReservationState.DEGRADED) == 1)
            assert runner.admission.used.slots == 1
            offer = bridge.offer(policy="host")
            bridge.hub.send("Offer", offer)
            assert (await bridge.hub.decision(offer))["reasonCode"] == "capacity_slots"
        outcome = await reap_orphans(bridge)
        assert (outcome["failed"], outcome["degradedReservationCount"]) == (0, 0)
        await bridge.until_idle()
        assert await held(bridge) == []


@pytest.mark.requirement("B-86")
async def test_a_result_that_something_may_still_write_is_a_failure_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_host(tmp_path) as bridge:
        remove = LocalHost.remove_container

        async def resist(host: LocalHost, container: str) -> None:
            if container.startswith("forge-host-agent-"):
                raise RefusedError(f"cannot end {container}: it hides", code="process_resists")
            await remove(host, container)

        with monkeypatch.context() as patch:
            patch.setattr(LocalHost, "remove_container", resist)
            attempt_id = await run(bridge, "true")
            result = await bridge.hub.next("SubmitDispatchResult", attemptId=attempt_id)
            assert result["failureCode"] == "agent_failed"
            assert "it hides" in result["summary"]
            # A pass leaves alone what its own teardown is still at.
            admission = bridge.runner.admission
            await wait_for(lambda: admission.count(ReservationState.DEGRADED) == 1)
        await reap_orphans(bridge)
        await bridge.until_idle()
        assert await held(bridge) == []


async def test_the_hub_is_told_no_path_of_the_host(tmp_path: Path) -> None:
    async with on_host(tmp_path) as bridge:
        attempt_id = await run(bridge, "true")
        await bridge.hub.over(attempt_id)
        await nothing_is_left(bridge, attempt_id)
        told = json.dumps([call.payload for call in bridge.hub.calls])
        assert str(bridge.state_root) not in told
