"""Offers: one decision each, one reservation each, never more than there is (B-04, B-21)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bridge_parts import MIB, Bridge, memory_bridge


async def decided(bridge: Bridge, **more: Any) -> tuple[str, str | None]:
    """What the bridge says to this offer: the decision and the reason."""
    offer = bridge.offer(**more)
    bridge.hub.send("Offer", offer)
    decision = await bridge.hub.decision(offer)
    return decision["decision"], decision.get("reasonCode")


@pytest.mark.requirement("B-04")
async def test_the_same_offer_twice_gets_one_decision_and_one_reservation(tmp_path: Path) -> None:
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
async def test_of_two_offers_for_the_last_slot_exactly_one_is_accepted(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, max_concurrent_sandboxes=1) as bridge:
        offers = [bridge.offer() for _ in range(8)]
        for offer in offers:
            bridge.hub.send("Offer", offer)
        decisions = [await bridge.hub.decision(offer) for offer in offers]
        said = sorted((d["decision"], d.get("reasonCode")) for d in decisions)
        assert said == [("accepted", None)] + [("rejected", "capacity_slots")] * 7


@pytest.mark.requirement("B-04", "B-10", "B-20", "B-21", "B-22", "B-53")
async def test_every_reason_to_say_no(tmp_path: Path) -> None:
    async with memory_bridge(
        tmp_path,
        sandbox_pid_capacity=100,
        sandbox_memory_capacity_bytes=512 * MIB,
        sandbox_cpu_capacity_millis=2000,
    ) as bridge:
        offer = await bridge.accept(resources={"slots": 1, "pids": 16, "memoryBytes": 64 * MIB})
        for more, code in (
            ({"trustDomainId": "another"}, "trust_domain_mismatch"),
            ({"repository": "unheard-of"}, "unknown_repository"),
            ({"policy": "host"}, "host_execution_denied"),
            ({"policy": "sandbox_required"}, "policy_unsatisfied"),
            ({"requirements": {"networkPolicy": "open_public"}}, "policy_unsatisfied"),
            ({"requirements": {"services": [{"name": "redis"}]}}, "policy_unsatisfied"),
            ({"requirements": {"publicationMode": "bridge_push"}}, "policy_unsatisfied"),
            ({"resources": {"slots": 2}}, "capacity_slots"),
            ({"resources": {"slots": 1, "builds": 2}}, "capacity_builds"),
            ({"resources": {"slots": 1, "pids": 85}}, "capacity_pids"),
            ({"resources": {"slots": 1, "pids": 1, "memoryBytes": 449 * MIB}}, "capacity_memory"),
            (
                {"resources": {"slots": 1, "pids": 1, "memoryBytes": 1, "cpuMillis": 1001}},
                "capacity_cpu",
            ),
            ({"attemptId": offer["attemptId"]}, "stale_fence"),
            ({"policy": "nonsense"}, "malformed"),
        ):
            assert await decided(bridge, **more) == ("rejected", code), more
        bridge.hub.send(
            "RunnerSettings", {"settings": {"draining": True, "hostFallbackEnabled": False}}
        )
        assert await decided(bridge) == ("rejected", "draining")
        bridge.hub.send(
            "RunnerSettings", {"settings": {"draining": False, "hostFallbackEnabled": False}}
        )
        bridge.runner.disk = bridge.runner.disk.observe(100, 0)
        assert await decided(bridge) == ("rejected", "disk_pressure")
        assert bridge.runner.admission.used.slots == 1
