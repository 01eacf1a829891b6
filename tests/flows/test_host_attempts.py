"""Attempts on the host: the whole way, and only where all have agreed (B-53)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bridge_parts import (
    Bridge,
    git,
)
from host_parts import (
    DAEMON,
    WallClock,
    alive,
    nothing_is_left,
    on_host,
    output,
    permission,
    require_nothing_marked,
    run,
    set_fallback,
)
from memory_engine import MemoryEngine

from forge_core.errors import EngineUnreachable
from forge_core.wire.codes import Runtime
from forge_edges.host_runtime import LocalHost

pytestmark = pytest.mark.requirement("B-53")


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    require_nothing_marked(tmp_path)


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
        await set_fallback(bridge)
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
        await set_fallback(bridge, enabled)
        asked = bridge.offer(**offer)
        bridge.hub.send("Offer", asked)
        decision = await bridge.hub.decision(asked)
        assert (decision["decision"], decision["reasonCode"]) == ("rejected", code)
        assert bridge.is_idle


async def test_a_sandbox_that_is_there_is_preferred(tmp_path: Path) -> None:
    async with on_host(tmp_path, runtimes=(Runtime.DOCKER, Runtime.HOST)) as bridge:
        await set_fallback(bridge)
        offer = await bridge.accept(hostFallback=permission())
        assert (await bridge.hub.decision(offer))["runtime"] == "docker"


async def test_an_engine_that_went_away_leaves_the_host_to_those_who_may(tmp_path: Path) -> None:
    engine = MemoryEngine()
    async with on_host(tmp_path, engine=engine, runtimes=(Runtime.DOCKER, Runtime.HOST)) as bridge:
        await set_fallback(bridge)
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
        await set_fallback(bridge)
        trace = tmp_path / "trace"
        offer = await bridge.accept(hostFallback=permission(timedelta(minutes=5)))
        clock.offset = timedelta(minutes=6)
        bridge.hub.send("Start", bridge.start(offer, "touch", str(trace)))
        await refused_at_start(bridge, offer, "host_fallback_denied", "ended at")
        assert not trace.exists()
        assert never_began(bridge, offer)


async def test_a_setting_that_is_taken_back_before_the_start_starts_nothing(
    tmp_path: Path,
) -> None:
    async with on_host(tmp_path) as bridge:
        await set_fallback(bridge)
        trace = tmp_path / "trace"
        offer = await bridge.accept(hostFallback=permission())
        await set_fallback(bridge, False)
        bridge.hub.send("Start", bridge.start(offer, "touch", str(trace)))
        await refused_at_start(bridge, offer, "host_fallback_denied", "not enabled")
        assert not trace.exists()
        assert never_began(bridge, offer)


async def test_what_is_taken_back_while_the_workspace_is_made_starts_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_host(tmp_path) as bridge:
        await set_fallback(bridge)
        unpack = LocalHost.unpack

        async def slow(host: LocalHost, volume: str, archive: Any) -> None:
            await unpack(host, volume, archive)
            await set_fallback(bridge, False)

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


def never_began(bridge: Bridge, offer: dict[str, Any]) -> bool:
    """No stage was entered: there was nothing to clean up."""
    results = bridge.hub.of("SubmitDispatchResult", attemptId=offer["attemptId"])
    return [result["revision"] for result in results] == [2]
