"""Offers, leases, silence, cancel, and who is asked again."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from scripted_bridge import ScriptedBridge, Stage, capabilities, on_stage
from sqlalchemy import Connection, select, update

from forge_core.errors import HubUnavailable
from forge_core.wire.lease_mac import lease_message, verify_lease
from forge_hub.store.database import open_database
from forge_hub.store.tables import attempts, runners

TTL_MS = 60_000
KILL_GRACE_MS = 30_000


def believes(start: dict[str, Any], update: dict[str, Any]) -> bool:
    """What a supervisor would think of a renewal."""
    message = lease_message(
        update["attemptId"],
        update["fence"],
        update["sequence"],
        update["ttlMs"],
        update["issuedAt"],
    )
    return verify_lease(base64.b64decode(start["lease"]["key"]), message, update["mac"])


def held(start: dict[str, Any], state: str = "active") -> list[dict[str, Any]]:
    return [{"attemptId": start["attemptId"], "fence": start["fence"], "state": state}]


async def snapshot(bridge: ScriptedBridge) -> list[dict[str, Any]]:
    request = {"runnerId": bridge.runner_id, "runnerInstanceId": bridge.instance_id, "part": 1}
    answer = await bridge.call("ReadAttemptSnapshot", request)
    assert answer["accepted"]
    assert answer["parts"] == 1
    attempts: list[dict[str, Any]] = answer["attempts"]
    return attempts


@pytest.mark.requirement("B-70")
async def test_a_lease_is_renewed_at_a_third_of_its_ttl_while_the_runner_heartbeats(
    database_url: str,
) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch()
        start = await bridge.take_attempt()
        for sequence in (1, 2, 3):
            await bridge.heartbeat(attempts=held(start))
            stage.clock.advance(TTL_MS // 3)
            update = await bridge.next("LeaseUpdate")
            assert (update["sequence"], update["ttlMs"]) == (sequence, TTL_MS)
            assert believes(start, update)
            assert not believes(start, {**update, "ttlMs": TTL_MS + 1})
        shown = await stage.until(
            session_id, lambda s: s["attempts"][0]["dispatches"][0]["leaseSequence"] == 3
        )
        assert shown["state"] == "running"


@pytest.mark.requirement("B-70")
async def test_a_ttl_below_the_heartbeat_interval_is_renewed_between_heartbeats(
    database_url: str,
) -> None:
    async with on_stage(database_url, heartbeat_interval_ms=15_000) as stage:
        bridge = await stage.bridge()
        await stage.dispatch(leaseTtlMs=6_000)
        start = await bridge.take_attempt()
        for _ in range(14):
            await stage.pass_time(2_000)
            assert believes(start, await bridge.next("LeaseUpdate"))
        await stage.pass_time(2_000)
        await bridge.answered()
        assert bridge.waiting("LeaseUpdate") == []


@pytest.mark.requirement("B-70")
async def test_without_heartbeats_renewals_stop_and_silence_ends_the_session(
    database_url: str,
) -> None:
    async with on_stage(database_url, kill_grace_ms=KILL_GRACE_MS) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch()
        start = await bridge.take_attempt()
        await stage.pass_time(TTL_MS)
        await bridge.answered()
        assert bridge.waiting("LeaseUpdate") == []
        await stage.pass_time(TTL_MS + KILL_GRACE_MS - 1)
        assert (await stage.session(session_id))["state"] == "running"
        stage.clock.advance(1)
        shown = await stage.until(session_id, lambda s: s["state"] != "running")
        assert (shown["state"], shown["failureCode"]) == ("expired", "lease_expired")
        assert shown["cleanup"] == "pending"
        late = await bridge.result(start)
        assert late["reason"] == "stale_fence"
        assert (await bridge.cleanup_report(start))["accepted"]
        assert (await stage.session(session_id))["cleanup"] == "complete"


@pytest.mark.requirement("B-04")
async def test_after_silence_a_session_with_retries_goes_to_another_runner(
    database_url: str,
) -> None:
    async with on_stage(database_url, kill_grace_ms=KILL_GRACE_MS) as stage:
        lost = await stage.bridge("r1", "i1")
        session_id = await stage.dispatch(retries=1)
        first = await lost.take_attempt()
        other = await stage.bridge("r2", "i2")
        await lost.heartbeat(state="stopping", attempts=held(first))
        await stage.pass_time(2 * TTL_MS + KILL_GRACE_MS - 1)
        await other.answered()
        assert other.waiting("Offer") == []
        stage.clock.advance(1)
        second = await other.take_attempt()
        assert (second["attemptId"], second["fence"]) == (first["attemptId"], 2)
        assert second["lease"]["key"] != first["lease"]["key"]
        assert (await lost.result(first))["reason"] == "stale_fence"
        await other.result(second)
        shown = await stage.session(session_id)
        assert (shown["state"], shown["retriesLeft"]) == ("succeeded", 0)


@pytest.mark.requirement("B-04")
@pytest.mark.parametrize(
    ("code", "state"), [("bridge_stopped", "queued"), ("agent_failed", "failed")]
)
async def test_only_a_lost_machine_is_a_reason_to_try_again(
    database_url: str, code: str, state: str
) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch(retries=1)
        start = await bridge.take_attempt()
        await bridge.heartbeat(state="stopping", attempts=held(start))
        await bridge.result(start, outcome="failed", failureCode=code, resultCommit=None)
        assert (await stage.session(session_id))["state"] == state


async def test_a_dispatch_that_the_runner_no_longer_holds_is_not_renewed(
    database_url: str,
) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        await stage.dispatch()
        start = await bridge.take_attempt()
        for _ in range(2):
            await bridge.heartbeat(attempts=[])
        await stage.pass_time(TTL_MS // 3)
        await bridge.answered()
        assert bridge.waiting("LeaseUpdate") == []
        await bridge.heartbeat(attempts=held(start))
        assert believes(start, await bridge.next("LeaseUpdate"))


@pytest.mark.requirement("B-04")
async def test_a_cancel_stops_renewals_and_the_result_says_how_it_ended(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch(retries=3)
        start = await bridge.take_attempt()
        answer = await stage.api.post(f"/api/v1/sessions/{session_id}/cancel", json={"reason": "x"})
        assert (answer.status_code, answer.json()["state"]) == (202, "cancelling")
        cancel = await bridge.next("Cancel")
        assert (cancel["attemptId"], cancel["fence"]) == (start["attemptId"], 1)
        assert [a["state"] for a in await snapshot(bridge)] == ["cancelling"]
        await bridge.heartbeat(attempts=held(start, "releasing"))
        await stage.pass_time(TTL_MS // 3)
        await bridge.answered()
        assert bridge.waiting("LeaseUpdate") == []
        ended: dict[str, Any] = {
            "outcome": "cancelled",
            "failureCode": "cancelled",
            "resultCommit": None,
        }
        await bridge.result(start, **ended)
        shown = await stage.session(session_id)
        assert (shown["state"], shown["cancelReason"]) == ("cancelled", "x")


async def test_a_cancel_before_the_start_ends_it_at_once(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        queued = await stage.dispatch()
        answer = await stage.api.post(f"/api/v1/sessions/{queued}/cancel")
        assert answer.json()["state"] == "cancelled"
        bridge = await stage.bridge()
        offered = await stage.dispatch()
        offer = await bridge.next("Offer")
        answer = await stage.api.post(f"/api/v1/sessions/{offered}/cancel")
        assert answer.json()["state"] == "cancelled"
        assert (await bridge.next("Cancel"))["attemptId"] == offer["attemptId"]
        late = await bridge.decide(offer, "accepted", runtime="docker")
        assert (late["accepted"], late["reason"]) == (False, "cancelled")
        assert bridge.waiting("Start") == []


@pytest.mark.requirement("B-96")
async def test_who_did_not_take_an_offer_is_named_with_what_it_said(sqlite_url: str) -> None:
    async with on_stage(sqlite_url, offer_ttl_ms=10_000) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch()
        said = {"reasonCode": "runtime_unavailable", "detail": "engine: nobody there"}
        await bridge.decide(await bridge.next("Offer"), "rejected", **said)
        shown = await stage.until(session_id, lambda s: s["refusals"])
        assert shown["refusals"] == [
            {
                "runnerId": "r1",
                "reason": "runtime_unavailable",
                "detail": "it declined the offer: engine: nobody there",
            }
        ]
        silent = await stage.bridge()
        await silent.next("Offer")
        stage.clock.advance(10_000)
        shown = await stage.until(
            session_id, lambda s: [r["reason"] for r in s["refusals"]] == ["expired"]
        )
        assert "did not answer" in shown["refusals"][0]["detail"]


async def test_an_unanswered_offer_expires_and_another_runner_is_asked(database_url: str) -> None:
    async with on_stage(database_url, offer_ttl_ms=10_000) as stage:
        silent = await stage.bridge("r1", "i1")
        session_id = await stage.dispatch()
        first = await silent.next("Offer")
        other = await stage.bridge("r2", "i2")
        stage.clock.advance(10_000)
        second = await other.next("Offer")
        assert second["fence"] == 2
        late = await silent.decide(first, "accepted", runtime="docker")
        assert late["reason"] == "stale_fence"
        dispatches = (await stage.session(session_id))["attempts"][0]["dispatches"]
        assert [d.get("endReason") for d in dispatches] == ["offer_expired", None]


@pytest.mark.requirement("B-04", "B-81")
async def test_an_offer_to_an_instance_that_is_gone_is_void_at_once(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        old = await stage.bridge("r1", "i1")
        session_id, second = await stage.dispatch(runnerId="r1"), await stage.dispatch()
        offers = [await old.next("Offer") for _ in range(2)]
        reborn = await stage.connect("r1", "i2")
        await reborn.register()
        shown = await stage.until(session_id, lambda s: s["state"] == "queued")
        assert shown["attempts"][0]["dispatches"][0]["endReason"] == "instance_gone"
        assert shown["retriesLeft"] == 0
        assert await snapshot(reborn) == []
        await reborn.heartbeat()
        again = [await reborn.next("Offer") for _ in range(2)]
        assert {(o["sessionId"], o["fence"]) for o in again} == {(session_id, 2), (second, 2)}
        assert {o["runnerInstanceId"] for o in again} == {"i2"}
        assert not {o["offerId"] for o in again} & {o["offerId"] for o in offers}
        late = await reborn.decide(offers[0], "accepted", runtime="docker", runnerInstanceId="i2")
        assert (late["accepted"], late["reason"]) == (False, "instance_mismatch")
        assert (await reborn.decide(again[0], "accepted", runtime="docker"))["accepted"]
        assert (await reborn.next("Start"))["fence"] == 2


@pytest.mark.requirement("B-04")
async def test_an_offer_outlives_a_lost_connection_of_the_same_instance(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch()
        offer = await bridge.next("Offer")
        bridge = await stage.bridge()
        assert (await bridge.next("Offer"))["offerId"] == offer["offerId"]
        assert (await stage.session(session_id))["state"] == "offered"


@pytest.mark.requirement("B-96")
async def test_a_refused_placement_names_why_for_each_runner(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        session_id = await stage.dispatch()
        shown = await stage.until(session_id, lambda s: s["refusals"])
        assert [r["reason"] for r in shown["refusals"]] == ["no_runner"]
        drained = await stage.connect("r1", "i1")
        await drained.register()
        await stage.api.post("/api/v1/runners/r1/drain")
        await drained.heartbeat()
        assert (await drained.next("RunnerSettings"))["settings"]["draining"]
        blocked = await stage.connect("r2", "i2")
        unready = {"ready": False, "blockers": ["seccomp_missing"]}
        await blocked.register(capabilities=capabilities(sandboxRequired=unready))
        await blocked.heartbeat()
        reasons = {"draining", "policy_unsatisfied"}
        shown = await stage.until(
            session_id, lambda s: {r["reason"] for r in s["refusals"]} == reasons
        )
        assert [(r["runnerId"], r["reason"]) for r in shown["refusals"]] == [
            ("r1", "draining"),
            ("r2", "policy_unsatisfied"),
        ]
        assert "seccomp_missing" in shown["refusals"][1]["detail"]
        await stage.api.post("/api/v1/runners/r1/resume")
        assert (await drained.next("Offer"))["sessionId"] == session_id


@pytest.mark.requirement("B-10", "B-96")
async def test_undecided_offers_count_against_the_capacity(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.connect()
        await bridge.register(capabilities=capabilities(resourceCapacity={"slots": 1}))
        await bridge.heartbeat(resourceCapacity={"slots": 1})
        await stage.dispatch()
        offer = await bridge.next("Offer")
        waiting = await stage.dispatch()
        shown = await stage.until(waiting, lambda s: s["refusals"])
        assert shown["refusals"][0]["reason"] == "capacity_slots"
        capacity = {"resourceCapacity": {"slots": 2}}
        await bridge.decide(offer, "accepted", runtime="docker", **capacity)
        assert (await bridge.next("Offer"))["sessionId"] == waiting


@pytest.mark.requirement("B-88")
async def test_a_newer_registration_takes_over(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        older = await stage.bridge()
        newer = await stage.bridge()
        await older.closed.wait()
        with pytest.raises(HubUnavailable):
            await older.heartbeat()
        await stage.dispatch()
        await newer.next("Offer")
        assert older.waiting("Offer") == []
        assert (await stage.api.get("/api/v1/runners/r1")).json()["connected"]


@pytest.mark.requirement("B-04", "B-81")
async def test_who_comes_back_is_told_again_what_it_may_have_missed(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        await stage.dispatch()
        offer = await bridge.next("Offer")
        bridge = await stage.bridge()
        assert (await bridge.next("Offer"))["offerId"] == offer["offerId"]
        await bridge.decide(offer, "accepted", runtime="docker")
        start = await bridge.next("Start")
        assert await snapshot(bridge) == held(start, "running")

        bridge = await stage.connect()
        await bridge.register()
        await bridge.heartbeat(attempts=held(start, "reserved"))
        assert await bridge.next("Start") == start

        other_instance = await stage.bridge("r1", "i2")
        assert await snapshot(other_instance) == []
        assert other_instance.waiting("Start") == []


@pytest.mark.requirement("B-95")
async def test_a_restart_of_the_hub_keeps_what_it_knew_and_renews_nothing(
    database_url: str,
) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        ended = await stage.dispatch()
        done = await bridge.take_attempt()
        await bridge.result(done)
        await bridge.cleanup_report(done)
        running = await stage.dispatch(retries=1)
        start = await bridge.take_attempt()
    as_a_crash_leaves_it = update(runners).values(connected=True)
    async with open_database(database_url) as store:
        await store.write(lambda connection: connection.execute(as_a_crash_leaves_it))
    async with on_stage(database_url, kill_grace_ms=KILL_GRACE_MS) as stage:
        assert not (await stage.api.get("/api/v1/runners/r1")).json()["connected"]
        shown = await stage.session(ended)
        assert (shown["state"], shown["cleanup"]) == ("succeeded", "complete")
        bridge = await stage.bridge()
        assert await snapshot(bridge) == held(start, "running")
        await _not_renewed_until_silent(stage, bridge, start)
        assert (await bridge.next("Offer"))["fence"] == 2
        assert (await stage.session(running))["retriesLeft"] == 0


async def _not_renewed_until_silent(
    stage: Stage, bridge: ScriptedBridge, start: dict[str, Any]
) -> None:
    for step_ms in (TTL_MS, TTL_MS, KILL_GRACE_MS - 1):
        await bridge.heartbeat(attempts=held(start))
        await stage.pass_time(step_ms)
        await bridge.answered()
        assert bridge.waiting("LeaseUpdate") == []
        assert bridge.waiting("Offer") == []
    stage.clock.advance(1)


async def test_a_result_that_arrives_after_the_restart_settles_the_session(
    database_url: str,
) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch()
        start = await bridge.take_attempt()
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        assert (await bridge.result(start))["disposition"] == "persisted"
        assert (await stage.session(session_id))["state"] == "succeeded"


@pytest.mark.requirement("B-95")
async def test_a_hub_lives_with_inputs_that_an_earlier_version_took(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        running = await stage.dispatch()
        start = await bridge.take_attempt()
        offered = await stage.dispatch()
        await bridge.next("Offer")
        queued = await stage.dispatch(repository="nobody-has-it")
    async with open_database(database_url) as store:
        await store.write(_lengthen_prompts)
    async with on_stage(database_url) as stage:
        for session_id in (offered, queued):
            shown = await stage.until(session_id, lambda s: s["state"] == "failed")
            assert shown["failureCode"] == "internal_error"
        bridge = await stage.bridge()
        assert await snapshot(bridge) == held(start, "running")
        assert (await bridge.result(start))["disposition"] == "persisted"
        assert (await stage.session(running))["state"] == "succeeded"


def _lengthen_prompts(connection: Connection) -> None:
    for attempt_id, given in connection.execute(select(attempts.c.attempt_id, attempts.c.input)):
        longer = {**given, "agent": {**given["agent"], "prompt": "p" * 200_000}}
        connection.execute(
            update(attempts).where(attempts.c.attempt_id == attempt_id).values(input=longer)
        )
