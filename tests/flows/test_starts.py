"""Starts: one run for each reservation, none without one (B-04)."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from bridge_parts import (
    KEY,
    REPOSITORY,
    Bridge,
    memory_bridge,
    prepared,
    settings_for,
    wait_for,
)
from memory_engine import MemoryEngine
from scripted_hub import ScriptedHub, renewal

from forge_bridge.repositories import remove_repository
from forge_bridge.state_root import StateRoot
from forge_core import attempt as core
from forge_core.attempt import Now
from forge_core.attempt_records import moment_record
from forge_core.errors import DiskUnusable, ForgeError, RefusedError
from forge_core.labels import Owner
from forge_core.ready import RecordKind
from forge_core.resources import ResourceVector
from forge_core.supervisor_frames import MAX_INIT_BYTES
from forge_core.wire.codes import CleanupTrigger
from forge_core.wire.from_hub import MAX_ARGUMENT_BYTES
from forge_edges.clock import SystemClock
from forge_edges.ledger_file import LedgerFile

OTHER_KEY = bytes(32)


def leased(key: bytes, **more: Any) -> dict[str, Any]:
    return {"ttlMs": 60_000, "sequence": 0, "key": base64.b64encode(key).decode(), **more}


async def refused_start(bridge: Bridge, **lies: Any) -> dict[str, Any]:
    """The result of an accepted offer whose start says something else."""
    offer = await bridge.accept()
    bridge.hub.send("Start", {**bridge.start(offer), **lies})
    return await bridge.hub.over(offer["attemptId"])


@pytest.mark.requirement("B-04")
async def test_a_start_without_a_reservation_runs_nothing(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        offer = bridge.offer()
        bridge.hub.send("Start", bridge.start(offer))
        result = await bridge.hub.over(offer["attemptId"])
        assert (result["outcome"], result["failureCode"]) == ("failed", "start_timeout")
        assert result["cleanup"] == "complete"
        elsewhere = bridge.start(bridge.offer(runnerInstanceId="another"))
        bridge.hub.send("Start", elsewhere)
        late = await bridge.accept(expiresInMs=100)
        assert (await bridge.hub.over(late["attemptId"]))["failureCode"] == "start_timeout"
        bridge.hub.send("Start", bridge.start(late))
        await bridge.hub.over(await bridge.run("true"))
        assert not bridge.hub.of("SubmitDispatchResult", attemptId=elsewhere["attemptId"])
        assert len(bridge.hub.of("SubmitDispatchResult", attemptId=late["attemptId"])) == 1


@pytest.mark.requirement("B-04", "B-70")
async def test_a_second_start_changes_nothing_its_key_included(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        offer = await bridge.accept()
        attempt_id = offer["attemptId"]
        start = bridge.start(offer, "wait")
        hub.send("Start", start)
        hub.send("Start", {**start, "lease": leased(OTHER_KEY), "agent": {**start["agent"]}})
        hub.send("Start", {**start, "limits": "none"})
        await hub.event(attempt_id, "agent.started")
        run = bridge.runner.attempts[attempt_id, 1]
        hub.send("LeaseUpdate", renewal(attempt_id, 1, 1, OTHER_KEY))
        warning = await hub.event(attempt_id, "warning")
        assert warning["payload"] == {"code": "lease_renewal_refused", "detail": "wrong_mac"}
        hub.send("LeaseUpdate", renewal(attempt_id, 1, 1, KEY))
        hub.send("Cancel", {"attemptId": attempt_id, "fence": 1})
        await hub.over(attempt_id)
        assert run.state.lease is not None
        assert run.state.lease.sequence == 1
        assert len(hub.of("SubmitDispatchEvent", type="agent.started")) == 1
        assert [r["revision"] for r in hub.of("SubmitDispatchResult")] == [1, 2]


@pytest.mark.requirement("B-04")
async def test_a_start_that_comes_after_the_end_contradicts_nothing(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        offer = await bridge.accept()
        start = bridge.start(offer)
        bridge.hub.send("Start", start)
        await bridge.hub.over(offer["attemptId"])
        await bridge.until_idle()
        bridge.hub.send("Start", start)
        bridge.hub.send("Offer", offer)
        await bridge.hub.decision(offer, 2)
        bridge.hub.send("Start", start)
        await bridge.hub.over(await bridge.run("true"))
        results = bridge.hub.of("SubmitDispatchResult", attemptId=offer["attemptId"])
        assert [(r["revision"], r["outcome"]) for r in results] == [
            (1, "succeeded"),
            (2, "succeeded"),
        ]


@pytest.mark.requirement("B-04", "B-07")
async def test_a_start_may_overtake_the_acknowledgement_of_its_decision(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        hub = bridge.hub
        hub.answers["SubmitOfferDecision"] = hub.never
        offer = bridge.offer()
        hub.send("Offer", offer)
        hub.send("Start", bridge.start(offer))
        result = await hub.over(offer["attemptId"])
        assert result["outcome"] == "succeeded"


@pytest.mark.requirement("B-04")
async def test_a_malformed_start_ends_its_reservation_by_name(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        result = await refused_start(bridge, branch="-rf")
        assert (result["outcome"], result["failureCode"]) == ("failed", "internal_error")
        assert "branch" in result["summary"]
        secret = base64.b64encode(b"31 bytes are too few for a key.").decode()
        bridge.secrets.add(secret)
        result = await refused_start(bridge, lease=leased(KEY) | {"key": secret})
        assert "lease.key" in result["summary"]
        await bridge.until_idle()


@pytest.mark.requirement("B-04", "B-20", "B-51")
@pytest.mark.parametrize(
    ("lies", "named"),
    [
        ({"trustDomainId": "another"}, "trustDomainId"),
        ({"projectId": "another"}, "projectId"),
        ({"sessionId": "another"}, "sessionId"),
        ({"repository": "another"}, "repository"),
        ({"approvedCommit": "a" * 40}, "approvedCommit"),
        ({"network": {"policy": "open_public", "domains": []}}, "open_public"),
        ({"services": [{"name": "redis"}]}, "redis"),
        ({"publication": {"mode": "bridge_push", "handle": "h"}}, "bridge_push"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_start_that_departs_from_its_offer_runs_nothing(
    tmp_path: Path, lies: dict[str, Any], named: str
) -> None:
    async with memory_bridge(tmp_path) as bridge:
        result = await refused_start(bridge, **lies)
        assert (result["outcome"], result["failureCode"]) == ("failed", "internal_error")
        assert named in result["summary"]
        assert not bridge.hub.of("SubmitDispatchEvent", type="inventory")


@pytest.mark.requirement("B-04", "B-40")
async def test_a_repository_that_is_not_registered_any_more_fails_by_name(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        offer = await bridge.accept()
        remove_repository(bridge.state_root, REPOSITORY)
        await bridge.runner.repositories.refresh()
        bridge.hub.send("Start", bridge.start(offer))
        result = await bridge.hub.over(offer["attemptId"])
        assert result["failureCode"] == "workspace_invalid"


@pytest.mark.requirement("B-04")
async def test_a_start_that_names_another_offer_waits_for_the_right_one(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        offer = await bridge.accept()
        bridge.hub.send("Start", {**bridge.start(offer), "offerId": "another"})
        bridge.hub.send("Start", bridge.start(offer))
        await bridge.hub.over(offer["attemptId"])
        assert {r["outcome"] for r in bridge.hub.of("SubmitDispatchResult")} == {"succeeded"}


LedgerRecords = Sequence[tuple[str, Mapping[str, Any]]]


def refuse(
    monkeypatch: pytest.MonkeyPatch, error: ForgeError, *, but: Collection[str] = ()
) -> None:
    """From here on no ledger takes anything, except records of the kinds ``but``."""
    append_all = LedgerFile.append_all

    async def refusing(ledger: LedgerFile, records: LedgerRecords) -> None:
        if not {kind for kind, _ in records} <= set(but):
            raise error
        await append_all(ledger, records)

    monkeypatch.setattr(LedgerFile, "append_all", refusing)


@pytest.mark.requirement("B-86")
async def test_a_cleanup_that_cannot_be_recorded_now_keeps_its_capacity_and_the_bridge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with memory_bridge(tmp_path) as bridge:
        broken = DiskUnusable("cannot append: input/output error")
        kinds = set(RecordKind) - {RecordKind.REMOVAL}
        refuse(monkeypatch, broken, but=kinds)
        attempt_id = await bridge.run("true")
        await bridge.hub.next("Heartbeat", degradedReservationCount=1)
        monkeypatch.undo()
        await bridge.service.session.reaper.run_pass(CleanupTrigger.PERIODIC)
        assert (await bridge.hub.over(attempt_id))["outcome"] == "succeeded"
        await bridge.until_idle()


FULL = [
    RefusedError("cannot append: it would exceed 64 MiB", code="ledger_full"),
    RefusedError("cannot record: it has too many bytes", code="record_too_large"),
]


@pytest.mark.requirement("B-83", "B-86")
@pytest.mark.parametrize("full", FULL, ids=lambda error: error.code)
@pytest.mark.parametrize(
    ("but", "outcome"),
    [
        ({"reserved", "event"}, ("failed", "internal_error")),
        ({"reserved", "event", "started"}, ("failed", "internal_error")),
        ({"reserved", "event", "started", "intent", "fact"}, ("succeeded", None)),
    ],
    ids=["started", "intent", "result"],
)
async def test_an_attempt_whose_ledger_takes_nothing_more_ends_all_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    full: RefusedError,
    but: set[str],
    outcome: tuple[str, str | None],
) -> None:
    engine = MemoryEngine()
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        offer = await bridge.accept()
        refuse(monkeypatch, full, but=but)
        bridge.hub.send("Start", bridge.start(offer))
        result = await bridge.hub.over(offer["attemptId"])
        assert (result["outcome"], result.get("failureCode")) == outcome
        if outcome[1] is not None:
            assert str(full) in result["summary"]
        if "started" in but:
            await bridge.hub.next("SubmitCleanupReport", attemptId=offer["attemptId"])
        await bridge.until_idle()
        monkeypatch.undo()
        assert engine.is_empty
        await wait_for(lambda: not list((bridge.state_root / "attempts").iterdir()))
        await bridge.hub.over(await bridge.run("true"))


@pytest.mark.requirement("B-82", "B-83", "B-86")
@pytest.mark.parametrize("started", [False, True])
async def test_a_start_ends_a_dispatch_whose_ledger_takes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    hub, engine = ScriptedHub(url="http://127.0.0.1:1"), MemoryEngine()
    owner = Owner("runner-1", "an-earlier-instance", "attempt-0", 3, "project", "domain")
    now = Now(0, "2026-11-29T14:00:00.000Z")
    prepared(settings_for(tmp_path, hub))
    root = await StateRoot.open(tmp_path / "state", clock=SystemClock())
    _, ready = core.reserve(owner, "offer", ResourceVector(slots=1), now)
    records = [*ready.records, moment_record(RecordKind.STARTED, now)][: None if started else -1]
    ledger = await root.ledgers.create("attempt-0", 3)
    await ledger.append_all([(record.kind, record.data) for record in records])
    await root.ledgers.close()
    if started:
        engine.volumes[owner.name("workspace")] = owner.labels("workspace")
    refuse(monkeypatch, FULL[0])
    async with memory_bridge(tmp_path, hub, engine, runner_id="runner-1") as bridge:
        result = await hub.over("attempt-0")
        assert (result["outcome"], result["failureCode"]) == ("failed", "bridge_stopped")
        if started:
            report = await hub.next("SubmitCleanupReport", attemptId="attempt-0")
            assert [r["outcome"] for r in report["resources"]] == ["removed"]
            assert engine.is_empty
        await bridge.until_idle()
        assert not list((tmp_path / "state" / "attempts").glob("attempt-0*"))


@pytest.mark.requirement("B-04")
@pytest.mark.parametrize(
    ("agent", "field"),
    [
        ({"prompt": "\u20ac" * 43_350}, "agent.prompt"),
        ({"env": {"HUGE": "x" * (MAX_ARGUMENT_BYTES + 1)}}, "agent.env.HUGE"),
        ({"argv": ["true", "x" * (MAX_ARGUMENT_BYTES + 1)]}, "agent.argv.1"),
    ],
    ids=["prompt", "variable", "argument"],
)
async def test_a_start_that_linux_would_not_start_is_refused_by_name(
    tmp_path: Path, agent: Mapping[str, Any], field: str
) -> None:
    engine = MemoryEngine()
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        whole = {"provider": "command", "argv": ["true"], **agent}
        result = await refused_start(bridge, agent=whole)
        assert (result["outcome"], result["failureCode"]) == ("failed", "internal_error")
        assert f"{field}: " in result["summary"]
        assert engine.created == []


@pytest.mark.requirement("B-04", "B-60")
async def test_an_environment_that_is_too_large_together_is_named_by_its_largest(
    tmp_path: Path,
) -> None:
    """Each fits, and each message does; only the bridge sees all of it."""
    engine = MemoryEngine()
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        value = "of-the-hub" * 12_900
        secrets = {f"S{n}": f"secret-{n}-" * 10_000 for n in range(5)}
        bridge.secrets |= {*secrets.values()}
        bridge.hub.answers["RedeemSecretGrant"] = {"accepted": True, "secrets": secrets}
        agent = {"provider": "command", "argv": ["true"], "env": {f"A{n}": value for n in range(5)}}
        attempt_id = await bridge.run(agent=agent, secretGrants=["handle"])
        result = await bridge.hub.over(attempt_id)
        assert (result["outcome"], result["failureCode"]) == ("failed", "agent_failed")
        assert f"{MAX_INIT_BYTES} is the most" in result["summary"]
        assert "A0 129000, A1 129000, A2 129000" in result["summary"]
        assert "of-the-hub" not in result["summary"]
        assert engine.is_empty
