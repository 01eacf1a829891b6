"""Cancel: whatever the attempt is doing, at once, and whether or not the hub listens (B-04)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from bridge_parts import Bridge, memory_bridge, real_bridge
from memory_engine import Container, MemoryEngine

from engines import Engine

PROMPT_MS = 1_000


def cancel(bridge: Bridge, attempt_id: str, fence: int = 1, **more: Any) -> None:
    bridge.hub.send("Cancel", {"attemptId": attempt_id, "fence": fence, "reason": "enough", **more})


@pytest.mark.requirement("B-04", "B-21")
async def test_a_reserved_attempt_is_released(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, max_concurrent_sandboxes=1) as bridge:
        offer = await bridge.accept()
        cancel(bridge, offer["attemptId"])
        result = await bridge.hub.over(offer["attemptId"])
        assert (result["outcome"], result["failureCode"]) == ("cancelled", "cancelled")
        assert (result["revision"], result["summary"]) == (2, "enough")
        await bridge.until_idle()
        bridge.hub.send("Start", bridge.start(offer))
        bridge.hub.send("Offer", bridge.offer(offer["attemptId"], fence=2))
        await bridge.hub.next("SubmitOfferDecision", attemptId=offer["attemptId"], fence=2)
        assert len(bridge.hub.of("SubmitDispatchResult", fence=1)) == 1


@pytest.mark.requirement("B-04")
async def test_what_is_not_known_is_left_alone(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        attempt_id = await bridge.run("wait")
        await bridge.hub.event(attempt_id, "agent.started")
        cancel(bridge, "unheard-of")
        cancel(bridge, attempt_id, fence=2)
        cancel(bridge, attempt_id, fence=0)
        cancel(bridge, attempt_id, fence=-1)
        cancel(bridge, attempt_id, reason=7)
        await bridge.hub.over(await bridge.run("true"))
        assert bridge.is_running(attempt_id)
        cancel(bridge, attempt_id)
        await bridge.hub.over(attempt_id)
        cancel(bridge, attempt_id)
        await bridge.hub.over(await bridge.run("true"))
        results = bridge.hub.of("SubmitDispatchResult", attemptId=attempt_id)
        assert [r["outcome"] for r in results] == ["cancelled", "cancelled"]


@pytest.mark.requirement("B-04")
async def test_a_cancel_that_comes_right_behind_its_start(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        offer = await bridge.accept()
        bridge.hub.send("Start", bridge.start(offer, "wait"))
        cancel(bridge, offer["attemptId"])
        assert (await bridge.hub.over(offer["attemptId"]))["failureCode"] == "cancelled"
        await bridge.until_idle()


class Stuck:
    """An engine that gets stuck in one method, or a container that gets stuck in its role."""

    def __init__(self, where: str) -> None:
        self.engine = MemoryEngine()
        self.reached = anyio.Event()
        if where in self.engine.programs:
            self.engine.programs[where] = self._program
        else:
            setattr(self.engine, where, self._method)

    async def _method(self, *_arguments: object, **_named: object) -> None:
        self.reached.set()
        await anyio.sleep_forever()

    async def _program(self, container: Container) -> int:
        if container.role == "agent":
            container.frame("ready")
            await container.read_line()
            container.frame("started")
        else:
            await container.read_line()
        self.reached.set()
        await anyio.sleep_forever()
        return 0


@pytest.mark.requirement("B-04", "B-07")
@pytest.mark.parametrize(
    "where",
    [
        "secrets",
        "inspect_image",
        "create_volume",
        "create_container",
        "put_archive",
        "start_container",
        "agent",
        "helper",
    ],
)
async def test_every_stage_ends_at_once_although_the_hub_says_nothing(
    tmp_path: Path, where: str
) -> None:
    stuck = Stuck(where)
    async with memory_bridge(tmp_path, engine=stuck.engine) as bridge:
        hub = bridge.hub

        def reached_and_never(payload: dict[str, Any]) -> object:
            stuck.reached.set()
            return hub.never(payload)

        more = {"secretGrants": ["handle"]} if where == "secrets" else {}
        if where == "secrets":
            hub.answers["RedeemSecretGrant"] = reached_and_never
        attempt_id = await bridge.run("true", sandbox={"kill_grace_ms": 100}, **more)
        with anyio.fail_after(10):
            await stuck.reached.wait()
        hub.fall_silent()
        run = bridge.runner.attempts[attempt_id, 1]
        asked_ms = bridge.runner.clock.now_ms()
        cancel(bridge, attempt_id)
        with anyio.fail_after(10):
            while run.state.phase == "running":
                await bridge.runner.changed.wait()
        # The agent and the helper get their grace and a second to flush.
        grace_ms = 1_100 if where == "agent" else 0
        assert bridge.runner.clock.now_ms() - asked_ms < PROMPT_MS + grace_ms
        await bridge.until_idle()
        assert run.state.failure == "cancelled"
        assert stuck.engine.is_empty
        hub.speak_again()
        hub.drop()
        assert (await hub.over(attempt_id))["failureCode"] == "cancelled"


@pytest.mark.engine("d26")
@pytest.mark.requirement("B-04", "B-84")
async def test_a_real_container_ends_and_nothing_is_left(
    tmp_path: Path, engine: Engine, runner_id: str
) -> None:
    async with real_bridge(tmp_path, engine, runner_id) as bridge:
        hub = bridge.hub
        attempt_id = await bridge.run("sh", "-c", "trap '' TERM; echo on; sleep 60 & sleep 60")
        await hub.event(attempt_id, "log")
        hub.answers["Heartbeat"] = hub.answers["SubmitDispatchEvent"] = hub.never
        asked_ms = bridge.runner.clock.now_ms()
        cancel(bridge, attempt_id)
        result = await hub.next("SubmitDispatchResult", attemptId=attempt_id)
        grace_ms = 1_000
        assert bridge.runner.clock.now_ms() - asked_ms < PROMPT_MS + grace_ms
        assert (result["outcome"], result["cleanup"]) == ("cancelled", "pending")
        await hub.over(attempt_id)
        await bridge.until_idle()
        wanted = json.dumps({"label": [f"dev.forge.runner-id={runner_id}"]})
        assert engine.api.get("/containers/json", {"all": "1", "filters": wanted}) == []
        hub.speak_again()
        hub.drop()
        await hub.event(attempt_id, "teardown.finished")
