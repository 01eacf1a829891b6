"""Attempts on the host: only where all have agreed, and with every end of a sandbox (B-53)."""

from __future__ import annotations

import base64
import errno
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from bridge_parts import (
    KEY,
    TRUST_DOMAIN,
    Bridge,
    HastyClock,
    git,
    memory_bridge,
    prepared,
    settings_for,
    wait_for,
)
from memory_engine import MemoryEngine
from scripted_hub import ScriptedHub, renewal

from forge_bridge.state_root import StateRoot
from forge_core import attempt as core
from forge_core.attempt import Now
from forge_core.attempt_records import moment_record
from forge_core.errors import EngineUnreachable
from forge_core.labels import Owner, attempt_filter, runner_filter
from forge_core.ports import HostProgram
from forge_core.ready import RecordKind
from forge_core.resources import ResourceVector
from forge_core.wire.codes import Runtime
from forge_edges import host_runtime
from forge_edges.clock import SystemClock
from forge_edges.host_runtime import LocalHost

pytestmark = pytest.mark.requirement("B-53")

SECRET = "s3cret-with-many-words-in-it"
DAEMON = "setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 1; done' >/dev/null 2>&1 & "
STUBBORN = f"trap '' TERM HUP INT; {DAEMON} echo up; while :; do sleep 1; done"


