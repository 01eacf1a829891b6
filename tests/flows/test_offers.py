"""Offers: one decision each, one reservation each, never more than there is (B-04, B-21)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from bridge_parts import MIB, Bridge, memory_bridge, wait_for
from scripted_hub import HubException, ScriptedHub

from forge_core.errors import DiskUnusable
from forge_core.wire.codes import RejectionCode, Runtime

FAR_OFF_MS = 8 * 3_600_000


async def decided(bridge: Bridge, **more: Any) -> tuple[str, str | None]:
    """What the bridge says to this offer: the decision and the reason."""
    offer = bridge.offer(**more)
    bridge.hub.send("Offer", offer)
    decision = await bridge.hub.decision(offer)
    return decision["decision"], decision.get("reasonCode")


@pytest.mark.requirement("B-04")
async def test_the_same_offer_again_gets_one_decision_and_one_reservation(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        offer = bridge.offer()
        for _ in range(3):
            bridge.hub.send("Offer", offer)
        first, second, third = [await bridge.hub.decision(offer, n) for n in (1, 2, 3)]
        assert first["decision"] == "accepted"
        assert first == second == third
        assert first["usedResources"]["slots"] == 1
        assert len(bridge.runner.admission.reservations) == 1


@pytest.mark.requirement("B-04", "B-21")
async def test_of_many_offers_for_the_last_slot_exactly_one_is_accepted(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, max_concurrent_sandboxes=1) as bridge:
        offers = [bridge.offer() for _ in range(8)]
        for offer in offers:
            bridge.hub.send("Offer", offer)
        decisions = [await bridge.hub.decision(offer) for offer in offers]
        said = sorted((d["decision"], d.get("reasonCode") or "") for d in decisions)
        assert said == [("accepted", "")] + [("rejected", "capacity_slots")] * 7


@pytest.mark.requirement("B-04", "B-10", "B-20", "B-21", "B-22", "B-25", "B-87")
async def test_every_reason_to_say_no(tmp_path: Path) -> None:
    said = set[str]()

    async def no(code: str, **more: Any) -> None:
        assert await decided(bridge, **more) == ("rejected", code), more
        said.add(code)

    async with memory_bridge(
        tmp_path,
        sandbox_pid_capacity=100,
        sandbox_memory_capacity_bytes=512 * MIB,
        sandbox_cpu_capacity_millis=2000,
    ) as bridge:
        offer = await bridge.accept(resources={"slots": 1, "pids": 16, "memoryBytes": 64 * MIB})
        small = {"slots": 1, "pids": 1, "memoryBytes": 1, "cpuMillis": 1}
        await no("trust_domain_mismatch", trustDomainId="another")
        await no("unknown_repository", repository="unheard-of")
        await no("host_execution_denied", policy="host")
        await no("policy_unsatisfied", policy="sandbox_required")
        await no("policy_unsatisfied", requirements={"networkPolicy": "open_public"})
        await no("policy_unsatisfied", requirements={"services": [{"name": "redis"}]})
        await no("policy_unsatisfied", requirements={"publicationMode": "bridge_push"})
        await no("capacity_slots", resources={"slots": 2})
        await no("capacity_builds", resources={**small, "builds": 2})
        await no("capacity_pids", resources={**small, "pids": 85})
        await no("capacity_memory", resources={**small, "memoryBytes": 449 * MIB})
        await no("capacity_cpu", resources={**small, "cpuMillis": 1001})
        await no("stale_fence", attemptId=offer["attemptId"])
        await no("malformed", policy="nonsense")
        bridge.drain(True)
        await no("draining")
        bridge.drain(False)
        healthy, bridge.runner.disk = bridge.runner.disk, bridge.runner.disk.observe(100, 0)
        await no("disk_pressure")
        bridge.runner.disk = healthy
        bridge.runner.stopping = True
        await no("stopping")
        bridge.runner.stopping = False
        assert bridge.runner.admission.used.slots == 1
    async with memory_bridge(
        tmp_path, runtimes=(Runtime.HOST,), allow_host_execution=True
    ) as bridge:
        await no("runtime_unavailable")
        fallback = {"reason": "urgent", "expiresAt": "2026-11-29T14:00:00.000Z"}
        await no("host_fallback_denied", hostFallback=fallback)
    # No network is made yet, no capacity for disk is set, and expired has a test of its own.
    not_here = {"capacity_networks", "capacity_disk", "expired"}
    assert said | not_here == set(RejectionCode)


@pytest.mark.requirement("B-04")
async def test_a_malformed_offer_is_answered_when_it_says_which_it_is(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        offer = bridge.offer(resources={"slots": "many"})
        bridge.hub.send("Offer", offer)
        decision = await bridge.hub.decision(offer)
        assert (decision["decision"], decision["reasonCode"]) == ("rejected", "malformed")
        assert "resources.slots" in decision["detail"]
        assert "many" not in decision["detail"]
        before = len(bridge.hub.of("SubmitOfferDecision"))
        half: tuple[object, ...] = ({"offerId": "../../etc"}, {"offerId": "x", "attemptId": "y"})
        for nameless in (*half, [], None):
            bridge.hub.send("Offer", nameless)
        elsewhere = bridge.offer(runnerInstanceId="another", resources={"slots": "many"})
        bridge.hub.send("Offer", elsewhere)
        await bridge.accept()
        assert len(bridge.hub.of("SubmitOfferDecision")) == before + 1


@pytest.mark.requirement("B-04")
async def test_a_damaged_copy_takes_back_no_yes(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        offer = await bridge.accept()
        bridge.hub.send("Offer", {**offer, "policy": "nonsense"})
        bridge.hub.send("Start", bridge.start(offer))
        assert (await bridge.hub.over(offer["attemptId"]))["outcome"] == "succeeded"
        assert len(bridge.hub.of("SubmitOfferDecision", offerId=offer["offerId"])) == 1


@pytest.mark.requirement("B-04")
async def test_offers_for_another_instance_are_ignored(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        bridge.hub.send("Offer", bridge.offer(runnerInstanceId="another"))
        offer = await bridge.accept()
        assert [d["offerId"] for d in bridge.hub.of("SubmitOfferDecision")] == [offer["offerId"]]
        assert bridge.logged("a message for another instance")


@pytest.mark.requirement("B-04", "B-21")
async def test_an_offer_that_runs_out_frees_its_capacity_and_says_so(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, max_concurrent_sandboxes=1) as bridge:
        offer = await bridge.accept(expiresInMs=150)
        result = await bridge.hub.over(offer["attemptId"])
        assert (result["outcome"], result["failureCode"]) == ("failed", "start_timeout")
        assert result["revision"] == 2
        await bridge.until_idle()
        await bridge.accept()


@pytest.mark.requirement("B-04")
async def test_an_offer_that_ran_out_while_it_waited_is_refused(tmp_path: Path) -> None:
    settled = anyio.Event()

    async def snapshot(_payload: object) -> object:
        await settled.wait()
        return {"accepted": True}

    hub = ScriptedHub(answers={"ReadAttemptSnapshot": snapshot})
    async with memory_bridge(tmp_path, hub, online=False) as bridge:
        await hub.next("ReadAttemptSnapshot")
        brief, lasting, cancelled = bridge.offer(expiresInMs=1), bridge.offer(), bridge.offer()
        for offer in (brief, lasting, cancelled):
            hub.send("Offer", offer)
        hub.send("Cancel", {"attemptId": cancelled["attemptId"], "fence": 1})
        settings = {"draining": False, "hostFallbackEnabled": True}
        hub.send("RunnerSettings", {"settings": settings})
        await wait_for(lambda: bridge.runner.hub_settings.host_fallback_enabled)
        arrived_ms = bridge.runner.clock.now_ms()
        await wait_for(lambda: bridge.runner.clock.now_ms() > arrived_ms + 1)
        assert not hub.of("SubmitOfferDecision")
        settled.set()
        assert (await hub.decision(lasting))["decision"] == "accepted"
        assert (await hub.decision(brief))["reasonCode"] == "expired"
        assert not hub.of("SubmitOfferDecision", offerId=cancelled["offerId"])


@pytest.mark.requirement("B-07")
async def test_a_decision_whose_acknowledgement_is_lost_is_not_repeated(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        hub.answers["SubmitOfferDecision"] = hub.never
        offer = bridge.offer()
        hub.send("Offer", offer)
        await hub.decision(offer)
        hub.drop()
        hub.answers.clear()
        hub.snapshot = [{"attemptId": offer["attemptId"], "fence": 1, "state": "offered"}]
        await hub.online(2)
        other = await bridge.accept()
        decisions = hub.of("SubmitOfferDecision")
        assert [d["offerId"] for d in decisions] == [offer["offerId"], other["offerId"]]
        hub.send("Start", bridge.start(offer))
        assert (await hub.over(offer["attemptId"]))["outcome"] == "succeeded"


@pytest.mark.requirement("B-07")
async def test_an_answer_that_makes_no_sense_changes_nothing(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        wrong: list[object] = [{"accepted": "yes"}, {"accepted": False}, 3, {}]
        answers = iter([HubException("no"), None, [], *wrong])
        hub.answers["SubmitOfferDecision"] = lambda _payload: next(answers)
        offer = bridge.offer()
        for count in range(1, 8):
            hub.send("Offer", offer)
            assert (await hub.decision(offer, count))["decision"] == "accepted"
        hub.send("Start", bridge.start(offer))
        assert (await hub.over(offer["attemptId"]))["outcome"] == "succeeded"


@pytest.mark.requirement("B-04")
async def test_a_higher_fence_supersedes_and_a_lower_one_is_refused(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        attempt_id = await bridge.run("wait")
        await hub.event(attempt_id, "agent.started")
        higher = bridge.offer(attempt_id, fence=3)
        hub.send("Offer", higher)
        assert (await hub.decision(higher))["decision"] == "accepted"
        first = await hub.over(attempt_id, fence=1)
        assert (first["outcome"], first["failureCode"]) == ("cancelled", "superseded")
        lower = bridge.offer(attempt_id, fence=2)
        hub.send("Offer", lower)
        assert (await hub.decision(lower))["reasonCode"] == "stale_fence"
        hub.send("Cancel", {"attemptId": attempt_id, "fence": 1, "reason": "late"})
        hub.send("Start", bridge.start(higher))
        assert (await hub.over(attempt_id, fence=3))["outcome"] == "succeeded"


async def test_a_reservation_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, max_concurrent_sandboxes=1) as bridge:
        create = bridge.runner.ledgers.create

        async def full(*_key: object) -> None:
            raise DiskUnusable("cannot write: no space left")

        bridge.runner.ledgers.create = full  # type: ignore[method-assign, assignment]
        assert await decided(bridge) == ("rejected", "disk_pressure")
        bridge.runner.ledgers.create = create  # type: ignore[method-assign]
        await bridge.accept()


@pytest.mark.requirement("B-04")
async def test_a_hub_that_acknowledges_nothing_holds_up_no_other_attempt(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        hub.answers["SubmitOfferDecision"] = hub.never
        first, second = bridge.offer(), bridge.offer()
        for offer in (first, second):
            hub.send("Offer", offer)
            assert (await hub.decision(offer))["decision"] == "accepted"
        hub.send("Start", bridge.start(second))
        await hub.over(second["attemptId"])
        hub.send("Start", bridge.start(first))
        await hub.over(first["attemptId"])
