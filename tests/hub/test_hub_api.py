"""REST: who may ask, what goes wrong by name, and the actions on runners."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest
from scripted_bridge import PATIENCE_S, RUNNER_TOKEN, Stage, on_stage, session

from forge_core.wire.from_hub import MAX_ARGUMENT_BYTES
from forge_core.wire.limits import MAX_INBOUND_BYTES, measured_size_bytes
from forge_hub.api.sessions import _require_agent_fits
from forge_hub.attempt_input import Addressee, AttemptInput
from forge_hub.grants import Handles, new_handle

PROBLEM = "application/problem+json"


def code_of(answer: httpx.Response, status: int) -> str:
    """The code of a problem; checks that it is one (RFC 9457)."""
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == PROBLEM
    problem = answer.json()
    assert (problem["type"], problem["status"]) == ("about:blank", status)
    assert problem["title"]
    assert problem["detail"]
    return str(problem["code"])


async def test_the_api_asks_for_an_api_token(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        for token in (None, RUNNER_TOKEN, "guess"):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with httpx.AsyncClient(base_url=stage.hub.url, headers=headers) as client:
                answer = await client.get("/api/v1/runners")
                assert code_of(answer, 401) == "unauthorized"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert (await client.get("/healthz")).json() == {"status": "ok"}
                assert (await client.get("/readyz")).json() == {"status": "ok"}


@pytest.mark.requirement("B-95")
async def test_errors_are_problem_details_and_never_repeat_what_was_sent(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        api = stage.api
        assert code_of(await api.get("/api/v1/sessions/none"), 404) == "unknown_session"
        assert code_of(await api.post("/api/v1/sessions/none/cancel"), 404) == "unknown_session"
        assert code_of(await api.get("/api/v1/sessions/none/events"), 404) == "unknown_session"
        assert code_of(await api.post("/api/v1/runners/none/drain"), 404) == "unknown_runner"
        assert code_of(await api.get("/api/v1/nothing"), 404) == "not_found"
        assert code_of(await api.put("/api/v1/sessions"), 405) == "method_not_allowed"
        agent = {"provider": "p", "argv": ["true"], "env": {"KEY": ["canary"]}}
        answer = await api.post("/api/v1/sessions", json=session(agent=agent, surprise=1))
        assert code_of(answer, 422) == "invalid_request"
        assert set(answer.json()["fields"]) == {"body.agent.env.KEY", "body.surprise"}
        assert "canary" not in answer.text
        network = {"policy": "public_allowlist", "domains": ["*.example.org"]}
        answer = await api.post("/api/v1/sessions", json=session(network=network))
        assert answer.json()["fields"]["body.network.domains.0"].startswith("it has a wildcard;")


@pytest.mark.parametrize(
    ("agent", "code", "field"),
    [
        ({"prompt": "\u20ac" * 43_350}, "invalid_request", "body.agent.prompt"),
        ({"prompt": "a\0b"}, "invalid_request", "body.agent.prompt"),
        ({"env": {"A": "", "B": "x" * 130_049}}, "invalid_request", "body.agent.env.B"),
        ({"argv": ["true", "x" * 130_049]}, "invalid_request", "body.agent.argv.1"),
        ({"argv": ["x" * 130_000] * 6}, "message_too_large", "agent"),
        ({"env": {f"A{n}": "\n" * 100_000 for n in range(4)}}, "message_too_large", "agent"),
    ],
    ids=["prompt", "NUL", "variable", "argument", "all together", "all together as JSON"],
)
async def test_what_linux_would_not_start_is_refused_by_name(
    sqlite_url: str, agent: dict[str, Any], code: str, field: str
) -> None:
    async with on_stage(sqlite_url) as stage:
        whole = {"provider": "p", "argv": ["true"], **agent}
        answer = await stage.api.post("/api/v1/sessions", json=session(agent=whole))
        assert code_of(answer, 422) == code
        assert set(answer.json()["fields"]) == {field}
        assert len(answer.text) < 1_000
        assert (await stage.api.get("/api/v1/sessions")).json() == []


def test_the_largest_agent_is_in_a_start_that_bridges_read() -> None:
    env = {f"A{n}": "x" * MAX_ARGUMENT_BYTES for n in range(5)}
    agent = {"provider": "p", "argv": ["true"], "env": env}
    label = "x" * 63
    domains = [f"{n:04}.{label}.{label}.{label}.{'y' * 50}.org" for n in range(1_024)]
    network = {"policy": "public_allowlist", "domains": domains}
    given = AttemptInput.model_validate({**session(agent=agent), "network": network})
    _require_agent_fits(given)
    longest = "x" * 128
    to = Addressee(
        session_id=longest,
        attempt_id=longest,
        fence=2**63 - 1,
        offer_id=longest,
        runner_id=longest,
        instance_id=longest,
    )
    start = given.start(to, key="A" * 43 + "=", handles=Handles(new_handle(), new_handle()))
    assert measured_size_bytes(start.to_wire()) < MAX_INBOUND_BYTES


async def test_the_values_of_the_agents_environment_are_not_shown(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        session_id = await stage.dispatch()
        for path in ("", "/diagnostics"):
            answer = await stage.api.get(f"/api/v1/sessions/{session_id}{path}")
            assert "SECRET" in answer.text
            assert "canary-value" not in answer.text
        bridge = await stage.bridge()
        start = await bridge.take_attempt()
        assert start["agent"]["env"] == {"SECRET": "canary-value"}


async def test_sessions_are_listed_newest_first(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        older = await stage.dispatch()
        stage.clock.advance(1_000)
        newer = await stage.dispatch()
        listed = (await stage.api.get("/api/v1/sessions", params={"limit": 5})).json()
        assert [s["sessionId"] for s in listed] == [newer, older]


@pytest.mark.requirement("B-08", "B-86", "B-87")
async def test_a_runner_is_shown_as_it_describes_itself_and_drains(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        bridge = await stage.bridge()
        await bridge.heartbeat(
            usedResources={"slots": 2}, activeCount=1, degradedReservationCount=1, pendingReports=3
        )
        shown = (await stage.api.get("/api/v1/runners/r1")).json()
        assert shown["usedResources"]["slots"] == 2
        assert (shown["activeCount"], shown["degradedReservationCount"]) == (1, 1)
        assert (shown["pendingReports"], shown["connected"]) == (3, True)
        assert (await stage.api.post("/api/v1/runners/r1/drain")).json()["settings"]["draining"]
        assert (await bridge.next("RunnerSettings"))["settings"]["draining"]
        assert (await bridge.heartbeat())["settings"]["draining"]
        again = await stage.connect("r1", "i2")
        assert (await again.register())["settings"]["draining"]
        answer = await stage.api.post("/api/v1/runners/r1/resume")
        assert not answer.json()["settings"]["draining"]
        assert not (await again.next("RunnerSettings"))["settings"]["draining"]


@pytest.mark.requirement("B-88")
async def test_a_reap_goes_to_the_connected_instance_and_its_outcome_is_kept(
    sqlite_url: str,
) -> None:
    async with on_stage(sqlite_url) as stage:
        bridge = await stage.bridge()
        answer = await stage.api.post("/api/v1/runners/r1/reap")
        assert answer.status_code == 202
        reap = await bridge.next("Reap")
        assert (reap["runnerInstanceId"], reap["scope"]) == ("i1", "orphans")
        outcome = {
            "requestId": reap["requestId"],
            "runnerInstanceId": "i1",
            "removed": 2,
            "absent": 1,
            "failed": 0,
            "degradedReservationCount": 0,
        }
        for disposition in ("persisted", "duplicate"):
            said = await bridge.call("SubmitReapOutcome", outcome)
            assert said == {"accepted": True, "disposition": disposition}
        listed = (await stage.api.get("/api/v1/runners/r1/reaps")).json()
        assert listed[0]["outcome"]["removed"] == 2
        wrong = {"scope": "attempt", "attemptId": "a", "fence": 1}
        answer = await stage.api.post("/api/v1/runners/r1/reap", json=wrong)
        assert code_of(answer, 404) == "unknown_dispatch"
        await bridge.stop()
        await _until_offline(stage, "r1")
        assert code_of(await stage.api.post("/api/v1/runners/r1/reap"), 409) == "runner_offline"


async def _until_offline(stage: Stage, runner_id: str) -> None:
    with anyio.fail_after(PATIENCE_S):
        while (await stage.api.get(f"/api/v1/runners/{runner_id}")).json()["connected"]:
            await anyio.lowlevel.checkpoint()


@pytest.mark.requirement("B-03")
async def test_a_legacy_command_goes_to_its_runner_and_its_result_is_kept(
    sqlite_url: str,
) -> None:
    async with on_stage(sqlite_url) as stage:
        wanted = {"runnerId": "r1", "repository": "repo", "command": ["true"], "env": {"K": "v"}}
        answer = await stage.api.post("/api/v1/dispatches", json=wanted)
        assert code_of(answer, 409) == "runner_offline"
        bridge = await stage.bridge()
        answer = await stage.api.post("/api/v1/dispatches", json=wanted)
        dispatch_id = answer.json()["dispatchId"]
        dispatch = await bridge.next("Dispatch")
        assert (dispatch["dispatchId"], dispatch["env"]) == (dispatch_id, {"K": "v"})
        await stage.api.post(f"/api/v1/dispatches/{dispatch_id}/cancel")
        cancel = await bridge.next("Cancel")
        assert (cancel["attemptId"], cancel["fence"]) == (dispatch_id, 0)
        result = {
            "dispatchId": dispatch_id,
            "succeeded": True,
            "exitCode": 0,
            "output": "done",
            "truncated": False,
        }
        for disposition in ("persisted", "duplicate"):
            kept = await bridge.call("SubmitLegacyResult", result)
            assert kept == {"accepted": True, "disposition": disposition}
        shown = (await stage.api.get(f"/api/v1/dispatches/{dispatch_id}")).json()
        assert shown["result"]["output"] == "done"
