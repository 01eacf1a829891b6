"""What the hub believes, and what it answers to the rest."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_bridge import DUPLICATE, PERSISTED, ScriptedBridge, Stage, on_stage, removed

from forge_core.errors import HubError, HubRefused
from forge_core.wire.from_bridge import HUB_METHODS


def rejected(answer: dict[str, Any]) -> str:
    """The reason of a rejection that ends the replay."""
    assert answer["accepted"] is False
    assert answer["disposition"] == "rejected"
    return str(answer["reason"])


async def running(stage: Stage) -> tuple[ScriptedBridge, str, dict[str, Any]]:
    bridge = await stage.bridge()
    session_id = await stage.dispatch()
    return bridge, session_id, await bridge.take_attempt()


@pytest.mark.requirement("B-07")
async def test_what_comes_twice_is_kept_once(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge, session_id, start = await running(stage)
        for answer in (PERSISTED, DUPLICATE):
            assert await bridge.event(start, "e1", "agent.started", sequence=1) == answer
            assert await bridge.result(start) == answer
            assert await bridge.cleanup_report(start) == answer
        shown = (await stage.api.get(f"/api/v1/sessions/{session_id}/diagnostics")).json()
        assert len(shown["timeline"]) == 1
        assert len(shown["cleanupReports"]) == 1


async def test_events_out_of_order_are_kept_and_conflicts_refused(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge, session_id, start = await running(stage)
        assert await bridge.event(start, "e3", "teardown.started", sequence=3) == PERSISTED
        assert await bridge.event(start, "e1", "agent.started", sequence=1) == PERSISTED
        conflict = await bridge.event(start, "other", "agent.started", sequence=3)
        assert rejected(conflict) == "sequence_conflict"
        shown = (await stage.api.get(f"/api/v1/sessions/{session_id}/diagnostics")).json()
        assert {(e["sequence"], e["type"]) for e in shown["timeline"]} == {
            (1, "agent.started"),
            (3, "teardown.started"),
        }


async def test_a_higher_revision_replaces_and_the_outcome_never_changes(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge, session_id, start = await running(stage)
        assert await bridge.result(start, revision=2) == PERSISTED
        assert await bridge.result(start, revision=1, cleanup="pending") == DUPLICATE
        changed = await bridge.result(start, revision=3, outcome="failed", failureCode="cancelled")
        assert rejected(changed) == "outcome_changed"
        shown = await stage.session(session_id)
        assert (shown["state"], shown["result"]["revision"]) == ("succeeded", 2)
        assert shown["cleanup"] == "complete"


@pytest.mark.requirement("B-83")
async def test_a_cleanup_report_is_kept_only_if_all_four_match(database_url: str) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"attemptId": "another"}, "unknown_dispatch"),
        ({"fence": 2}, "unknown_dispatch"),
        ({"resourceRunnerInstanceId": "i0"}, "instance_mismatch"),
        ({"runnerId": "r2"}, "reporter_mismatch"),
        ({"runnerInstanceId": "i0"}, "reporter_mismatch"),
        ({"part": 2, "parts": 1}, "malformed"),
    ]
    async with on_stage(database_url) as stage:
        bridge, session_id, start = await running(stage)
        for changes, reason in wrong:
            assert rejected(await bridge.cleanup_report(start, **changes)) == reason
        shown = (await stage.api.get(f"/api/v1/sessions/{session_id}/diagnostics")).json()
        assert shown["cleanupReports"] == []
        assert shown["cleanupPending"]
        assert await bridge.cleanup_report(start) == PERSISTED


@pytest.mark.requirement("B-83")
async def test_another_runner_cannot_report_for_a_dispatch_that_is_not_its_own(
    database_url: str,
) -> None:
    async with on_stage(database_url) as stage:
        _, _, start = await running(stage)
        other = await stage.bridge("r2", "i2")
        forged = await other.cleanup_report(start, resourceRunnerInstanceId="i1")
        assert rejected(forged) == "runner_mismatch"
        assert rejected(await other.result(start, resourceRunnerInstanceId="i1")) == (
            "runner_mismatch"
        )


@pytest.mark.requirement("B-82", "B-83", "B-86")
async def test_a_new_instance_reports_what_the_old_one_left(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        _, session_id, start = await running(stage)
        reborn = await stage.bridge("r1", "i2")
        old = {"resourceRunnerInstanceId": "i1", "trigger": "startup"}
        stuck = [removed("c1"), removed("c2", "failed")]
        first = await reborn.cleanup_report(start, **old, resources=stuck)
        assert first == PERSISTED
        lost: dict[str, Any] = {
            "outcome": "failed",
            "failureCode": "bridge_stopped",
            "resultCommit": None,
        }
        answer = await reborn.result(start, resourceRunnerInstanceId="i1", exitCode=None, **lost)
        assert answer == PERSISTED
        shown = await stage.session(session_id)
        assert (shown["state"], shown["cleanup"]) == ("failed", "pending")
        again = await reborn.cleanup_report(
            start, **old, reportId="report-2", resources=[removed("c2")]
        )
        assert again == PERSISTED
        assert (await stage.session(session_id))["cleanup"] == "complete"


@pytest.mark.requirement("B-83")
async def test_a_report_counts_when_all_its_parts_have_come(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge, session_id, start = await running(stage)
        await bridge.result(start)
        for part, cleanup in ((2, "pending"), (1, "complete")):
            answer = await bridge.cleanup_report(
                start, part=part, parts=2, resources=[removed(f"c{part}")]
            )
            assert answer == PERSISTED
            assert (await stage.session(session_id))["cleanup"] == cleanup
        shown = (await stage.api.get(f"/api/v1/sessions/{session_id}/diagnostics")).json()
        assert [r["id"] for r in shown["cleanupReports"][0]["resources"]] == ["c1", "c2"]


@pytest.mark.requirement("B-83")
async def test_an_old_fence_is_stale_for_everything_but_cleanup_reports(database_url: str) -> None:
    async with on_stage(database_url, decline_backoff_ms=0) as stage:
        bridge = await stage.bridge()
        await stage.dispatch()
        first = await bridge.next("Offer")
        assert (await bridge.decide(first, "rejected", reasonCode="capacity_slots"))["accepted"]
        second = await bridge.next("Offer")
        assert (second["attemptId"], second["fence"]) == (first["attemptId"], 2)
        assert rejected(await bridge.result(first)) == "stale_fence"
        assert rejected(await bridge.event(first, "e", "agent.started", sequence=1)) == (
            "stale_fence"
        )
        late = await bridge.decide(first, "accepted", runtime="docker")
        assert (late["accepted"], late["reason"]) == (False, "stale_fence")
        assert await bridge.cleanup_report(first) == PERSISTED


@pytest.mark.requirement("B-01")
async def test_only_a_registered_connection_is_heard(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge, _, start = await running(stage)
        stranger = await stage.connect("r2", "i2")
        for method in sorted(HUB_METHODS.keys() - {"RegisterRunner"}):
            with pytest.raises(HubError, match="not a registered runner's"):
                await stranger.call(method, {})
        assert await bridge.result(start) == PERSISTED


async def test_every_method_refuses_ill_typed_messages_and_lives_on(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge, _, start = await running(stage)
        for method, kind in HUB_METHODS.items():
            lists: dict[str, object] = {name: [] for name in kind.request.model_fields}
            for payload in ({}, lists):
                answer = await bridge.call(method, payload)
                assert (answer["accepted"], answer["reason"]) == (False, "malformed"), method
        assert rejected(await bridge.event(start, "e", "agent.started")) == "malformed"
        bad = await bridge.event(start, "e", "agent.exited", {"exitCode": "0"}, sequence=1)
        assert rejected(bad) == "malformed"
        assert await bridge.result(start) == PERSISTED


@pytest.mark.requirement("B-60", "B-61")
async def test_a_grant_that_nobody_gave_is_unknown(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge, _, start = await running(stage)
        grant = {
            "attemptId": start["attemptId"],
            "fence": 1,
            "runnerInstanceId": "i1",
            "handle": "h",
        }
        assert (await bridge.call("RedeemSecretGrant", grant))["reason"] == "grant_unknown"
        grant |= {"branch": "main", "resultCommit": "b" * 40}
        assert (await bridge.call("RedeemPublishGrant", grant))["reason"] == "grant_unknown"


async def test_registration_is_refused_by_name(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.connect()
        answer = await bridge.register(protocolVersion=1)
        assert (answer["accepted"], answer["reason"]) == (False, "unsupported_protocol")
        with pytest.raises(HubRefused) as refused:
            await stage.connect(token="another")
        assert refused.value.status == 401


async def test_messages_that_name_another_instance_are_refused(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        await stage.dispatch()
        offer = await bridge.next("Offer")
        answers = [
            await bridge.heartbeat(runnerInstanceId="i0"),
            await bridge.decide(offer, "accepted", runnerInstanceId="i0"),
            await bridge.call(
                "ReadAttemptSnapshot", {"runnerId": "r2", "runnerInstanceId": "i1", "part": 1}
            ),
        ]
        assert [a["reason"] for a in answers] == ["instance_mismatch"] * 3
