"""Grants are redeemed once, by whom they were made for; nothing of them is kept (B-60, B-61)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from grant_parts import (
    OTHER,
    PASSWORD,
    PUSHES,
    RESULT,
    SECRET,
    URL,
    make_sources,
    private_file,
    publish_request,
    pushing_bridge,
    secret_request,
)
from scripted_bridge import ScriptedBridge, Stage, on_stage, session
from sqlalchemy import select

from forge_hub.store.database import open_database
from forge_hub.store.tables import metadata


async def grants_of(stage: Stage, session_id: str) -> list[dict[str, Any]]:
    shown = (await stage.api.get(f"/api/v1/sessions/{session_id}/diagnostics")).json()
    grants: list[dict[str, Any]] = shown["grants"]
    return grants


async def refusal(bridge: ScriptedBridge, method: str, payload: dict[str, Any]) -> str:
    """Why nothing is given out; and nothing is."""
    answer = await bridge.call(method, payload)
    assert not answer["accepted"], answer
    assert not answer.get("secrets")
    assert "credential" not in answer
    assert "detail" not in answer, "where things are is nobody else's business"
    return str(answer["reason"])


async def everything_in(url: str) -> str:
    """Every cell of every table."""
    async with open_database(url) as database:
        return await database.read(
            lambda connection: repr(
                [connection.execute(select(table)).all() for table in metadata.sorted_tables]
            )
        )


@pytest.mark.requirement("B-60")
async def test_a_handle_is_opaque_works_once_and_is_not_kept(
    tmp_path: Path, database_url: str
) -> None:
    async with on_stage(database_url, **make_sources(tmp_path)) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch(secrets=["DEPLOY_KEY", "OTHER"])
        offer = await bridge.next("Offer")
        assert "secretGrants" not in offer
        assert SECRET not in json.dumps(offer)
        await bridge.decide(offer, "accepted", runtime="docker")
        start = await bridge.next("Start")
        (handle,) = start["secretGrants"]
        assert len(handle) >= 43, "256 bits"
        assert start["publication"] == {"mode": "shared_filesystem"}
        (shown,) = await grants_of(stage, session_id)
        assert (shown["kind"], shown["names"]) == ("secrets", ["DEPLOY_KEY", "OTHER"])
        assert shown["redeemedAt"] is None

        answer = await bridge.call("RedeemSecretGrant", secret_request(start))
        assert answer == {"accepted": True, "secrets": {"DEPLOY_KEY": SECRET, "OTHER": OTHER}}
        (shown,) = await grants_of(stage, session_id)
        assert shown["redeemedAt"] is not None
        assert await refusal(bridge, "RedeemSecretGrant", secret_request(start)) == "grant_spent"
        everything = json.dumps(
            [await stage.session(session_id), await grants_of(stage, session_id)]
        )
    kept = everything + await everything_in(database_url)
    assert "DEPLOY_KEY" in kept
    for secret in (SECRET, OTHER, OTHER.replace("\n", "\\n"), handle):
        assert secret not in kept


@pytest.mark.requirement("B-60")
async def test_of_many_who_ask_at_once_one_gets_it(tmp_path: Path, database_url: str) -> None:
    async with on_stage(database_url, **make_sources(tmp_path)) as stage:
        bridge = await stage.bridge()
        await stage.dispatch(secrets=["DEPLOY_KEY"])
        start = await bridge.take_attempt()
        answers: list[dict[str, Any]] = []

        async def ask() -> None:
            answers.append(await bridge.call("RedeemSecretGrant", secret_request(start)))

        async with anyio.create_task_group() as tasks:
            for _ in range(30):
                tasks.start_soon(ask)
        accepted = [answer for answer in answers if answer["accepted"]]
        assert len(accepted) == 1
        assert {a["reason"] for a in answers if not a["accepted"]} == {"grant_spent"}


@pytest.mark.requirement("B-60", "B-61")
async def test_nobody_else_redeems_it_and_trying_consumes_nothing(
    tmp_path: Path, database_url: str
) -> None:
    async with on_stage(database_url, **make_sources(tmp_path)) as stage:
        first, second = await pushing_bridge(stage), await pushing_bridge(stage, "r2", "i2")
        wanted = {"secrets": ["DEPLOY_KEY"], **PUSHES}
        await stage.dispatch(**wanted, runnerId="r1")
        mine = await first.take_attempt()
        await stage.dispatch(**wanted, runnerId="r2")
        theirs = await second.take_attempt()
        for method, request in (
            ("RedeemSecretGrant", secret_request),
            ("RedeemPublishGrant", publish_request),
        ):
            tries = [
                (second, request(mine), "instance_mismatch"),
                (second, request(mine, runnerInstanceId="i2"), "instance_mismatch"),
                (first, request(mine, runnerInstanceId="i2"), "instance_mismatch"),
                (second, request(theirs, handle=request(mine)["handle"]), "grant_unknown"),
                (first, request(mine, attemptId=theirs["attemptId"]), "grant_unknown"),
                (first, request(mine, fence=2), "grant_unknown"),
                (first, request(mine, handle="h"), "grant_unknown"),
            ]
            for bridge, payload, reason in tries:
                assert await refusal(bridge, method, payload) == reason, payload
        crossed = publish_request(mine, handle=mine["secretGrants"][0])
        assert await refusal(first, "RedeemPublishGrant", crossed) == "grant_unknown"
        crossed = secret_request(mine, handle=mine["publication"]["handle"])
        assert await refusal(first, "RedeemSecretGrant", crossed) == "grant_unknown"
        for start, bridge in ((mine, first), (theirs, second)):
            assert (await bridge.call("RedeemSecretGrant", secret_request(start)))["accepted"]
            assert (await bridge.call("RedeemPublishGrant", publish_request(start)))["accepted"]


@pytest.mark.requirement("B-60", "B-61")
@pytest.mark.parametrize("how", ["cancelled", "ended", "lease over", "superseded"])
async def test_a_dispatch_that_does_not_run_redeems_nothing(
    tmp_path: Path, database_url: str, how: str
) -> None:
    async with on_stage(database_url, **make_sources(tmp_path)) as stage:
        bridge = await pushing_bridge(stage)
        session_id = await stage.dispatch(secrets=["DEPLOY_KEY"], **PUSHES, retries=1)
        start = await bridge.take_attempt()
        reason = "not_running"
        if how == "cancelled":
            assert (await stage.api.post(f"/api/v1/sessions/{session_id}/cancel")).is_success
        elif how == "ended":
            await bridge.result(start, outcome="failed", failureCode="agent_failed")
        elif how == "lease over":
            stage.clock.advance(60_000)
        else:
            await bridge.result(start, outcome="failed", failureCode="bridge_stopped")
            await bridge.next("Offer")
            reason = "stale_fence"
        assert await refusal(bridge, "RedeemSecretGrant", secret_request(start)) == reason
        assert await refusal(bridge, "RedeemPublishGrant", publish_request(start)) == reason


@pytest.mark.requirement("B-61")
async def test_a_credential_is_for_one_repository_branch_and_commit_and_for_a_while(
    tmp_path: Path, database_url: str
) -> None:
    async with on_stage(database_url, **make_sources(tmp_path)) as stage:
        bridge = await pushing_bridge(stage)
        session_id = await stage.dispatch(**PUSHES)
        start = await bridge.take_attempt()
        assert start["publication"]["mode"] == "bridge_push"
        assert "secretGrants" not in start or start["secretGrants"] == []
        imported = {"resultCommit": RESULT, "files": 1, "bytes": 1}
        assert (await bridge.event(start, "e1", "output.imported", imported, sequence=1))[
            "accepted"
        ]
        for wrong in ({"branch": "other"}, {"resultCommit": "c" * 40}):
            reason = await refusal(bridge, "RedeemPublishGrant", publish_request(start, **wrong))
            assert reason == "publication_mismatch"
        answer = await bridge.call("RedeemPublishGrant", publish_request(start))
        assert answer == {
            "accepted": True,
            "repositoryUrl": URL,
            "username": "forge",
            "credential": PASSWORD,
            "expiresAt": "2026-11-29T10:21:40.000Z",
        }
        assert stage.clock.utc() == "2026-11-29T10:16:40.000Z"
        (grant,) = await grants_of(stage, session_id)
        assert (grant["kind"], grant["branch"], grant["resultCommit"]) == (
            "publication",
            "main",
            RESULT,
        )
        assert grant["redeemedAt"] is not None
        assert await refusal(bridge, "RedeemPublishGrant", publish_request(start)) == "grant_spent"
        kept = json.dumps([await stage.session(session_id), grant])
    kept += await everything_in(database_url)
    assert PASSWORD not in kept
    assert start["publication"]["handle"] not in kept


@pytest.mark.requirement("B-60", "B-61")
async def test_what_cannot_be_had_any_more_costs_the_handle_and_tells_nothing(
    tmp_path: Path, sqlite_url: str
) -> None:
    sources = make_sources(tmp_path)
    async with on_stage(sqlite_url, **sources) as stage:
        bridge = await pushing_bridge(stage)
        await stage.dispatch(secrets=["DEPLOY_KEY", "OTHER"], **PUSHES)
        start = await bridge.take_attempt()
        (sources["secrets_directory"] / "p-1" / "OTHER").chmod(0o644)
        reason = await refusal(bridge, "RedeemSecretGrant", secret_request(start))
        assert reason == "secret_unavailable"
        (sources["secrets_directory"] / "p-1" / "OTHER").chmod(0o600)
        assert await refusal(bridge, "RedeemSecretGrant", secret_request(start)) == "grant_spent"
        path = sources["credentials_directory"] / "p-1" / "repo.json"
        expired = {**json.loads(path.read_text()), "expiresAt": "2026-11-29T01:00:00Z"}
        path.write_text(json.dumps(expired))
        reason = await refusal(bridge, "RedeemPublishGrant", publish_request(start))
        assert reason == "credential_unavailable"


@pytest.mark.requirement("B-60", "B-61")
async def test_a_session_that_could_not_be_served_is_refused_when_it_is_made(
    tmp_path: Path, sqlite_url: str
) -> None:
    sources = make_sources(tmp_path)
    secrets = sources["secrets_directory"] / "p-1"
    private_file(secrets / "EMPTY", "\n")
    private_file(secrets / "BINARY", "x")
    (secrets / "BINARY").write_bytes(b"\xff\xfe")
    private_file(secrets / "HUGE", "x" * 70_000)
    private_file(secrets / "OPEN", SECRET)
    (secrets / "OPEN").chmod(0o640)
    (secrets / "LINK").symlink_to("/etc/hostname")
    (secrets / "DIRECTORY").mkdir()
    credentials = sources["credentials_directory"] / "p-1"
    private_file(credentials / "broken.json", f'{{"credential": "{PASSWORD}"')
    private_file(
        credentials / "ssh.json",
        json.dumps({"repositoryUrl": "ssh://x/y", "username": "u", "credential": PASSWORD}),
    )
    async with on_stage(sqlite_url, **sources) as stage:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"secrets": ["MISSING"]}, "secret_unavailable"),
            ({"secrets": ["EMPTY"]}, "secret_unavailable"),
            ({"secrets": ["BINARY"]}, "secret_unavailable"),
            ({"secrets": ["HUGE"]}, "secret_unavailable"),
            ({"secrets": ["OPEN"]}, "secret_unavailable"),
            ({"secrets": ["LINK"]}, "secret_unavailable"),
            ({"secrets": ["DIRECTORY"]}, "secret_unavailable"),
            ({"secrets": ["../p-1/DEPLOY_KEY"]}, "invalid_request"),
            ({"secrets": ["DEPLOY_KEY"], "projectId": "p-2"}, "secret_unavailable"),
            ({**PUSHES, "repository": "elsewhere"}, "credential_unavailable"),
            ({**PUSHES, "repository": "broken"}, "credential_unavailable"),
            ({**PUSHES, "repository": "ssh"}, "credential_unavailable"),
            ({**PUSHES, "repository": "../p-1/repo"}, "credential_unavailable"),
            ({**PUSHES, "projectId": "p-2"}, "credential_unavailable"),
            ({"publicationMode": "bridge_push"}, "invalid_request"),
        ]
        for wanted, code in cases:
            answer = await stage.api.post("/api/v1/sessions", json=session(**wanted))
            assert (answer.status_code, answer.json()["code"]) == (422, code), wanted
            assert SECRET not in answer.text
            assert PASSWORD not in answer.text
        secrets.chmod(0o770)
        answer = await stage.api.post("/api/v1/sessions", json=session(secrets=["DEPLOY_KEY"]))
        assert f"run chmod 700 {secrets}" in answer.json()["detail"]
    async with on_stage(sqlite_url) as stage:
        answer = await stage.api.post("/api/v1/sessions", json=session(secrets=["DEPLOY_KEY"]))
        assert answer.json()["code"] == "no_secret_source"
        answer = await stage.api.post("/api/v1/sessions", json=session(**PUSHES))
        assert answer.json()["code"] == "no_credential_source"
