"""What the owner of a project decides binds its sessions; a permission lasts while it lasts."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_bridge import COMMIT, Stage, capabilities, on_stage, session
from test_hub_api import code_of

pytestmark = pytest.mark.requirement("B-53", "B-95")

POLICY = "/api/v1/projects/p-1/sandbox-policy"
SOON = "2026-11-29T10:30:00.000Z"
"""Some minutes after the clock of the stage begins."""

IN_30_DAYS = "2026-12-29T10:16:40.000Z"
FALLBACK = {"reason": "the engine is being replaced", "expiresAt": SOON}
PREFERRED = {"policy": "sandbox_preferred", "trustDomainId": "td-1"}
NO_SANDBOX = capabilities(
    runtimes=["host"],
    networkPolicies=[],
    sandboxRequired={"ready": False, "blockers": ["engine"]},
)


async def save(stage: Stage, **policy: Any) -> dict[str, Any]:
    answer = await stage.api.put(POLICY, json={**PREFERRED, **policy})
    assert answer.status_code == 200, answer.text
    saved: dict[str, Any] = answer.json()
    return saved


async def enable(stage: Stage, enabled: bool = True) -> None:
    answer = await stage.api.put("/api/v1/runners/r1/host-fallback", json={"enabled": enabled})
    assert answer.status_code == 200, answer.text


async def test_a_policy_is_kept_as_it_was_saved(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        assert code_of(await stage.api.get(POLICY), 404) == "unknown_project"
        saved = await save(stage, approvedCommit=COMMIT, hostFallback=FALLBACK)
        assert saved["hostFallback"] == FALLBACK
        assert (saved["projectId"], saved["approvedCommit"]) == ("p-1", COMMIT)
        assert (await stage.api.get(POLICY)).json() == saved
        stage.clock.advance(1_000)
        again = await save(stage)
        assert "hostFallback" not in again or again["hostFallback"] is None
        assert again["updatedAt"] > saved["updatedAt"]
        elsewhere = await stage.api.get("/api/v1/projects/p-2/sandbox-policy")
        assert code_of(elsewhere, 404) == "unknown_project"
        nameless = await stage.api.put("/api/v1/projects/-p/sandbox-policy", json=PREFERRED)
        assert code_of(nameless, 422) == "invalid_request"


@pytest.mark.parametrize(
    ("policy", "code", "words"),
    [
        ({"hostFallback": {**FALLBACK, "reason": " "}}, "host_fallback_refused", "reason"),
        ({"hostFallback": {**FALLBACK, "expiresAt": "2026-11-29T10:16:40Z"}}, "", "ended at"),
        ({"hostFallback": {**FALLBACK, "expiresAt": "2026-12-29T10:16:40.001Z"}}, "", "30 days"),
        ({"hostFallback": {**FALLBACK, "expiresAt": "2026-13-01T00:00:00Z"}}, "", "no moment"),
        ({"policy": "sandbox_required", "hostFallback": FALLBACK}, "", "never falls back"),
        ({"policy": "host", "hostFallback": FALLBACK}, "", "never falls back"),
        ({"hostFallback": {"reason": "r"}}, "invalid_request", "expiresAt"),
        ({"hostFallback": {**FALLBACK, "expiresAt": "soon"}}, "invalid_request", "expiresAt"),
        ({"approvedCommit": "abc"}, "invalid_request", "approvedCommit"),
        ({"surprise": 1}, "invalid_request", "surprise"),
    ],
)
async def test_what_cannot_count_is_not_saved(
    sqlite_url: str, policy: dict[str, Any], code: str, words: str
) -> None:
    async with on_stage(sqlite_url) as stage:
        answer = await stage.api.put(POLICY, json={**PREFERRED, **policy})
        assert code_of(answer, 422) == (code or "host_fallback_refused")
        assert words in answer.text
        assert code_of(await stage.api.get(POLICY), 404) == "unknown_project"


async def test_thirty_days_are_the_most_and_can_be_had(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        await save(stage, hostFallback={**FALLBACK, "expiresAt": IN_30_DAYS})


@pytest.mark.requirement("B-20", "B-52")
async def test_a_session_keeps_to_its_project(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        await save(stage, approvedCommit=COMMIT)
        for more in (
            {"trustDomainId": "td-2"},
            {"policy": "host"},
            {"approvedCommit": "b" * 40},
        ):
            answer = await stage.api.post("/api/v1/sessions", json=session(**more))
            assert code_of(answer, 409) == "policy_conflict"
        bridge = await stage.bridge()
        for policy in ("sandbox_preferred", "sandbox_required"):
            await stage.dispatch(policy=policy)
            offer = await bridge.next("Offer")
            assert (offer["policy"], offer["approvedCommit"]) == (policy, COMMIT)
        await stage.dispatch(projectId="p-2", policy="sandbox_preferred", approvedCommit=None)
        assert "approvedCommit" not in await bridge.next("Offer")


async def test_a_session_cannot_give_itself_permission(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        answer = await stage.api.post("/api/v1/sessions", json=session(hostFallback=FALLBACK))
        assert code_of(answer, 422) == "invalid_request"


async def without_sandbox(stage: Stage) -> Any:
    """A runner that is ready for offers and has no sandbox."""
    bridge = await stage.connect()
    assert (await bridge.register(capabilities=NO_SANDBOX))["accepted"]
    assert (await bridge.heartbeat())["accepted"]
    return bridge


@pytest.mark.requirement("B-96")
async def test_a_fallback_is_offered_while_both_have_agreed(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge = await without_sandbox(stage)

        async def refusal(session_id: str) -> str:
            shown = await stage.until(session_id, lambda s: s["refusals"])
            return str(shown["refusals"][0]["reason"])

        session_id = await stage.dispatch(policy="sandbox_preferred")
        assert await refusal(session_id) == "host_fallback_denied"
        await enable(stage)
        await bridge.next("RunnerSettings")
        assert await refusal(session_id) == "host_fallback_denied"
        await save(stage, hostFallback=FALLBACK)
        offer = await bridge.next("Offer")
        assert offer["hostFallback"] == FALLBACK
        assert (await bridge.decide(offer, "accepted", runtime="host"))["accepted"]
        assert (await bridge.next("Start"))["attemptId"] == offer["attemptId"]
        required = await stage.dispatch(policy="sandbox_required")
        assert await refusal(required) == "policy_unsatisfied"


async def test_a_permission_that_has_ended_is_not_offered(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        await without_sandbox(stage)
        await enable(stage)
        await save(stage, hostFallback=FALLBACK)
        stage.clock.advance(14 * 60_000)
        session_id = await stage.dispatch(policy="sandbox_preferred")
        shown = await stage.until(session_id, lambda s: s["refusals"])
        assert shown["refusals"][0]["reason"] == "host_fallback_denied"


@pytest.mark.parametrize("taken_back", ["expiry", "permission", "setting"])
async def test_a_permission_that_ends_before_the_start_starts_nothing(
    sqlite_url: str, taken_back: str
) -> None:
    async with on_stage(sqlite_url, offer_ttl_ms=600_000) as stage:
        bridge = await without_sandbox(stage)
        await enable(stage)
        stage.clock.advance(10 * 60_000)
        await bridge.heartbeat()
        await save(stage, hostFallback=FALLBACK)
        session_id = await stage.dispatch(policy="sandbox_preferred")
        offer = await bridge.next("Offer")
        match taken_back:
            case "expiry":
                stage.clock.advance(4 * 60_000)
            case "permission":
                await save(stage)
            case "setting":
                await enable(stage, False)
        answer = await bridge.decide(offer, "accepted", runtime="host")
        assert (answer["accepted"], answer["reason"]) == (False, "host_fallback_denied")
        assert bridge.waiting("Start") == []
        shown = await stage.until(session_id, lambda s: s["state"] == "queued" and s["refusals"])
        (dispatch,) = shown["attempts"][0]["dispatches"]
        assert (dispatch["state"], dispatch["declineCode"]) == ("ended", "host_fallback_denied")


async def test_no_runner_takes_a_sandbox_required_attempt_to_its_host(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        bridge = await stage.bridge()
        await enable(stage)
        await save(stage, hostFallback=FALLBACK)
        await stage.dispatch(policy="sandbox_required")
        offer = await bridge.next("Offer")
        assert "hostFallback" not in offer
        answer = await bridge.decide(offer, "accepted", runtime="host")
        assert (answer["accepted"], answer["reason"]) == (False, "host_fallback_denied")
        assert bridge.waiting("Start") == []


async def test_a_repeated_acceptance_of_what_runs_stays_harmless(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        bridge = await without_sandbox(stage)
        await enable(stage)
        await save(stage, hostFallback=FALLBACK)
        await stage.dispatch(policy="sandbox_preferred")
        offer = await bridge.next("Offer")
        for _ in range(2):
            assert (await bridge.decide(offer, "accepted", runtime="host"))["accepted"]
            await bridge.next("Start")
            await save(stage)
