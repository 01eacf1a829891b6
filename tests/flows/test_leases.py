"""Leases around a real container: what moves a deadline, and that every deadline holds."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from bridge_parts import KEY, real_bridge, wait_for
from scripted_hub import renewal

from engines import Engine
from forge_bridge.attempt_run import AttemptRun

pytestmark = pytest.mark.engine("d26")

GRACE_MS = 1_000
SLACK_MS = 2_500
"""A busy machine's share of every deadline: to kill, to record, to be told."""

DEAF = """
import json, os, sys, time
def say(**frame):
    os.write(1, json.dumps(frame).encode() + b"\\n")
say(type="ready")
orders = json.loads(sys.stdin.readline())
say(type="started")
{lies}
while True:
    time.sleep(60)
"""
"""A PID 1 that obeys nothing: no deadline, no cancel, no signal (PID 1 has no defaults)."""


def lease(ttl_ms: int) -> dict[str, Any]:
    return {"ttlMs": ttl_ms, "sequence": 0, "key": base64.b64encode(KEY).decode()}


def limits(**more: int) -> dict[str, int]:
    return {"hardWallMs": 60_000, "idleMs": 60_000, "maxOutputBytes": 1 << 20, **more}


def deadline_ms(run: AttemptRun) -> int:
    assert run.state.lease is not None
    return run.state.lease.deadline_ms


@pytest.mark.requirement("B-70")
async def test_a_renewal_that_is_not_right_in_everything_changes_nothing(
    tmp_path: Path, engine: Engine, runner_id: str
) -> None:
    async with real_bridge(tmp_path, engine, runner_id) as bridge:
        hub = bridge.hub
        attempt_id = await bridge.run("sleep", "60", lease=lease(4_000))
        await hub.event(attempt_id, "agent.started")
        run = bridge.runner.attempts[attempt_id, 1]
        hub.send("LeaseUpdate", renewal(attempt_id, 1, 5, KEY, ttl_ms=4_000))
        await wait_for(lambda: run.state.lease is not None and run.state.lease.sequence == 5)
        at_ms = deadline_ms(run)
        good = renewal(attempt_id, 1, 9, KEY)
        lies: list[dict[str, object]] = [
            renewal(attempt_id, 1, 9, bytes(32)),
            {**good, "mac": ""},
            {**good, "mac": str(good["mac"]).rstrip("=")},
            {**good, "ttlMs": 59_999},
            {**good, "issuedAt": "2026-11-29T14:00:00.001Z"},
            {**renewal("another-attempt", 1, 9, KEY), "attemptId": attempt_id},
            {**renewal(attempt_id, 2, 9, KEY), "fence": 1},
            renewal(attempt_id, 2, 9, KEY),
            renewal(attempt_id, 1, 5, KEY),
            renewal(attempt_id, 1, 4, KEY),
        ]
        for lie in lies:
            hub.send("LeaseUpdate", lie)
        hub.send("LeaseUpdate", renewal("another-attempt", 1, 9, KEY))
        hub.send("LeaseUpdate", {**good, "sequence": "9"})
        await wait_for(lambda: run.state.refused_renewals == len(lies))
        assert deadline_ms(run) == at_ms
        result = await hub.over(attempt_id)
        ended_ms = bridge.runner.clock.now_ms()
        assert (result["outcome"], result["failureCode"]) == ("expired", "lease_expired")
        assert 0 <= ended_ms - at_ms < GRACE_MS + SLACK_MS
        hub.send("LeaseUpdate", renewal(attempt_id, 1, 10, KEY))
        (warning,) = hub.of("SubmitDispatchEvent", attemptId=attempt_id, type="warning")
        assert warning["payload"] == {"code": "lease_renewal_refused", "detail": "wrong_mac"}


@pytest.mark.requirement("B-70", "B-71")
async def test_renewals_keep_an_attempt_alive_beyond_its_first_lease(
    tmp_path: Path, engine: Engine, runner_id: str
) -> None:
    async with real_bridge(tmp_path, engine, runner_id) as bridge:
        hub, clock = bridge.hub, bridge.runner.clock
        ttl_ms = 2_000
        attempt_id = await bridge.run("sleep", "60", lease=lease(ttl_ms))
        run = bridge.runner.attempts[attempt_id, 1]
        first_ms, sequence = deadline_ms(run), 0
        while clock.now_ms() < first_ms + ttl_ms // 2:
            sequence += 1
            hub.send("LeaseUpdate", renewal(attempt_id, 1, sequence, KEY, ttl_ms=ttl_ms))
            await clock.sleep_until_ms(clock.now_ms() + ttl_ms // 4)
            assert bridge.is_running(attempt_id)
        result = await hub.over(attempt_id)
        assert result["failureCode"] == "lease_expired"
        assert run.state.refused_renewals == 0
        assert clock.now_ms() - deadline_ms(run) < GRACE_MS + SLACK_MS


CLAIMS_TWICE = """
say(type="expired", which="idle")
say(type="expired", which="lease")
"""


@pytest.mark.requirement("B-71", "B-72")
async def test_the_host_keeps_every_deadline_that_pid_1_ignores(
    tmp_path: Path, engine: Engine, runner_id: str
) -> None:
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "lease_expired": ("", {"lease": lease(3_000)}),
        "hard_wall_expired": ("", {"limits": limits(hardWallMs=2_000)}),
        "idle_expired": ("", {"limits": limits(idleMs=2_000)}),
        "lease_expired although it says idle": (CLAIMS_TWICE, {"lease": lease(3_000)}),
    }
    async with real_bridge(tmp_path, engine, runner_id, max_concurrent_sandboxes=4) as bridge:
        hub, clock, over_ms = bridge.hub, bridge.runner.clock, dict[str, int]()

        async def one(name: str, lies: str, given: dict[str, Any]) -> None:
            sandbox = {"supervisor_source": DEAF.format(lies=lies)}
            attempt_id = await bridge.run(sandbox=sandbox, **given)
            run = bridge.runner.attempts[attempt_id, 1]
            await hub.event(attempt_id, "agent.started")
            assert run.state.lease is not None
            at_ms = run.state.lease.next_deadline()[0]
            result = await hub.over(attempt_id)
            over_ms[name] = clock.now_ms() - at_ms
            found = (result["outcome"], result["failureCode"])
            assert found == ("expired", name.split()[0]), name

        async with anyio.create_task_group() as tasks:
            for name, (lies, given) in cases.items():
                tasks.start_soon(one, name, lies, given)
        assert all(0 <= ms < GRACE_MS + SLACK_MS for ms in over_ms.values()), over_ms
        await bridge.until_idle()
        assert labelled(engine, runner_id) == []


def labelled(engine: Engine, runner_id: str) -> list[str]:
    """The containers of this runner, by another door than the bridge's."""
    wanted = json.dumps({"label": [f"dev.forge.runner-id={runner_id}"]})
    found = engine.api.get("/containers/json", {"all": "1", "filters": wanted})
    return [container["Names"][0] for container in found]
