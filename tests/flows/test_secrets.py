"""Secret grants: redeemed once, given to the agent, masked everywhere else (B-60)."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from bridge_parts import KEY, memory_bridge, real_bridge, wait_for
from scripted_hub import HubException

from engines import Engine
from forge_bridge.sandbox import stage
from forge_bridge.sandbox.place import InContainers
from forge_bridge.sandbox.services import Services
from forge_core.redaction import MAX_SECRETS, Masker
from forge_core.resources import ResourceVector
from forge_core.wire.from_hub import Start

SECRET = "s3cret-with-many-words-in-it"


def granted(**secrets: str) -> dict[str, Any]:
    return {"accepted": True, "secrets": secrets}


@pytest.mark.engine("d26")
@pytest.mark.requirement("B-60")
async def test_a_secret_reaches_the_agent_and_nobody_else(
    tmp_path: Path, engine: Engine, runner_id: str
) -> None:
    script = (
        'test "$DEPLOY_KEY" = "' + base64.b64encode(SECRET.encode()).decode() + '" && exit 9; '
        'printf "it is %s" "${DEPLOY_KEY%-with*}"; sleep 0.3; '
        'printf "%s.\\n" "${DEPLOY_KEY#s3cret}"; '
        'echo "$DEPLOY_KEY" > VERSION; test ${#DEPLOY_KEY} = ' + str(len(SECRET))
    )
    async with real_bridge(tmp_path, engine, runner_id) as bridge:
        hub = bridge.hub
        bridge.secrets.add(SECRET)
        answers = {"one": granted(DEPLOY_KEY=SECRET), "two": granted(SHORT="abc")}
        hub.answers["RedeemSecretGrant"] = lambda payload: answers[payload["handle"]]
        attempt_id = await bridge.run("sh", "-c", script, secretGrants=["one", "two"])
        result = await hub.over(attempt_id)
        assert result["outcome"] == "succeeded", result
        assert [call["handle"] for call in hub.of("RedeemSecretGrant")] == ["one", "two"]
        assert hub.of("RedeemSecretGrant")[0]["runnerInstanceId"] == hub.instance_id
        redeemed = await hub.event(attempt_id, "secrets.redeemed")
        assert redeemed["payload"] == {"names": ["DEPLOY_KEY", "SHORT"]}
        warning = await hub.event(attempt_id, "warning")
        assert warning["payload"]["code"] == "secret_not_maskable"
        assert "SHORT" in warning["payload"]["detail"]
        logs = hub.of("SubmitDispatchEvent", attemptId=attempt_id, type="log")
        assert "".join(log["payload"]["text"] for log in logs) == "it is ***.\n"


@pytest.mark.requirement("B-60")
@pytest.mark.parametrize("command", ["true", "false", "wait"])
async def test_the_bridge_lets_go_of_a_secret_when_the_attempt_has_ended(
    tmp_path: Path, command: str
) -> None:
    async with memory_bridge(tmp_path) as bridge:
        bridge.secrets.add(SECRET)
        bridge.hub.answers["RedeemSecretGrant"] = lambda _payload: granted(KEY=SECRET)
        attempt_id = await bridge.run(command, secretGrants=["handle"])
        run = bridge.runner.attempts[attempt_id, 1]
        await bridge.hub.event(attempt_id, "secrets.redeemed")
        if command == "wait":
            assert run.masker.mask(SECRET) == "***"
            bridge.hub.send("Cancel", {"attemptId": attempt_id, "fence": 1, "reason": "enough"})
        await bridge.hub.over(attempt_id)
        assert run.masker.mask(SECRET) == SECRET, "nothing of it is known any more"


@pytest.mark.requirement("B-60")
@pytest.mark.parametrize(
    "answer",
    [
        {"accepted": False, "reason": "unknown_handle"},
        HubException("no"),
        None,
        {"accepted": True, "secrets": ["A"]},
        {"accepted": True, "secrets": {"A": 7}},
        {"accepted": True, "secrets": {"A=B": SECRET}},
        {"accepted": True, "secrets": {"": SECRET}},
        {"accepted": True, "secrets": {"NUL": SECRET + "\0"}},
        {"accepted": True, "secrets": {f"S{n}": SECRET for n in range(1_025)}},
        {"accepted": True, "secrets": {"LONG": SECRET, "LONGER": "s" * MAX_SECRETS}},
    ],
    ids=[
        "no",
        "error",
        "null",
        "array",
        "number",
        "equals",
        "nameless",
        "nul",
        "too many",
        "too large",
    ],
)
async def test_an_answer_that_is_no_grant_fails_the_attempt_by_name(
    tmp_path: Path, answer: object
) -> None:
    async with memory_bridge(tmp_path) as bridge:
        bridge.secrets.add(SECRET)
        bridge.hub.answers["RedeemSecretGrant"] = lambda _payload: answer
        result = await bridge.hub.over(await bridge.run("true", secretGrants=["handle"]))
        assert (result["outcome"], result["failureCode"]) == ("failed", "secret_grant_denied")
        assert len(bridge.hub.of("RedeemSecretGrant")) == 1


@pytest.mark.requirement("B-60")
@pytest.mark.parametrize("size", [stage.MASKED_AT_ONCE, stage.MASKED_AT_ONCE + 1])
async def test_the_event_loop_goes_on_while_the_forms_of_many_secrets_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    made_in: list[threading.Thread] = []

    def make(secrets: Iterable[str]) -> Masker:
        made_in.append(threading.current_thread())
        return Masker(secrets)

    monkeypatch.setattr(stage, "Masker", make)
    async with memory_bridge(tmp_path) as bridge:
        secret = SECRET.ljust(size, "s")
        bridge.secrets.add(secret)
        bridge.hub.answers["RedeemSecretGrant"] = granted(KEY=secret)
        await bridge.hub.over(await bridge.run("true", secretGrants=["handle"]))
    in_the_loop = made_in[0] is threading.current_thread()
    assert in_the_loop == (size <= stage.MASKED_AT_ONCE)


@pytest.mark.requirement("B-60", "B-55")
async def test_no_room_for_the_passwords_of_services_is_told_as_what_it_is(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        attempt_id = await bridge.run("wait")
        run, sandbox = bridge.runner.attempts[attempt_id, 1], bridge.runner.sandbox
        offer = bridge.offer(attempt_id)
        start = Start.model_validate(bridge.start(offer, services=[{"name": "redis"}]))
        resources = ResourceVector(slots=1, pids=512, memory_bytes=1 << 30, cpu_millis=2000)
        assert sandbox is not None
        engine = bridge.runner.engine
        place = InContainers(engine)
        context = stage.StageContext(run, start, resources, engine, sandbox, place)
        context.secrets = {"LONG": "s" * MAX_SECRETS}
        with pytest.raises(stage.StageFailed, match="cannot mask secrets") as failed:
            await Services().start(context, bridge.runner.tasks)
        assert failed.value.code == "secret_grant_denied"
        bridge.hub.send("Cancel", {"attemptId": attempt_id, "fence": 1, "reason": "enough"})
        await bridge.hub.over(attempt_id)


@pytest.mark.requirement("B-60", "B-07")
async def test_a_lost_answer_fails_the_attempt_because_a_handle_works_once(
    tmp_path: Path,
) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        hub.answers["RedeemSecretGrant"] = hub.never
        attempt_id = await bridge.run("true", secretGrants=["handle"])
        await hub.next("RedeemSecretGrant")
        hub.snapshot = [{"attemptId": attempt_id, "fence": 1, "state": "running"}]
        hub.drop()
        assert (await hub.over(attempt_id))["failureCode"] == "secret_grant_denied"
        assert len(hub.of("RedeemSecretGrant")) == 1


@pytest.mark.requirement("B-60", "B-71")
async def test_a_hub_that_is_away_is_waited_for_until_the_lease_ends(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, max_concurrent_sandboxes=3) as bridge:
        hub = bridge.hub
        hub.answers["RedeemSecretGrant"] = granted(KEY=SECRET)
        bridge.secrets.add(SECRET)
        offers = [await bridge.accept() for _ in range(2)]
        lease = {"sequence": 0, "key": base64.b64encode(KEY).decode()}
        for offer, ttl_ms in zip(offers, (60_000, 500), strict=True):
            start = bridge.start(offer, "env", "KEY", secretGrants=["h"])
            hub.send("Start", {**start, "lease": {**lease, "ttlMs": ttl_ms}})
        patient, brief = (bridge.runner.attempts[offer["attemptId"], 1] for offer in offers)
        bridge.runner.hub.offline(bridge.runner.hub._connection)  # type: ignore[arg-type]
        await wait_for(lambda: brief.state.failure is not None)
        assert patient.state.phase == "running"
        hub.snapshot = [
            {"attemptId": offer["attemptId"], "fence": 1, "state": "running"} for offer in offers
        ]
        hub.drop()
        assert (await hub.over(offers[0]["attemptId"]))["outcome"] == "succeeded"
        assert (await hub.over(offers[1]["attemptId"]))["failureCode"] == "lease_expired"
        assert len(hub.of("RedeemSecretGrant")) == 1
        (log,) = hub.of("SubmitDispatchEvent", type="log")
        assert log["payload"]["text"] == "***"
