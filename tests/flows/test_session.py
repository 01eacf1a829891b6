"""The connection: who we are, in which order things happen, and what ends it (B-01, B-07, B-08)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from bridge_parts import (
    Bridge,
    HastyClock,
    memory_bridge,
    prepared,
    settings_for,
    wait_for,
)
from scripted_hub import TOKEN, HubException, ScriptedHub
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forge_bridge.flows import heartbeat
from forge_bridge.repositories import REGISTRY_FILE
from forge_core.connection import ConnectionPhase
from forge_core.errors import HubRefused, RefusedError
from forge_edges.clock import SystemClock

PROMPT_S = 2.0
"""Nothing here needs longer when it is prompt, and every timeout of the wire is longer."""


def order(hub: ScriptedHub, connection: int) -> list[str]:
    """The methods of one connection in the order of their first call."""
    return list(dict.fromkeys(c.method for c in hub.calls if c.connection == connection))


@pytest.mark.requirement("B-01", "B-06", "B-08")
async def test_the_first_connection_carries_the_token_and_says_who_we_are(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        assert hub.requests[:2] == [
            ("/hubs/runner/negotiate", f"Bearer {TOKEN}"),
            ("/hubs/runner", f"Bearer {TOKEN}"),
        ]
        assert order(hub, 1) == ["RegisterRunner", "ReadAttemptSnapshot", "Heartbeat"]
        registered = hub.of("RegisterRunner")[0]
        assert registered["protocolVersion"] == 2
        assert registered["repositories"] == ["sample"]
        heartbeat = hub.of("Heartbeat")[0]
        assert heartbeat["runnerInstanceId"] == registered["runnerInstanceId"]
        assert heartbeat["resourceCapacity"]["slots"] == 2
        assert (heartbeat["sequence"], heartbeat["state"]) == (1, "online")


@pytest.mark.requirement("B-01")
async def test_a_refused_token_waits_the_longest_and_says_so_once(tmp_path: Path) -> None:
    hub = ScriptedHub(refusals=[Response(status_code=401)])
    async with memory_bridge(tmp_path, hub, online=False) as bridge:
        await wait_for(lambda: bridge.logged("hub not connected"))
        (line,) = bridge.logged("hub not connected")
        assert line["retry_in_ms"] == 60_000
        assert "401" in line["reason"]
        assert len(hub.requests) == 1


@pytest.mark.requirement("B-01", "B-08")
async def test_a_hub_that_answers_no_heartbeat_is_connected_to_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "MIN_ANSWER_MS", 300)
    hub = ScriptedHub(heartbeat_interval_ms=100)
    async with memory_bridge(tmp_path, hub, clock=HastyClock()) as bridge:
        hub.answers["Heartbeat"] = lambda _: anyio.sleep_forever()
        before = hub.connected
        await hub.until(lambda: hub.connected > before)
        del hub.answers["Heartbeat"]
        await hub.until(lambda: [c for c in hub.calls if c.connection == hub.connected][3:])
        await wait_for(lambda: bridge.service.session.phase is ConnectionPhase.ONLINE)
        assert "3 heartbeats in a row" in bridge.logged("hub not connected")[0]["reason"]


@pytest.mark.requirement("B-08")
async def test_a_heartbeat_that_is_answered_with_an_error_ends_nothing(tmp_path: Path) -> None:
    hub = ScriptedHub(heartbeat_interval_ms=100)
    async with memory_bridge(tmp_path, hub) as bridge:
        hub.answers["Heartbeat"] = HubException("the database is busy")
        await wait_for(
            lambda: len(bridge.logged("cannot deliver a heartbeat")) > heartbeat.MAX_UNANSWERED
        )
        assert hub.connected == 1


@pytest.mark.requirement("B-01")
async def test_a_hub_that_asks_to_wait_is_obeyed(tmp_path: Path) -> None:
    busy = Response(status_code=503, headers={"Retry-After": "120"})
    async with memory_bridge(tmp_path, ScriptedHub(refusals=[busy]), online=False) as bridge:
        await wait_for(lambda: bridge.logged("hub not connected"))
        assert bridge.logged("hub not connected")[0]["retry_in_ms"] >= 120_000
        assert len(bridge.hub.requests) == 1


@pytest.mark.requirement("B-01", "B-20")
@pytest.mark.parametrize(
    "answer",
    [
        {"accepted": False, "reason": "trust_domain_unknown", "detail": "nobody knows it"},
        {"accepted": True, "heartbeatIntervalMs": 0},
        {"accepted": True, "heartbeatIntervalMs": 10**12},
        {"accepted": "yes"},
        [],
        None,
    ],
    ids=["refused", "no interval", "endless interval", "ill-typed", "array", "null"],
)
async def test_a_registration_that_fails_for_good_is_no_tight_loop(
    tmp_path: Path, answer: dict[str, object]
) -> None:
    hub = ScriptedHub(answers={"RegisterRunner": lambda _payload: answer})
    async with memory_bridge(tmp_path, hub, online=False) as bridge:
        await wait_for(lambda: bridge.logged("hub not connected"))
        (line,) = bridge.logged("hub not connected")
        assert line["retry_in_ms"] == 60_000
        assert len(hub.of("RegisterRunner")) == 1
        if isinstance(answer, dict) and "detail" in answer:
            assert "trust_domain_unknown: nobody knows it" in line["reason"]


async def test_an_error_of_the_hub_while_registering_is_tried_again(tmp_path: Path) -> None:
    hub = ScriptedHub(answers={"RegisterRunner": lambda _payload: HubException("starting")})
    async with memory_bridge(tmp_path, hub, clock=HastyClock(), online=False):
        await hub.next("RegisterRunner", count=2)
        hub.answers.clear()
        await hub.online()


@pytest.mark.requirement("B-01", "B-81", "B-83")
async def test_after_a_loss_everything_happens_in_order_again(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        running = await bridge.run("wait")
        await hub.event(running, "agent.started")
        hub.answers["SubmitDispatchEvent"] = hub.never
        hub.answers["SubmitDispatchResult"] = hub.never
        done = await bridge.run("true")
        await hub.next("SubmitDispatchResult", attemptId=done)
        hub.snapshot = [{"attemptId": running, "fence": 1, "state": "running"}]
        settled = anyio.Event()

        async def snapshot(_payload: object) -> object:
            await settled.wait()
            return {"accepted": True, "attempts": hub.snapshot}

        hub.answers = {"ReadAttemptSnapshot": snapshot}
        hub.drop()
        await hub.next("ReadAttemptSnapshot", count=2)
        offer = bridge.offer()
        hub.send("Offer", offer)
        await wait_for(lambda: bridge.is_running(running))
        assert order(hub, 2) == ["RegisterRunner", "ReadAttemptSnapshot"]
        settled.set()
        assert (await hub.decision(offer))["decision"] == "accepted"
        await hub.over(done)
        await hub.online(2)
        assert order(hub, 2)[:2] == ["RegisterRunner", "ReadAttemptSnapshot"]
        hub.send("Cancel", {"attemptId": running, "fence": 1})
        assert (await hub.over(running))["failureCode"] == "cancelled"


@pytest.mark.requirement("B-01", "B-04")
@pytest.mark.parametrize("ending", ["drop", "close", "refuse"])
async def test_running_attempts_survive_a_lost_hub(tmp_path: Path, ending: str) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        attempt_id = await bridge.run("wait")
        await hub.event(attempt_id, "agent.started")
        hub.snapshot = [{"attemptId": attempt_id, "fence": 1, "state": "running"}]
        if ending == "refuse":
            hub.refusals = [Response(status_code=500), Response(status_code=404)]
        if ending == "close":
            hub.close("restarting", allow_reconnect=True)
        else:
            hub.drop()
        await hub.online(2)
        assert bridge.is_running(attempt_id)
        hub.send("Cancel", {"attemptId": attempt_id, "fence": 1})
        await hub.over(attempt_id)


async def test_a_hub_that_does_not_invite_us_back_is_given_time(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        bridge.hub.close("go away", allow_reconnect=False)
        await wait_for(lambda: bridge.logged("hub not connected"))
        (line,) = bridge.logged("hub not connected")
        assert line["retry_in_ms"] >= 10_000
        assert "go away" in line["reason"]


@pytest.mark.requirement("B-01")
async def test_one_connection_without_a_loop(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, attend=False) as bridge:
        hub = bridge.hub
        hub.refusals = [Response(status_code=403)]
        with pytest.raises(HubRefused):
            await bridge.service.connect_once()
        hub.answers["RegisterRunner"] = {"accepted": False, "reason": "unknown_runner"}
        with pytest.raises(RefusedError, match="unknown_runner"):
            await bridge.service.connect_once()
        hub.answers.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bridge.service.connect_once)
            await hub.online()
            await hub.over(await bridge.run("true"))
            hub.close()
        assert bridge.service.session.phase is ConnectionPhase.DISCONNECTED
        assert hub.connected == 2


def _connecting(bridge: Bridge) -> bool:
    return bridge.service.session.phase is ConnectionPhase.CONNECTING


def _registering(bridge: Bridge) -> bool:
    return bool(bridge.hub.of("RegisterRunner"))


def _reconciling(bridge: Bridge) -> bool:
    return bool(bridge.hub.of("ReadAttemptSnapshot"))


def _waiting(bridge: Bridge) -> bool:
    return bool(bridge.logged("hub not connected"))


def _online(bridge: Bridge) -> bool:
    return bool(bridge.hub.of("Heartbeat"))


@pytest.mark.requirement("B-01")
@pytest.mark.parametrize(
    ("reached", "silent"),
    [
        (_connecting, "negotiate"),
        (_registering, "RegisterRunner"),
        (_reconciling, "ReadAttemptSnapshot"),
        (_waiting, "refused"),
        (_online, "Heartbeat"),
    ],
    ids=["connecting", "registering", "reconciling", "backing off", "online"],
)
async def test_stop_ends_promptly_wherever_the_connection_stands(
    tmp_path: Path, reached: Callable[[Bridge], bool], silent: str
) -> None:
    hub = ScriptedHub(answers={silent: lambda _payload: anyio.sleep_forever()})
    if silent == "negotiate":
        hub.refusals = [SilentResponse()]
    if silent == "refused":
        hub.refusals = [Response(status_code=503, headers={"Retry-After": "60"})]
    async with memory_bridge(tmp_path, hub, clock=SystemClock(), online=False) as bridge:
        await wait_for(lambda: reached(bridge))
        bridge.stop.set()
        with anyio.fail_after(PROMPT_S):
            await bridge.stopped.wait()
        assert bridge.service.session.phase is ConnectionPhase.DISCONNECTED


class SilentResponse(Response):
    """Never comes."""

    async def __call__(self, _scope: Scope, receive: Receive, _send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue


@pytest.mark.requirement("B-08")
async def test_a_change_is_told_soon_and_an_interval_is_kept(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, ScriptedHub(heartbeat_interval_ms=100)) as bridge:
        await bridge.hub.next("Heartbeat", sequence=4)
    async with memory_bridge(tmp_path, ScriptedHub(heartbeat_interval_ms=600_000)) as bridge:
        hub = bridge.hub
        attempt_id = await bridge.run("wait")
        await hub.until(lambda: hub.of("Heartbeat", activeCount=1))
        (told,) = hub.of("Heartbeat", activeCount=1)[0]["attempts"]
        assert told == {"attemptId": attempt_id, "fence": 1, "state": "active"}
        hub.send("Cancel", {"attemptId": attempt_id, "fence": 1})
        await hub.over(attempt_id)
        await hub.until(lambda: hub.of("Heartbeat")[-1]["attempts"] == [])
        assert hub.of("Heartbeat")[-1]["usedResources"]["slots"] == 0


@pytest.mark.requirement("B-87")
async def test_settings_come_with_every_answer(tmp_path: Path) -> None:
    draining = {"draining": True, "hostFallbackEnabled": False}
    register = {"accepted": True, "heartbeatIntervalMs": 100, "settings": draining}
    hub = ScriptedHub(answers={"RegisterRunner": register})
    async with memory_bridge(tmp_path, hub) as bridge:
        await hub.next("Heartbeat", state="draining")
        hub.answers["Heartbeat"] = {
            "accepted": True,
            "settings": {"draining": False, "hostFallbackEnabled": True},
        }
        await hub.next("Heartbeat", state="online")
        hub.answers["Heartbeat"] = {"accepted": True}
        await hub.next("Heartbeat", count=len(hub.of("Heartbeat")) + 2)
        bridge.drain(True)
        await hub.until(lambda: hub.of("Heartbeat")[-1]["state"] == "draining")


@pytest.mark.requirement("B-08")
async def test_a_hub_that_garbles_its_answers_still_hears_the_next_heartbeat(
    tmp_path: Path,
) -> None:
    answers = iter(
        [
            HubException("oh"),
            None,
            "text",
            {"accepted": True, "settings": "garbage"},
            {"accepted": True, "settings": {"draining": "yes"}},
            {"accepted": False, "reason": "unknown_runner"},
        ]
    )
    hub = ScriptedHub(heartbeat_interval_ms=100)
    hub.answers["Heartbeat"] = lambda _payload: next(answers, {"accepted": True})
    async with memory_bridge(tmp_path, hub) as bridge:
        await hub.next("Heartbeat", sequence=9)
        assert hub.connected == 1
        assert not bridge.runner.hub_settings.draining


@pytest.mark.requirement("B-01")
async def test_a_refusal_of_any_length_costs_no_more_than_the_connection(tmp_path: Path) -> None:
    refusal = {"accepted": False, "reason": "r" * 256, "detail": "d" * 16_384}
    hub = ScriptedHub(answers={"RegisterRunner": refusal})
    async with memory_bridge(tmp_path, hub, online=False) as bridge:
        await hub.next("RegisterRunner")
        await wait_for(lambda: bridge.service.session.last_error)
        status = bridge.state_root / "status.json"
        await wait_for(lambda: "lastError" in status.read_text())
        hub.answers.clear()


@pytest.mark.requirement("B-07", "B-08")
async def test_a_hub_that_takes_neither_heartbeats_nor_decisions_is_said_so(
    tmp_path: Path,
) -> None:
    no = {"accepted": False, "reason": "unknown_runner"}
    hub = ScriptedHub(answers={"Heartbeat": no, "SubmitOfferDecision": no})
    async with memory_bridge(tmp_path, hub) as bridge:
        await bridge.accept()
        await wait_for(lambda: bridge.logged("cannot deliver an offer decision"))
        await wait_for(lambda: bridge.logged("the hub refuses a heartbeat"))
        assert bridge.logged("the hub refuses a heartbeat")[0]["reason"] == "unknown_runner"


def serve_far_too_much(state_root: Path) -> None:
    """A registry that no ``add-repo`` would write."""
    names = {f"{'n' * 40}-{number}": "/clone" for number in range(1_000)}
    (state_root / REGISTRY_FILE).write_text(json.dumps({"version": 1, "repositories": names}))


@pytest.mark.requirement("B-06", "B-07")
async def test_a_registration_that_no_hub_takes_is_refused_at_the_start(tmp_path: Path) -> None:
    hub = ScriptedHub(url="http://127.0.0.1:1")
    prepared(settings_for(tmp_path, hub))
    serve_far_too_much(tmp_path / "state")
    with pytest.raises(RefusedError, match="forge-bridge remove-repo NAME") as refused:
        async with memory_bridge(tmp_path, hub):
            pass
    assert refused.value.code == "configuration"
    assert not hub.requests


@pytest.mark.requirement("B-06", "B-07")
async def test_one_that_has_grown_since_is_refused_by_name_and_not_sent(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        serve_far_too_much(bridge.state_root)
        bridge.hub.drop()
        await wait_for(lambda: "remove-repo" in str(bridge.service.session.last_error))
        await wait_for(lambda: bridge.logged("hub not connected")[-1]["retry_in_ms"] == 60_000)
        assert order(bridge.hub, 2) == []
