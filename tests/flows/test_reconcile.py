"""The snapshot: what the hub believes runs here, and what is done about it (B-81)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bridge_parts import Bridge, memory_bridge, wait_for
from scripted_hub import HubException, ScriptedHub


def entry(attempt_id: str, fence: int = 1, state: str = "running") -> dict[str, object]:
    return {"attemptId": attempt_id, "fence": fence, "state": state}


async def reconnect(bridge: Bridge, *snapshot: dict[str, object]) -> None:
    """Lose the connection, and be told this when it is there again."""
    bridge.hub.snapshot = list(snapshot)
    connections = bridge.hub.connected
    bridge.hub.drop()
    hub = bridge.hub
    await hub.until(
        lambda: any(c.connection > connections and c.method == "Heartbeat" for c in hub.calls)
    )


@pytest.mark.requirement("B-81")
async def test_two_misses_in_a_row_end_an_attempt_and_one_does_not(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        attempt_id = await bridge.run("wait")
        await hub.event(attempt_id, "agent.started")
        await reconnect(bridge)
        await reconnect(bridge, entry(attempt_id))
        await reconnect(bridge)
        assert bridge.is_running(attempt_id)
        await reconnect(bridge)
        result = await hub.over(attempt_id)
        assert (result["outcome"], result["failureCode"]) == ("cancelled", "cancelled")
        assert "does not list it" in result["summary"]


@pytest.mark.requirement("B-81")
async def test_a_higher_fence_ends_it_at_once_wherever_it_is_listed(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        attempt_id = await bridge.run("wait")
        await bridge.hub.event(attempt_id, "agent.started")
        await reconnect(bridge, entry(attempt_id, 5), entry(attempt_id, 3), entry(attempt_id, 1))
        result = await bridge.hub.over(attempt_id, fence=1)
        assert result["failureCode"] == "superseded"


@pytest.mark.requirement("B-81", "B-82")
async def test_what_nobody_here_knows_is_answered(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        listed = (entry("old"), entry("older", 3, "cancelling"), entry("new", 1, "offered"))
        await reconnect(bridge, *listed)
        for attempt_id in ("old", "older"):
            result = await bridge.hub.over(attempt_id)
            assert (result["outcome"], result["failureCode"]) == ("failed", "bridge_stopped")
        assert not bridge.hub.of("SubmitDispatchResult", attemptId="new")


@pytest.mark.requirement("B-81")
async def test_a_stale_list_contradicts_no_result(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        attempt_id = await bridge.run("true")
        await hub.over(attempt_id)
        await bridge.until_idle()
        await reconnect(bridge, entry(attempt_id))
        await hub.over(await bridge.run("true"))
        told = hub.of("SubmitDispatchResult", attemptId=attempt_id)
        assert {result["outcome"] for result in told} == {"succeeded"}


@pytest.mark.requirement("B-81")
async def test_what_was_reserved_meanwhile_is_no_miss(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        offer = await bridge.accept()
        await reconnect(bridge)
        bridge.hub.send("Start", bridge.start(offer))
        assert (await bridge.hub.over(offer["attemptId"]))["outcome"] == "succeeded"


@pytest.mark.requirement("B-81")
async def test_a_snapshot_in_parts(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        attempt_id = await bridge.run("wait")
        parts = [[entry("a")], [], [entry(attempt_id), entry("b")]]
        hub.answers["ReadAttemptSnapshot"] = lambda payload: {
            "accepted": True,
            "parts": 3,
            "attempts": parts[payload["part"] - 1],
        }
        await reconnect(bridge)
        await reconnect(bridge)
        assert [c["part"] for c in hub.of("ReadAttemptSnapshot")[1:]] == [1, 2, 3] * 2
        await hub.over("a")
        await hub.over("b")
        assert bridge.is_running(attempt_id)


@pytest.mark.requirement("B-81")
@pytest.mark.parametrize(
    "answer",
    [
        {"accepted": False, "reason": "busy"},
        {"accepted": True, "parts": 10**9, "attempts": [entry(f"x{n}") for n in range(4_000)]},
    ],
    ids=["none", "endless"],
)
async def test_a_snapshot_that_cannot_be_had_ends_nothing(
    tmp_path: Path, answer: dict[str, Any]
) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        attempt_id = await bridge.run("wait")
        hub.answers["ReadAttemptSnapshot"] = lambda _payload: answer
        for _ in range(3):
            await reconnect(bridge)
        assert bridge.is_running(attempt_id)
        assert not hub.of("SubmitDispatchResult")


@pytest.mark.requirement("B-81", "B-01")
@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"accepted": True, "attempts": [{"attemptId": "../x", "fence": 1, "state": "running"}]},
        {"accepted": True, "attempts": "all"},
        {"accepted": True, "parts": 0},
        HubException("no"),
    ],
    ids=["null", "id", "text", "parts", "error"],
)
async def test_a_snapshot_that_makes_no_sense_is_asked_for_again_later(
    tmp_path: Path, answer: object
) -> None:
    hub = ScriptedHub(answers={"ReadAttemptSnapshot": lambda _payload: answer})
    async with memory_bridge(tmp_path, hub, online=False) as bridge:
        await wait_for(lambda: bridge.logged("hub not connected"))
        assert not hub.of("Heartbeat")