class WallClock(HastyClock):
    """A wall clock that a test steps."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = timedelta()

    def utc(self) -> str:
        now = datetime.fromisoformat(super().utc()) + self.offset
        return now.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def on_host(directory: Path, **more: Any) -> AbstractAsyncContextManager[Bridge]:
    """A bridge without a sandbox, whose operator allows the host."""
    chosen = {"runtimes": (Runtime.HOST,), "allow_host_execution": True, **more}
    return memory_bridge(directory, **chosen)


def permission(ahead: timedelta = timedelta(days=1)) -> dict[str, str]:
    expires_at = (datetime.now(UTC) + ahead).isoformat(timespec="milliseconds")
    return {"reason": "the engine is being replaced", "expiresAt": expires_at}


def enable_fallback(bridge: Bridge, enabled: bool = True) -> None:
    settings = {"draining": False, "hostFallbackEnabled": enabled}
    bridge.hub.send("RunnerSettings", {"settings": settings})


async def fallback_enabled(bridge: Bridge, enabled: bool = True) -> None:
    enable_fallback(bridge, enabled)
    await wait_for(lambda: bridge.runner.hub_settings.host_fallback_enabled is enabled)


async def run(bridge: Bridge, *argv: str, **more: Any) -> str:
    """Start an attempt whose policy is the host; its id."""
    offer = await bridge.accept(policy="host")
    bridge.hub.send("Start", bridge.start(offer, *argv, **more))
    return str(offer["attemptId"])


async def held(bridge: Bridge) -> list[str]:
    """What is on the host for this runner, by role, as anybody may see it."""
    runner = bridge.runner
    listed = await runner.host.list_resources(runner_filter(runner.identity.runner_id))
    return sorted(found.labels["dev.forge.role"] for found in listed)


async def nothing_is_left(bridge: Bridge, attempt_id: str) -> list[tuple[str, str]]:
    """The capacity is whole, nothing is there, and the report says so; its roles and outcomes."""
    await bridge.until_idle()
    assert await held(bridge) == []
    assert list((bridge.state_root / "host").iterdir()) == []
    report = await bridge.hub.next("SubmitCleanupReport", attemptId=attempt_id)
    assert {item["outcome"] for item in report["resources"]} <= {"removed", "absent"}
    return sorted((item["kind"], item["role"]) for item in report["resources"])


def output(bridge: Bridge, attempt_id: str, stream: str = "stdout") -> str:
    logs = bridge.hub.of("SubmitDispatchEvent", attemptId=attempt_id, type="log")
    return "".join(log["payload"]["text"] for log in logs if log["payload"]["stream"] == stream)


def alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# -- the whole way ----------------------------------------------------------------------------


async def test_an_attempt_goes_through_and_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "git status --porcelain; git rev-list --count HEAD; git remote; pwd; "
        f"echo warned >&2; echo changed > README; {DAEMON} echo $!"
    )
    async with on_host(tmp_path) as bridge:
        attempt_id = await run(bridge, "sh", "-c", script)
        result = await bridge.hub.over(attempt_id)
        assert (result["outcome"], result["exitCode"]) == ("succeeded", 0), result
        count, where, daemon = output(bridge, attempt_id).split()
        assert (count, Path(where).name) == ("1", "tree")
        assert Path(where).parent.parent == bridge.state_root / "host"
        assert output(bridge, attempt_id, "stderr") == "warned\n"
        assert not alive(daemon)
        store = bridge.state_root / "repositories" / "sample.git"
        commit = result["resultCommit"]
        assert git(store, "rev-parse", f"{commit}^@") == bridge.commit
        assert git(store, "show", f"{commit}:README") == "changed"
        assert await nothing_is_left(bridge, attempt_id) == [
            ("container", "host-agent"),
            ("container", "host-helper"),
            ("volume", "host-workspace"),
        ]
        warning = await bridge.hub.event(attempt_id, "warning")
        assert warning["payload"]["code"] == "not_contained"
        assert "its policy" in warning["payload"]["detail"]
        inventory = await bridge.hub.event(attempt_id, "inventory")
        assert [c["role"] for c in inventory["payload"]["containers"]] == ["host-agent"]
        assert [v["role"] for v in inventory["payload"]["volumes"]] == ["host-workspace"]
        kinds = [e["type"] for e in bridge.hub.of("SubmitDispatchEvent", attemptId=attempt_id)]
        assert "image.resolved" not in kinds
        assert {"agent.started", "agent.exited", "output.imported", "teardown.finished"} < {*kinds}


async def test_the_decision_says_where_it_will_run(tmp_path: Path) -> None:
    async with on_host(tmp_path) as bridge:
        offer = await bridge.accept(policy="host")
        assert (await bridge.hub.decision(offer))["runtime"] == "host"


async def test_an_agent_that_fails_says_how(tmp_path: Path) -> None:
    async with on_host(tmp_path) as bridge:
        failed = await run(bridge, "sh", "-c", "echo x > README; exit 3")
        result = await bridge.hub.over(failed)
        assert (result["failureCode"], result["exitCode"]) == ("agent_failed", 3)
        missing = await run(bridge, "no-such-command")
        result = await bridge.hub.over(missing)
        assert (result["failureCode"], result["exitCode"]) == ("agent_failed", 127)
        await nothing_is_left(bridge, missing)


async def test_a_commit_that_nobody_has_is_refused_by_name(tmp_path: Path) -> None:
    async with on_host(tmp_path) as bridge:
        attempt_id = await run(bridge, "true", inputCommit="0" * 39 + "1")
        assert (await bridge.hub.over(attempt_id))["failureCode"] == "workspace_invalid"
        await bridge.until_idle()


@pytest.mark.requirement("B-52")
async def test_the_contract_of_the_approved_commit_counts_here_too(tmp_path: Path) -> None:
    async with on_host(tmp_path) as bridge:
        clone = bridge.state_root.parent / "clone"
        (clone / ".forge").mkdir()
        contract = "version: 1\nenvironment: {GREETING: hello}\n"
        (clone / ".forge" / "forge.sandbox.yml").write_text(contract)
        git(clone, "add", "--all")
        git(clone, "commit", "--quiet", "--message=Contract")
        commit = git(clone, "rev-parse", "HEAD")
        offer = await bridge.accept(policy="host", approvedCommit=commit)
        start = bridge.start(offer, "sh", "-c", "echo $GREETING", inputCommit=commit)
        bridge.hub.send("Start", {**start, "approvedCommit": commit})
        assert (await bridge.hub.over(offer["attemptId"]))["outcome"] == "succeeded"
        assert output(bridge, offer["attemptId"]) == "hello\n"


# -- who must agree ---------------------------------------------------------------------------


async def test_a_fallback_runs_where_owner_and_operator_have_agreed(tmp_path: Path) -> None:
    async with on_host(tmp_path) as bridge:
        await fallback_enabled(bridge)
        offer = await bridge.accept(hostFallback=permission())
        bridge.hub.send("Start", bridge.start(offer, "true"))
        assert (await bridge.hub.over(offer["attemptId"]))["outcome"] == "succeeded"
        warning = await bridge.hub.event(offer["attemptId"], "warning")
        assert "the engine is being replaced" in warning["payload"]["detail"]


@pytest.mark.requirement("B-19")
@pytest.mark.parametrize(
    ("enabled", "allowed", "offer", "code"),
    [
        (False, True, {"hostFallback": permission()}, "host_fallback_denied"),
        (True, False, {"hostFallback": permission()}, "host_execution_denied"),
        (True, True, {"hostFallback": permission(timedelta(seconds=-1))}, "host_fallback_denied"),
        (True, True, {"hostFallback": permission(timedelta(days=31))}, "host_fallback_denied"),
        (True, True, {"hostFallback": {**permission(), "reason": " "}}, "host_fallback_denied"),
        (True, True, {"hostFallback": {"reason": "r"}}, "malformed"),
        (True, True, {"hostFallback": {**permission(), "expiresAt": "soon"}}, "malformed"),
        (
            True,
            True,
            {"hostFallback": {"reason": "r", "expiresAt": "2026-99-01T00:00:00Z"}},
            "host_fallback_denied",
        ),
        (True, True, {}, "runtime_unavailable"),
        (
            True,
            True,
            {"hostFallback": permission(), "policy": "sandbox_required"},
            "runtime_unavailable",
        ),
        (True, False, {"policy": "host"}, "host_execution_denied"),
        (
            True,
            True,
            {"policy": "host", "requirements": {"services": [{"name": "redis"}]}},
            "policy_unsatisfied",
        ),
    ],
)
async def test_one_no_is_enough(
    tmp_path: Path, enabled: bool, allowed: bool, offer: dict[str, Any], code: str
) -> None:
    async with on_host(tmp_path, allow_host_execution=allowed) as bridge:
        await fallback_enabled(bridge, enabled)
        asked = bridge.offer(**offer)
        bridge.hub.send("Offer", asked)
        decision = await bridge.hub.decision(asked)
        assert (decision["decision"], decision["reasonCode"]) == ("rejected", code)
        assert bridge.is_idle


async def test_a_sandbox_that_is_there_is_preferred(tmp_path: Path) -> None:
    async with on_host(tmp_path, runtimes=(Runtime.DOCKER, Runtime.HOST)) as bridge:
        await fallback_enabled(bridge)
        offer = await bridge.accept(hostFallback=permission())
        assert (await bridge.hub.decision(offer))["runtime"] == "docker"


async def test_an_engine_that_went_away_leaves_the_host_to_those_who_may(tmp_path: Path) -> None:
    engine = MemoryEngine()
    async with on_host(tmp_path, engine=engine, runtimes=(Runtime.DOCKER, Runtime.HOST)) as bridge:
        await fallback_enabled(bridge)
        bridge.runner.engine_away = "it does not answer"
        engine.faults["list_resources"] = EngineUnreachable("it does not answer")
        asked = bridge.offer()
        bridge.hub.send("Offer", asked)
        assert (await bridge.hub.decision(asked))["reasonCode"] == "runtime_unavailable"
        offer = await bridge.accept(hostFallback=permission())
        bridge.hub.send("Start", bridge.start(offer, "true"))
        assert (await bridge.hub.over(offer["attemptId"]))["outcome"] == "succeeded"
        await nothing_is_left(bridge, offer["attemptId"])
        engine.faults.clear()


async def test_a_permission_that_ends_before_the_start_starts_nothing(tmp_path: Path) -> None:
    clock = WallClock()
    async with on_host(tmp_path, clock=clock) as bridge:
        await fallback_enabled(bridge)
        trace = tmp_path / "trace"
        offer = await bridge.accept(hostFallback=permission(timedelta(minutes=5)))
        clock.offset = timedelta(minutes=6)
        bridge.hub.send("Start", bridge.start(offer, "touch", str(trace)))
        await refused_at_start(bridge, offer, "host_fallback_denied", "ended at")
        assert not trace.exists()


async def test_a_setting_that_is_taken_back_before_the_start_starts_nothing(
    tmp_path: Path,
) -> None:
    async with on_host(tmp_path) as bridge:
        await fallback_enabled(bridge)
        trace = tmp_path / "trace"
        offer = await bridge.accept(hostFallback=permission())
        await fallback_enabled(bridge, False)
        bridge.hub.send("Start", bridge.start(offer, "touch", str(trace)))
        await refused_at_start(bridge, offer, "host_fallback_denied", "not enabled")
        assert not trace.exists()


async def test_what_is_taken_back_while_the_workspace_is_made_starts_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_host(tmp_path) as bridge:
        await fallback_enabled(bridge)
        unpack = LocalHost.unpack

        async def slow(host: LocalHost, volume: str, archive: Any) -> None:
            await unpack(host, volume, archive)
            await fallback_enabled(bridge, False)

        monkeypatch.setattr(LocalHost, "unpack", slow)
        trace = tmp_path / "trace"
        offer = await bridge.accept(hostFallback=permission())
        bridge.hub.send("Start", bridge.start(offer, "touch", str(trace)))
        await refused_at_start(bridge, offer, "host_fallback_denied", "not enabled")
        assert not trace.exists()
        await nothing_is_left(bridge, offer["attemptId"])


async def refused_at_start(bridge: Bridge, offer: dict[str, Any], code: str, why: str) -> None:
    result = await bridge.hub.over(offer["attemptId"])
    assert (result["outcome"], result["failureCode"]) == ("failed", "start_timeout")
    assert code in result["summary"]
    assert why in result["summary"]
    await bridge.until_idle()


# -- every end --------------------------------------------------------------------------------


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
            await wait_for(lambda: runner.admission.used.slots == 1 and runner.attempts)
            offer = bridge.offer(policy="host")
            bridge.hub.send("Offer", offer)
            assert (await bridge.hub.decision(offer))["reasonCode"] == "capacity_slots"
        reap = {"requestId": "r", "runnerId": runner.identity.runner_id, "scope": "orphans"}
        instance = runner.identity.runner_instance_id
        bridge.hub.send("Reap", {**reap, "runnerInstanceId": instance})
        outcome = await bridge.hub.next("SubmitReapOutcome", requestId="r")
        assert (outcome["failed"], outcome["degradedReservationCount"]) == (0, 0)
        await bridge.until_idle()
        assert await held(bridge) == []


async def test_the_hub_is_told_no_path_of_the_host(tmp_path: Path) -> None:
    async with on_host(tmp_path) as bridge:
        attempt_id = await run(bridge, "true")
        await bridge.hub.over(attempt_id)
        await nothing_is_left(bridge, attempt_id)
        told = json.dumps([call.payload for call in bridge.hub.calls])
        assert str(bridge.state_root) not in told


@pytest.fixture(autouse=True)
async def no_process_is_left(tmp_path: Path) -> AsyncIterator[None]:
    yield
    marked = host_runtime.marks("FORGE_HOST_RESOURCE")
    assert [mark for mark in marked if str(tmp_path) in mark] == []
